"""Has the storage read layers before they are needed, and lets go of what came that way.

Nobody is asked, and no thread works, while all that a build reads is found in the page cache: to hand a layer to
another thread and back takes longer than to copy it out of there (half of a warm build of one plan, 51 layers of 7 MB
on 2 cores).
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from sojourn.inference.adaln.weights import Part, WeightSource


class ReadAhead:
    """Asks and lets go on a thread of its own, in order. What is left when it ends is let go of too."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._asked: list[Part] = []
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adaln-weights")

    def missed(self, part: Part) -> None:
        """Starts reading what was found not to be in the page cache; returns at once."""
        if part not in self._asked:
            self._asked.append(part)
            self._beside.submit(self._source.will_need, [part])

    def ask(self, parts: Sequence[Part]) -> None:
        """Starts reading what is not in the page cache; returns at once."""
        absent = self._source.absent(part for part in parts if part not in self._asked)
        if absent:
            self._asked += absent
            self._beside.submit(self._source.will_need, absent)

    def done(self, parts: Sequence[Part]) -> None:
        """Lets go of what was asked for; what was there before stays. Returns at once."""
        gone = [part for part in parts if part in self._asked]
        if gone:
            self._asked = [part for part in self._asked if part not in gone]
            self._beside.submit(self._source.forget, gone)

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.done(list(self._asked))
        self._beside.shutdown()
