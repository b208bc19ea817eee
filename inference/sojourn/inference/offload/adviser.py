"""A thread that gives page advice, so that the computation does not wait for the disk or for page tables.

One queue, first in first out: memory is given back before more is brought in. The kernel calls run without the
interpreter's lock.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sojourn.inference.offload.spans import Span
from sojourn.residencyd.kernel import advice
from sojourn.residencyd.kernel.advice import Advised


def bring_in(address: int, length_bytes: int) -> Advised:
    """Reads a range and maps it, and not a page more.

    Populating alone reads through page faults, and they read ahead: by up to 8 MiB where the device is set so, into
    weights that were given back a moment ago or are not due yet. WILLNEED before it reads exactly the range, in large
    pieces, all of them under way at once; populating then waits for them and maps them.
    """
    advice.will_need(address, length_bytes)
    return advice.populate_read(address, length_bytes)


@dataclass(frozen=True, kw_only=True)
class PageAdvice:
    """The kernel calls; tests put their own in.

    Attributes:
        populate: Reads and maps a range (address, length).
        page_out: Gives a range back.
        cold: Puts a range first in line for reclaim.
        will_need: Starts reading a range.
    """

    populate: Callable[[int, int], Advised] = bring_in
    page_out: Callable[[int, int], Advised] = advice.page_out
    cold: Callable[[int, int], Advised] = advice.cold
    will_need: Callable[[int, int], Advised] = advice.will_need


@dataclass(eq=False)
class Job:
    """Advice on its way."""

    act: Callable[[int, int], object]
    spans: Sequence[Span]
    done: threading.Event = field(default_factory=threading.Event)


class Adviser:
    """Carries advice out in order. `close` ends its thread.

    Args:
        failed: Called with what a piece of advice raised; nothing that computes ever sees it.
    """

    def __init__(self, *, failed: Callable[[Exception], None] = lambda error: None) -> None:
        self._failed = failed
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="page-adviser", daemon=True)
        self._thread.start()

    def submit(self, act: Callable[[int, int], object], spans: Sequence[Span]) -> Job:
        """Has `act(address, length)` called for every span, after everything submitted before."""
        job = Job(act, spans)
        self._jobs.put(job)
        return job

    def drain(self) -> None:
        """Returns when everything submitted so far is done."""
        self.submit(lambda address, length: None, ()).done.wait()

    def close(self) -> None:
        """Carries out what was submitted, then ends the thread. Further calls do nothing."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                for start, end in job.spans:
                    job.act(start, end - start)
            except Exception as error:
                self._failed(error)
            finally:
                job.done.set()
