"""A queue that holds each key at most once, in order of when it is due, with growing pauses after failures.

A key that is added while a worker holds it is handed out again afterwards, never to two workers at once: passes over
one object are serial, and edits during a pass unite into one more pass.
"""

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from sojourn.operator.clock import Clock

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Backoff:
    """Pauses between tries: doubling from `first_seconds` to `cap_seconds`, each shortened by up to half at random."""

    first_seconds: float = 1.0
    cap_seconds: float = 300.0

    def pause(self, failures: int, jitter: Callable[[], float] = random.random) -> float:
        """Seconds before the next try, after `failures` failed ones (1 or more); `jitter` gives 0 to 1."""
        # 2**20 pauses of a millisecond exceed any cap; more would only overflow.
        whole = min(self.cap_seconds, self.first_seconds * 2.0 ** min(failures - 1, 20))
        return whole * (1 - jitter() / 2)


class KeyedQueue(Generic[Key]):
    """Keys to work on."""

    def __init__(self, backoff: Backoff | None = None, clock: Clock | None = None) -> None:
        """Starts empty."""
        self._backoff = backoff or Backoff()
        self._clock = clock or Clock()
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, Key]] = []
        self._due: dict[Key, float] = {}
        self._held: set[Key] = set()
        self._nudged: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._moved = asyncio.Event()

    def add(self, key: Key, *, after: float = 0.0) -> None:
        """Asks for a pass in `after` seconds. Of several wishes for one key the earliest counts."""
        due = self._clock.now() + after
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        heapq.heappush(self._heap, (due, next(self._numbers), key))
        self._moved.set()

    def renew(self, key: Key) -> None:
        """Asks for a pass at once, as if none had ever failed: somebody wants something else."""
        self._failures.pop(key, None)
        self.add(key)

    def nudge(self, key: Key) -> None:
        """Asks for a pass at once, unless the last one failed, or the present one does: then its pause holds.

        A failing pass changes objects, and their events would else bring the next one on, without a pause.
        """
        if key in self._held:
            self._nudged.add(key)
        elif key not in self._failures or key not in self._due:
            self.add(key)

    def remind(self, key: Key) -> None:
        """Asks for a pass unless one is planned already: what failed keeps its pause."""
        if key not in self._due:
            self.add(key)

    async def take(self) -> Key:
        """The next key that is due and that nobody holds. Give it back with `done`."""
        while True:
            self._moved.clear()
            wait = self._advance()
            if isinstance(wait, _Ready):
                key: Key = wait.key
                del self._due[key]
                self._held.add(key)
                return key
            await self._clock.wait(self._moved, wait)

    def done(self, key: Key) -> None:
        """Ends the hold that `take` began."""
        self._held.discard(key)
        if key in self._due:
            heapq.heappush(self._heap, (self._due[key], next(self._numbers), key))
            self._moved.set()

    def failed(self, key: Key) -> float:
        """Asks for another pass after a pause that grows with each failure in a row; returns the pause."""
        self._nudged.discard(key)
        self._failures[key] = self._failures.get(key, 0) + 1
        pause = self._backoff.pause(self._failures[key])
        self.add(key, after=pause)
        return pause

    def succeeded(self, key: Key) -> None:
        """Forgets the failures of a key."""
        self._failures.pop(key, None)
        if key in self._nudged:
            self._nudged.discard(key)
            self.add(key)

    def drop(self, key: Key) -> None:
        """Takes a key out of the queue: what it stood for is gone."""
        self._due.pop(key, None)
        self._failures.pop(key, None)
        self._nudged.discard(key)

    def waiting(self) -> int:
        """Keys that are due now and not held."""
        now = self._clock.now()
        return sum(due <= now and key not in self._held for key, due in self._due.items())

    def oldest_due(self) -> float | None:
        """When the key that waits longest was due, by the clock; None if none waits."""
        now = self._clock.now()
        return min((due for key, due in self._due.items() if due <= now and key not in self._held), default=None)

    def _advance(self) -> "_Ready[Key] | float | None":
        """The first key that can be worked on, or the seconds until one can; None if nothing is planned."""
        while self._heap:
            due, _, key = self._heap[0]
            if self._due.get(key) != due or key in self._held:
                heapq.heappop(self._heap)  # superseded, dropped, or put back by `done`
            elif (wait := due - self._clock.now()) > 0:
                return wait
            else:
                heapq.heappop(self._heap)
                return _Ready(key)
        return None


@dataclass(frozen=True)
class _Ready(Generic[Key]):
    key: Key
