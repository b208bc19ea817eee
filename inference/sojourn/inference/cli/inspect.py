"""`sojourn inspect`: what a model folder holds, from its configurations and the headers of its weights alone."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sojourn.inference.loading.folder import ComponentFolder, ModelFolder, read_folder


@dataclass(frozen=True, kw_only=True)
class ComponentReport:
    """One component that has weights.

    Attributes:
        name, class_name: As in the pipeline.
        parameters: Elements of all its tensors.
        size_bytes: Bytes of all its tensors in the files.
        dtypes: Bytes by data type.
        files: Number of weight files.
    """

    name: str
    class_name: str
    parameters: int
    size_bytes: int
    dtypes: dict[str, int]
    files: int


def inspect(
    model: Annotated[Path, typer.Argument(help="Model folder in the diffusers modular layout.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a model is made of: components, parameters, bytes, data types.

    Nothing is loaded: configurations and the headers of the weight files say it all, so it takes no memory and no time,
    and a damaged file is told as `sojourn serve` would tell it.
    """
    folder = read_folder(model)
    reports = [report(component) for component in folder.components.values() if component.files]
    if as_json:
        print(json.dumps(_as_json(folder, reports)))
    else:
        Console().print(_table(folder, reports))


def report(component: ComponentFolder) -> ComponentReport:
    """Sums up one component."""
    dtypes: Counter[str] = Counter()
    for tensor in component.tensors:
        dtypes[tensor.dtype] += tensor.size_bytes
    return ComponentReport(
        name=component.name,
        class_name=component.class_name,
        parameters=sum(tensor.elements for tensor in component.tensors),
        size_bytes=dtypes.total(),
        dtypes=dict(dtypes.most_common()),
        files=len(component.files),
    )


def _as_json(folder: ModelFolder, reports: list[ComponentReport]) -> dict[str, object]:
    return {
        "path": str(folder.path),
        "pipeline_class": folder.pipeline_class,
        "parameters": sum(part.parameters for part in reports),
        "size_bytes": sum(part.size_bytes for part in reports),
        "components": [asdict(part) for part in reports],
        "absent": sorted(folder.absent),
    }


def _table(folder: ModelFolder, reports: list[ComponentReport]) -> Table:
    table = Table(title=f"{folder.path}: {folder.pipeline_class}", title_justify="left", show_footer=True)
    total = sum(part.size_bytes for part in reports)
    table.add_column("component", "all")
    table.add_column("class")
    table.add_column("parameters", f"{sum(part.parameters for part in reports):,}", justify="right")
    table.add_column("size", mebibytes(total), justify="right")
    table.add_column("dtype")
    table.add_column("files", str(sum(part.files for part in reports)), justify="right")
    for part in reports:
        dtypes = ", ".join(dtype.lower() for dtype in part.dtypes)
        size = mebibytes(part.size_bytes)
        table.add_row(part.name, part.class_name, f"{part.parameters:,}", size, dtypes, str(part.files))
    for name in folder.absent:
        table.add_row(name, "[dim]not in this folder[/]", "", "", "", "")
    return table


def mebibytes(size_bytes: int) -> str:
    """Bytes as MiB, or GiB from 1024 MiB on."""
    size_mib = size_bytes / 2**20
    return f"{size_mib / 1024:,.2f} GiB" if size_mib >= 1024 else f"{size_mib:,.2f} MiB"
