"""The options about where weights are that commands share. Without torch."""

from pathlib import Path
from typing import Annotated

import typer
from sojourn.inference.cli.exits import CommandFailed, Exit
from sojourn.inference.offload.options import OffloadOptions, parse_size
from sojourn.inference.offload.settings import Selection, parse_settings

OFFLOAD = "Offload"
# What a switch is called on the command line, and in charts.
_SWITCH = {"auto": True, "off": False}

DeviceMemoryOption = Annotated[
    str | None,
    typer.Option(
        help="What the model may take of a device of its own, such as 24Gi; what is free by default.",
        metavar="SIZE",
        rich_help_panel=OFFLOAD,
    ),
]
HostMemoryOption = Annotated[
    str | None,
    typer.Option(
        help="What it may take of the host; what is available by default.", metavar="SIZE", rich_help_panel=OFFLOAD
    ),
]
OffloadOption = Annotated[
    list[str] | None,
    typer.Option(
        help="How components are offloaded: MODE for all, COMPONENT=MODE for one; modes are auto, resident, component "
        "and layerwise. Details follow after commas, such as transformer=layerwise,prefetch=2,resident=0.5,"
        "policy=strided. May be given more than once.",
        metavar="[COMPONENT=]MODE",
        rich_help_panel=OFFLOAD,
    ),
]
PinningOption = Annotated[
    str,
    typer.Option(
        help="Whether streamed weights are locked in host memory as far as the budget goes: auto or off.",
        metavar="auto|off",
        rich_help_panel=OFFLOAD,
    ),
]
ColdPageAdviceOption = Annotated[
    str,
    typer.Option(
        help="Whether the kernel is told which mapped weights it may take back when a stage ends: auto or off.",
        metavar="auto|off",
        rich_help_panel=OFFLOAD,
    ),
]
NextStageHeadroomOption = Annotated[
    str | None,
    typer.Option(
        help="Host memory to keep free for the next stage besides its weights; estimated per model by default.",
        metavar="SIZE",
        rich_help_panel=OFFLOAD,
    ),
]


def placement(
    *,
    device_memory: str | None,
    host_memory: str | None,
    offload: list[str] | None,
    pinning: str,
    cold_page_advice: str = "auto",
    next_stage_headroom: str | None = None,
    component_map: Path | None = None,
) -> OffloadOptions:
    """What these options ask for.

    Raises:
        CommandFailed: One of them is wrong; the message names it.
    """
    return OffloadOptions(
        device_memory_bytes=_size("--device-memory", device_memory),
        host_memory_bytes=_size("--host-memory", host_memory),
        settings=_settings(offload or []),
        component_map=str(component_map) if component_map else None,
        pinning=_switch("--pinning", pinning),
        cold_advice=_switch("--cold-page-advice", cold_page_advice),
        next_stage_headroom_bytes=_size("--next-stage-headroom", next_stage_headroom),
    )


def _size(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise CommandFailed(f"{option}: {error}", Exit.INVALID) from None


def _settings(texts: list[str]) -> Selection:
    try:
        return parse_settings(texts)
    except ValueError as error:
        raise CommandFailed(f"--offload: {error}", Exit.INVALID) from None


def _switch(option: str, text: str) -> bool:
    if text not in _SWITCH:
        raise CommandFailed(f"{option}: {text!r} is neither of {', '.join(_SWITCH)}", Exit.INVALID)
    return _SWITCH[text]
