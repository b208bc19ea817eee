"""What a running request tells its owner, and how its owner stops it.

The pipeline's guard blocks call a `Watch` from the worker thread at every stage boundary and every denoising step.
It reaches them through the pipeline state of the request, so that nothing of a request lives on the shared blocks.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from sojourn.inference.errors import DeadlineExceeded, RequestCancelled

# Name under which a request's watch lies in its pipeline state.
WATCH_INPUT = "watch"


class Stage(StrEnum):
    """Parts of a request's run, in order; the names are the values of the metric label `stage`."""

    QUEUED = "queued"
    PREPARE = "prepare"
    TEXT_ENCODE = "text_encode"
    VAE_ENCODE = "vae_encode"
    DENOISE = "denoise"
    DECODE = "decode"
    ENCODE_OUTPUT = "encode_output"


@dataclass(frozen=True, kw_only=True)
class StageBegan:
    """A stage has begun; `steps` is 0 in stages without steps."""

    stage: Stage
    steps: int = 0


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """`step` of `steps` steps of the denoising loop are done."""

    step: int
    steps: int


Event = StageBegan | StepDone


def _ignore(event: Event) -> None:
    """The listener of a request that nobody watches."""


@dataclass(kw_only=True)
class Watch:
    """Progress, cancel and deadline of one request.

    Attributes:
        clock: Seconds of a monotonic clock.
        deadline: Reading of `clock` after which the request stops; None for never.
        listener: Called with each event from the worker thread; it must not block.
    """

    clock: Callable[[], float]
    deadline: float | None = None
    listener: Callable[[Event], None] = _ignore
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Makes the next check raise. May be called from any thread, any number of times."""
        self._cancelled.set()

    def check(self) -> None:
        """Raises what stops the request, if anything does.

        Raises:
            RequestCancelled: `cancel` was called.
            DeadlineExceeded: The deadline has passed.
        """
        if self._cancelled.is_set():
            raise RequestCancelled("the request was cancelled")
        if self.deadline is not None and self.clock() > self.deadline:
            raise DeadlineExceeded("the deadline of the request has passed")

    def begin(self, stage: Stage, *, steps: int = 0) -> None:
        """Checks, then tells of a stage's begin."""
        self.check()
        self.listener(StageBegan(stage=stage, steps=steps))

    def step(self, step: int, steps: int) -> None:
        """Tells of a finished step, then checks."""
        self.listener(StepDone(step=step, steps=steps))
        self.check()
