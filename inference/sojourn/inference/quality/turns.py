"""Lets requests run side by side while they want the same of the transformers, and one after the other where not."""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

# How often one that waits looks whether it has been cancelled.
_LOOK_SECONDS = 0.05


class Turns:
    """Turns in order of arrival; nobody overtakes one that wants something else."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._wanted: Hashable = None
        self._running = 0
        self._alone = False

    @contextmanager
    def take(self, wanted: Hashable, *, alone: bool, check: Callable[[], None]) -> Iterator[None]:
        """Waits until all that run want the same, and holds that off for as long as the context lasts.

        Args:
            wanted: What is wanted.
            alone: Whether nobody may run beside this one, not even for the same.
            check: Called while waiting; what it raises ends the wait.
        """
        self._enter(wanted, alone, check)
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _enter(self, wanted: Hashable, alone: bool, check: Callable[[], None]) -> None:
        place = object()
        with self._changed:
            self._waiting.append(place)
            try:
                while self._waiting[0] is not place or not self._may_run(wanted, alone):
                    self._changed.wait(_LOOK_SECONDS)
                    check()
                self._running, self._wanted, self._alone = self._running + 1, wanted, alone
            finally:
                self._waiting.remove(place)
                self._changed.notify_all()

    def _may_run(self, wanted: Hashable, alone: bool) -> bool:
        return not self._running or (self._wanted == wanted and not self._alone and not alone)
