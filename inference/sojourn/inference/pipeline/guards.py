"""Blocks that are put between a pipeline's own: stage boundaries, checkpoints, and the guard of the denoising loop.

They hold nothing of a request. The request's watch reaches them as an input, through the pipeline state that each
request has of its own, so that the blocks can be shared, and copied, as diffusers likes to do.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from diffusers.modular_pipelines import ModularPipelineBlocks
from diffusers.modular_pipelines.modular_pipeline import BlockState, PipelineState
from diffusers.modular_pipelines.modular_pipeline_utils import InputParam
from sojourn.inference.errors import NonFiniteOutput
from sojourn.inference.watch import WATCH_INPUT, Stage, Watch

EVALUATIONS_INPUT = "evaluations"


def _watch_input() -> InputParam:
    """A new one each time: diffusers writes into the parameters of the blocks that it combines."""
    return InputParam(name=WATCH_INPUT, type_hint=Watch, required=True, description="Who watches the request.")


class StageBoundary(ModularPipelineBlocks):
    """Tells the watch that a stage begins, and stops the request where it is to stop.

    Attributes:
        stage: The stage that begins.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        super().__init__()

    @property
    def inputs(self) -> list[InputParam]:
        """The watch, and the number of steps of the request's denoising loop."""
        return [_watch_input(), InputParam(name=EVALUATIONS_INPUT, type_hint=int, required=True)]

    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        """Passes the state on as it is."""
        steps = state.get(EVALUATIONS_INPUT) if self.stage is Stage.DENOISE else 0
        state.get(WATCH_INPUT).begin(self.stage, steps=steps)
        return components, state


class Checkpoint(ModularPipelineBlocks):
    """Stops the request where it is to stop or where the block before made a NaN or infinity.

    Attributes:
        stage: The stage of the block before.
        outputs: Names of what the block before made.
    """

    def __init__(self, stage: Stage, outputs: Iterable[str]) -> None:
        self.stage = stage
        self.outputs_checked = tuple(outputs)
        super().__init__()

    @property
    def inputs(self) -> list[InputParam]:
        """The watch, and what is checked."""
        return [_watch_input(), *(InputParam(name=name) for name in self.outputs_checked)]

    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        """Passes the state on as it is."""
        state.get(WATCH_INPUT).check()
        check_finite(state.get(list(self.outputs_checked)), stage=self.stage, step=None)
        return components, state


class StepGuard(ModularPipelineBlocks):
    """Ends each iteration of a denoising loop: finite check, progress, cancel and deadline.

    Attributes:
        outputs_checked: Names of what an iteration makes.
    """

    def __init__(self, outputs: Iterable[str]) -> None:
        self.outputs_checked = tuple(outputs)
        super().__init__()

    @property
    def inputs(self) -> list[InputParam]:
        """The watch and the timesteps."""
        return [_watch_input(), InputParam(name="timesteps", type_hint=torch.Tensor, required=True)]

    def __call__(self, components: Any, block_state: BlockState, i: int, t: torch.Tensor) -> tuple[Any, BlockState]:
        """Passes the state on as it is; step numbers count from 1."""
        values = {name: block_state[name] for name in self.outputs_checked}
        end_step(block_state[WATCH_INPUT], values, step=i + 1, steps=len(block_state["timesteps"]))
        return components, block_state


def guard_scheduler(scheduler: Any, watch: Watch, *, steps: int) -> None:
    """Does what `StepGuard` does, for denoising loops inside a block: at the end of each step of a scheduler.

    Args:
        scheduler: The request's own; its `step` is covered by one that ends with the guard.
        watch: Who watches the request.
        steps: Steps in all; their numbers go on over chunks and levels.
    """
    step, done = scheduler.step, 0

    def guarded_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        stepped = step(*args, **kwargs)
        done += 1
        end_step(watch, {"latents": stepped[0]}, step=done, steps=steps)
        return stepped

    scheduler.step = guarded_step


def end_step(watch: Watch, values: Mapping[str, Any], *, step: int, steps: int) -> None:
    """Ends a denoising step: finite check, progress, cancel and deadline.

    Raises:
        NonFiniteOutput: One of the values holds a NaN or infinity.
        RequestStopped: Cancelled or out of time.
    """
    check_finite(values, stage=Stage.DENOISE, step=step)
    watch.step(step, steps)


def check_finite(values: Mapping[str, Any], *, stage: Stage, step: int | None) -> None:
    """Checks all floating tensors and arrays among `values`, and in lists among them.

    Raises:
        NonFiniteOutput: One holds a NaN or infinity.
    """
    for name, value in values.items():
        items = value if isinstance(value, (list, tuple)) else [value]
        if not all(_is_finite(item) for item in items):
            raise NonFiniteOutput(stage=stage.value, step=step, what=name)


def _is_finite(value: Any) -> bool:
    """Checks by minimum and maximum: one pass, NaN propagates, and nothing as large as the tensor is allocated."""
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() == 0:
        return True
    low, high = torch.aminmax(value)
    return bool(torch.isfinite(low) & torch.isfinite(high))
