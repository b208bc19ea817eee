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
from sojourn.inference.adaln.witness import Hearing, Witness


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
    hearing: Hearing | None = None


class Cursor:
    """Reads rows for the forward in progress on this thread.

    Args:
        slab: Where they lie.
        find: Conditioning inputs -> the steps of a forward.
        witness: Holds what the projections read against the family; None where the class is known.
    """

    def __init__(self, slab: Slab, find: Callable[[Inputs], Sequence[Step]], *, witness: Witness | None = None) -> None:
        self._slab = slab
        self._find = find
        self._witness = witness
        self._now = _InProgress()

    def begin(self, inputs: Inputs) -> None:
        """A forward begins on these conditioning inputs.

        Raises:
            PlanMissing: No request has prepared their plan.
        """
        self._now.steps = self._find(inputs)
        self._now.calls = {}
        self._now.hearing = self._witness.begin(inputs) if self._witness else None

    def end(self, *, has_output: bool = True) -> None:
        """The forward has ended, one way or the other.

        Raises:
            ModelRefused: It has an output, which another family's rows have made.
        """
        hearing = self._now.hearing
        self._now.steps = self._now.calls = self._now.hearing = None
        if hearing is not None and has_output:
            hearing.end()

    def rows(self, projection: str, conditioning: torch.Tensor) -> torch.Tensor:
        """The rows of the projection's next call in this forward: a Linear that runs twice reads two plans."""
        steps, calls = self._now.steps, self._now.calls
        if steps is None or calls is None:
            raise PlanMissing(f"{projection}: rows are asked for outside of the transformer's forward")
        ordinal = calls.get(projection, 0)
        if ordinal >= len(steps):
            raise PlanMissing(f"{projection}: call {ordinal + 1} in one forward, plans are known for {len(steps)}")
        calls[projection] = ordinal + 1
        if self._now.hearing is not None:
            self._now.hearing.read(projection, ordinal, conditioning)
        step = steps[ordinal]
        if not step.is_valid():
            raise PlanMissing(f"{projection}: the weights were replaced while the request ran; send it again")
        return self._slab.look_up(projection, step.rows)
