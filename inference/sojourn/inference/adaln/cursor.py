"""Which plan the forward in progress runs on.

A hook before the transformer's forward sets the step, one after it clears it. Prepared steps are found by the identity
of the tensors that the pipeline hands to the forward, which costs no read of the device; other tensors by their bits.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from sojourn.inference.adaln.family import Inputs
from sojourn.inference.adaln.refusals import PlanMissing
from sojourn.inference.adaln.slab import Slab


@dataclass(frozen=True, eq=False)
class Step:
    """Where the rows of one forward lie.

    Attributes:
        rows: [M] int64 on the slab's device: for each row its number among all rows of the slab.
        is_valid: False once the weights behind the rows have been replaced.
    """

    rows: torch.Tensor
    is_valid: Callable[[], bool]


class _InProgress(threading.local):
    steps: Sequence[Step] | None = None
    calls: dict[str, int] | None = None


class Cursor:
    """Reads rows for the forward in progress on this thread."""

    def __init__(self, slab: Slab, find: Callable[[Inputs], Sequence[Step]]) -> None:
        self._slab = slab
        self._find = find
        self._now = _InProgress()

    def begin(self, inputs: Inputs) -> None:
        """A forward begins on these conditioning inputs.

        Raises:
            PlanMissing: No request has prepared their plan.
        """
        self._now.steps = self._find(inputs)
        self._now.calls = {}

    def end(self) -> None:
        """The forward has ended, one way or the other."""
        self._now.steps = self._now.calls = None

    def rows(self, projection: str) -> torch.Tensor:
        """The rows of the projection's next call in this forward: a Linear that runs twice reads two plans."""
        steps, calls = self._now.steps, self._now.calls
        if steps is None or calls is None:
            raise PlanMissing(f"{projection}: rows are asked for outside of the transformer's forward")
        ordinal = calls.get(projection, 0)
        if ordinal >= len(steps):
            raise PlanMissing(f"{projection}: call {ordinal + 1} in one forward, plans are known for {len(steps)}")
        calls[projection] = ordinal + 1
        step = steps[ordinal]
        if not step.is_valid():
            raise PlanMissing(f"{projection}: the weights were replaced while the request ran; send it again")
        return self._slab.look_up(projection, step.rows)
