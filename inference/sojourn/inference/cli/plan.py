"""`sojourn plan`: what will be where, and whether it fits, before anything is loaded."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from sojourn.inference.adaln.overrides import check_components, parse_overrides
from sojourn.inference.adaln.settings import PlanCacheSettings
from sojourn.inference.cli.loading import DeviceOption, PrecisionOption
from sojourn.inference.cli.placement import (
    DeviceMemoryOption,
    HostMemoryOption,
    OffloadOption,
    PinningOption,
    placement,
)
from sojourn.inference.cli.plan_cache import FamilyOption
from sojourn.inference.loading.folder import read_folder


def plan(
    model: Annotated[Path, typer.Argument(help="Model folder in the diffusers modular layout.", show_default=False)],
    device_memory: DeviceMemoryOption = None,
    host_memory: HostMemoryOption = None,
    offload: OffloadOption = None,
    pinning: PinningOption = "auto",
    adaln_cache: Annotated[str, typer.Option(help="The AdaLN plan cache: on, off or auto.", metavar="MODE")] = "auto",
    adaln_family: FamilyOption = None,
    device: DeviceOption = "auto",
    dtype: PrecisionOption = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False,
) -> None:
    """Show where every weight will be: component, bytes, tier per layer range, peak and headroom.

    Nothing is loaded. With --device-memory the plan is for a device with memory of its own, whether there is one here
    or not. The exit status is 3 if the model does not fit.
    """
    import torch
    from sojourn.inference.families.table import family_of
    from sojourn.inference.offload import plan_report, planning
    from sojourn.inference.offload.memory_plan import Machine
    from sojourn.inference.offload.room import RoomReader
    from sojourn.inference.pipeline.load import DeviceChoice, torch_device
    from sojourn.inference.pipeline.workflow import served_stages

    options = placement(device_memory=device_memory, host_memory=host_memory, offload=offload, pinning=pinning)
    settings = PlanCacheSettings(mode=adaln_cache, families=parse_overrides(adaln_family or []))  # type: ignore[arg-type]
    folder = read_folder(model)
    check_components(settings.families, folder.components)
    family = family_of(folder)
    options = planning.with_usual_request(options, folder, family.usual)
    options = planning.with_plan_caches(options, folder, settings)
    machine = planning.this_machine(torch_device(DeviceChoice(device)), options, reader=RoomReader(os.getpid()))
    if options.device_memory_bytes is not None:
        machine = Machine(device_bytes=options.device_memory_bytes, host_bytes=machine.host_bytes)
    stages = served_stages(family, folder.components)
    result = planning.plan_model(folder, stages, machine, options, dtype=getattr(torch, dtype))
    if as_json:
        print(plan_report.as_json(result))
    else:
        Console().print(plan_report.as_table(result))
    result.check(model)
