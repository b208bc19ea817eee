"""`sojourn adaln build`: rows of schedules into a store, before any request asks for them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from sojourn.inference.adaln.overrides import parse_overrides
from sojourn.inference.adaln.settings import PlanCacheSettings
from sojourn.inference.cli.exits import CommandFailed, Exit
from sojourn.inference.cli.loading import DeviceOption, PrecisionOption
from sojourn.inference.cli.plan_cache import FamilyOption
from sojourn.inference.requests import Workflow

if TYPE_CHECKING:
    from sojourn.inference.adaln.schedules import Built

app = typer.Typer(help="The AdaLN plan cache.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """The AdaLN plan cache: modulation rows that stand for weights."""


@app.command()
def build(
    model: Annotated[Path, typer.Option(help="Model folder in the diffusers modular layout.", show_default=False)],
    steps: Annotated[str, typer.Option(help="Steps of each schedule, such as 8,30,50.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the store.", show_default=False)],
    workflow: Annotated[Workflow, typer.Option(help="What conditions the requests.")] = Workflow.T2VA,
    flow_shift: Annotated[
        float | None, typer.Option(help="Shift of the video schedule; the model's own without it.", show_default=False)
    ] = None,
    audio_flow_shift: Annotated[
        float | None, typer.Option(help="Shift of the audio schedule; the model's own without it.", show_default=False)
    ] = None,
    soundtrack: Annotated[bool, typer.Option("--soundtrack", help="Of ref2va: references that bring sound.")] = False,
    device: DeviceOption = "auto",
    dtype: PrecisionOption = "bfloat16",
    adaln_precision: Annotated[str, typer.Option(help="match or fp32, as the server.", metavar="HOW")] = "match",
    adaln_family: FamilyOption = None,
    store_bytes: Annotated[int, typer.Option(help="Size cap of the store.")] = PlanCacheSettings.store_bytes,
) -> None:
    """Build the rows of schedules into a store that servers map.

    Rows belong to the device, the library versions and the number of threads that made them: build where you serve.
    For instance: sojourn adaln build --model MODEL --workflow t2va --steps 8,30,50 -o STORE
    """
    settings = PlanCacheSettings(
        precision=adaln_precision,  # type: ignore[arg-type]
        store=output,
        store_bytes=store_bytes,
        families=parse_overrides(adaln_family or []),
    )
    if not model.is_dir():
        raise CommandFailed(f"{model}: no such folder", Exit.INVALID)
    counts = _steps(steps)

    import torch
    from sojourn.inference.adaln.schedules import Schedule, build_schedules
    from sojourn.inference.pipeline.load import DeviceChoice, torch_device

    schedules = [
        Schedule(
            workflow=workflow,
            steps=count,
            flow_shift=flow_shift,
            audio_flow_shift=audio_flow_shift,
            has_soundtrack=soundtrack,
        )
        for count in counts
    ]
    build_schedules(
        model,
        schedules,
        output,
        dtype=getattr(torch, dtype),
        device=torch_device(DeviceChoice(device)),
        precision=settings.precision,
        store_bytes=store_bytes,
        families=settings.families,
        tell=_tell,
    )


def _steps(text: str) -> list[int]:
    """Reads "8,30,50"; a schedule has two points at least."""
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        raise CommandFailed(f"--steps {text}: whole numbers such as 8,30,50", Exit.INVALID) from None
    if min(counts) < 2:
        raise CommandFailed(f"--steps {text}: at least 2 each", Exit.INVALID)
    return counts


def _tell(built: "Built") -> None:
    what = "built" if built.is_new else "already there"
    Console().print(f"{built.schedule.workflow} {built.schedule.steps} steps: {built.plans} plans {what}, {built.path}")
