"""`sojourn inspect`: what a model folder holds, from its configurations and the headers of its weights alone."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from sojourn.inference.adaln.overrides import check_components, parse_overrides
from sojourn.inference.adaln.saving import Saving, saving_of
from sojourn.inference.adaln.settings import PlanCacheSettings
from sojourn.inference.cli.plan_cache import FamilyOption
from sojourn.inference.loading.folder import read_folder
from sojourn.inference.loading.inspection import ComponentInspection, ModelInspection, inspect_folder


def inspect(
    model: Annotated[Path, typer.Argument(help="Model folder in the diffusers modular layout.", show_default=False)],
    adaln_family: FamilyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False,
) -> None:
    """Show what a model is made of: components, parameters, sizes, data types, and what the AdaLN plan cache saves.

    Nothing is loaded: configurations and the headers of the weight files say it all, so it takes no memory and no time,
    and a damaged file is told as `sojourn serve` would tell it.
    """
    settings = PlanCacheSettings(families=parse_overrides(adaln_family or []))
    parts = read_folder(model).components
    check_components(settings.families, parts)
    transformers = {name: settings.projected_as(name, part.class_name) for name, part in parts.items()}
    inspection = inspect_folder(model, transformers=transformers)
    savings = [saving for part in parts.values() if (saving := saving_of(part, settings))]
    if as_json:
        cached = [asdict(saving) | {"saved_bytes": saving.saved_bytes} for saving in savings]
        print(json.dumps(asdict(inspection) | {"plan_cache": cached}, default=str))
    else:
        Console().print(_table(inspection))
        for saving in savings:
            Console().print(_saving(saving, settings))


def _saving(saving: Saving, settings: PlanCacheSettings) -> str:
    """What the plan cache does for one transformer at its default size."""
    held = f"{saving.component}: {settings.plans} plans of {settings.width} rows"
    rows = f"take {readable_bytes(saving.slab_bytes)} in place of {readable_bytes(saving.weight_bytes)}"
    if saving.saved_bytes <= 0:
        return f"{held} {rows}: the AdaLN plan cache saves nothing here"
    return f"{held} {rows}: the AdaLN plan cache saves {readable_bytes(saving.saved_bytes)}"


def _table(inspection: ModelInspection) -> Table:
    parts = [part for part in inspection.components if part.files]
    title = f"{inspection.path}: {inspection.pipeline_class}"
    table = Table(title=title, title_justify="left", show_footer=True)
    table.add_column("component", "all")
    table.add_column("class", overflow="fold")
    table.add_column("parameters", f"{sum(part.parameters for part in parts):,}", justify="right")
    table.add_column("size", readable_bytes(sum(part.size_bytes for part in parts)), justify="right", no_wrap=True)
    table.add_column("dtype")
    table.add_column("AdaLN", _adaln_share(*parts), justify="right")
    for part in parts:
        table.add_row(*_row(part))
    for name in inspection.absent:
        table.add_row(name, "[dim]not in this folder[/]", "", "", "", "")
    return table


def _row(part: ComponentInspection) -> tuple[str, ...]:
    dtypes = ", ".join(part.dtypes).lower()
    size = readable_bytes(part.size_bytes)
    return part.name, part.class_name, f"{part.parameters:,}", size, dtypes, _adaln_share(part)


def _adaln_share(*parts: ComponentInspection) -> str:
    """Share of the bytes that AdaLN projections take; blank where there are none."""
    adaln_bytes = sum(part.adaln_bytes for part in parts)
    return f"{adaln_bytes / sum(part.size_bytes for part in parts):.1%}" if adaln_bytes else ""


def readable_bytes(size_bytes: int) -> str:
    """Bytes in MiB, or in GiB from 1024 MiB on."""
    size_mib = size_bytes / 2**20
    return f"{size_mib / 1024:,.2f} GiB" if size_mib >= 1024 else f"{size_mib:,.2f} MiB"
