"""The model options that commands share, and the loading that they ask for; torch is imported only when it begins."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from sojourn.inference.adaln.counters import Observer
from sojourn.inference.adaln.settings import PlanCacheSettings
from sojourn.inference.cli.exits import CommandFailed, Exit
from sojourn.inference.offload.observer import Observer as OffloadObserver
from sojourn.inference.offload.observer import silent
from sojourn.inference.offload.options import OffloadOptions
from sojourn.inference.quality.observer import Observer as QualityObserver
from sojourn.inference.quality.observer import silent as silent_quality
from sojourn.inference.quality.settings import QualitySettings

if TYPE_CHECKING:
    from sojourn.inference.pipeline import Pipeline

DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("bfloat16", "float32")


def _one_of(values: tuple[str, ...]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in values:
            raise typer.BadParameter(f"{value!r} is none of {', '.join(values)}")
        return value

    return check


DeviceOption = Annotated[
    str, typer.Option(help="Where to run: auto, cpu or cuda.", metavar="DEVICE", callback=_one_of(DEVICES))
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        help="What to compute in: bfloat16 or float32. Parts that the model keeps in float32 stay so.",
        metavar="DTYPE",
        callback=_one_of(PRECISIONS),
    ),
]


def lazily_loaded(
    model: Path,
    *,
    device: str,
    dtype: str,
    model_name: str | None = None,
    fingerprint_cache: Path | None = None,
    plan_settings: PlanCacheSettings | None = None,
    plan_observer: Observer | None = None,
    offload: OffloadOptions | None = None,
    offload_observer: OffloadObserver = silent,
    quality_settings: QualitySettings | None = None,
    quality_observer: QualityObserver = silent_quality,
) -> "Callable[[], Pipeline]":
    """What loads the model when called.

    Raises:
        CommandFailed: There is no such folder.
    """
    if not model.is_dir():
        raise CommandFailed(f"{model}: no such folder", Exit.INVALID)

    def load() -> "Pipeline":
        from sojourn.inference.pipeline import DeviceChoice, Precision, load_pipeline

        return load_pipeline(
            model,
            device=DeviceChoice(device),
            precision=Precision(dtype),
            model_name=model_name,
            fingerprint_cache=fingerprint_cache,
            plan_settings=plan_settings,
            plan_observer=plan_observer,
            offload=offload,
            offload_observer=offload_observer,
            quality_settings=quality_settings,
            quality_observer=quality_observer,
        )

    return load
