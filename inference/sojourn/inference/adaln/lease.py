"""What a request holds while it runs: its plans, protected from eviction, and where their rows lie."""

import weakref
from collections.abc import Callable, Sequence

import torch
from sojourn.inference.adaln.cursor import Step


class Lease:
    """The plans of one request, pinned until it is released: explicitly, as a context, or when nobody holds it.

    Attributes:
        steps: For each forward of the request the steps of its projections' calls.
        slots: [plans] int64 on the device, the slot of every plan in order.
    """

    def __init__(self, steps: Sequence[tuple[Step, ...]], slots: torch.Tensor, release: Callable[[], None]) -> None:
        self.steps = tuple(steps)
        self.slots = slots
        self._finalizer = weakref.finalize(self, release)
        self._finalizer.atexit = False

    def release(self) -> None:
        """Lets the plans be evicted. May be called any number of times."""
        self._finalizer()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __deepcopy__(self, memo: object) -> "Lease":
        """Pipeline states are copied with what they hold; a lease is one thing however many states name it."""
        return self
