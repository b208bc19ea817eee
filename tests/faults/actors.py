"""What runs in the processes of a pod. All are forked from one process that has everything imported.

That makes them start in a second, and lets those become another user which the Python installation does not welcome.
"""

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from sojourn.inference import logs
from sojourn.inference.cli import main as sojourn_main
from sojourn.inference.offload.activations import Workload
from sojourn.inference.offload.options import OffloadOptions
from sojourn.inference.offload.settings import parse_settings
from sojourn.inference.pipeline import Pipeline, load_pipeline
from sojourn.inference.requests import GenerationRequest, Workflow
from sojourn.inference.server.config import Address, ServerConfig
from sojourn.inference.server.main import run
from sojourn.inference.telemetry import Telemetry
from sojourn.inference.watch import Watch
from sojourn.residencyd.serving import Options
from sojourn.residencyd.serving import serve as residencyd_serve

PR_SET_DUMPABLE = 4


def to_log(path: str, group: str) -> None:
    """Sends what is printed to a file; puts the process in a control group, if there is one."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    if group:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))


def sojourn(log: str, group: str, arguments: list[str]) -> None:
    """The command line `sojourn`."""
    to_log(log, group)
    torch.set_num_threads(1)
    sys.argv = ["sojourn", *arguments]
    sojourn_main()


def residencyd(log: str, group: str, user: int, options: dict[str, Any]) -> None:
    """`residencyd serve`, as another user where one is given."""
    to_log(log, group)
    if user:
        become(user)
    residencyd_serve(Options(**options))


def breakable(log: str, group: str, settings: dict[str, Any]) -> None:
    """As `sojourn serve`, but that one can break it from outside.

    Settings: model (folder), grpc, metrics (ports), map (file), offload (as on the command line), large (plan for
    requests of 1344 × 768), become (a user), nan (a file).
    """
    to_log(log, group)
    torch.set_num_threads(1)
    config = ServerConfig(
        listen=Address(host="127.0.0.1", port=settings["grpc"]),
        metrics_listen=Address(host="127.0.0.1", port=settings["metrics"]),
        model_name="tiny",
    )
    telemetry = Telemetry(model_name="tiny", max_waiting=config.max_waiting)
    printing = logs.configure(count=telemetry.log_line)
    sys.exit(run(config, lambda: broken(settings, telemetry), telemetry=telemetry, printing=printing))


def broken(settings: dict[str, Any], telemetry: Telemetry) -> Pipeline:
    """The pipeline, with the fault built in."""
    offload = OffloadOptions(
        component_map=settings["map"],
        settings=parse_settings(settings.get("offload", ())),
        workload=Workload() if settings.get("large") else None,
        # More than the machine may have: the plan is not what is tried here.
        host_memory_bytes=16 << 30 if settings.get("large") else None,
    )
    pipeline = load_pipeline(
        Path(settings["model"]),
        model_name="tiny",
        offload=offload,
        offload_observer=telemetry.offload,
        plan_observer=telemetry.plan_cache,
    )
    if trigger := settings.get("nan"):
        poison(pipeline, Path(trigger))
    if user := settings.get("become"):
        warm_up(pipeline)
        os.chown(Path(settings["map"]).parent, user, user)
        os.chown(settings["map"], user, user)
        become(user)
    return pipeline


def become(user: int) -> None:
    """Another user, as readable as a process that was started by that user."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


def poison(pipeline: Pipeline, trigger: Path) -> None:
    """From now on the transformer answers NaN while the file is there."""

    def spoil(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if trigger.exists():
            (output[0] if isinstance(output, tuple) else output.sample).fill_(float("nan"))
        return output

    pipeline.components["transformer"].value.register_forward_hook(spoil)


def warm_up(pipeline: Pipeline) -> None:
    """One request, so that everything is imported that only the user who started us may read."""
    request = GenerationRequest(
        prompt="a moving seven", workflow=Workflow.T2VA, width=32, height=32, frames=124, steps=3, flow_shift=12.0,
        audio_flow_shift=3.0, seeds=(7,),
    )  # fmt: skip
    pipeline.run_clip(request, 0, Watch(clock=time.monotonic))
