"""What happens to a component's weights when its use begins and ends, one class for each way of hosting them.

`Resident` leaves them alone, and looks whether mapped files are still whole. `Copied` streams them from host stores to
a device of its own memory, the layers of a component one by one or the component as one. `Paged` computes on the
checkpoint's own pages, on the CPU and on devices that share its memory, and gives them back.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sojourn.inference.offload.advice import PageOutcome, page_out_verified, plan_cold
from sojourn.inference.offload.adviser import Adviser, PageAdvice
from sojourn.inference.offload.integrity import MappedFiles
from sojourn.inference.offload.observer import Observer, Stuck, silent
from sojourn.inference.offload.pages import PageWindow
from sojourn.inference.offload.spans import Span, whole_pages, without
from sojourn.inference.offload.window import LayerWindow


class Strategy(Protocol):
    """How one component comes and goes. Called from the threads that compute, never by two at once."""

    def prepare(self) -> None:
        """A use begins."""

    def prefetch(self) -> None:
        """A use is going to begin: whatever may be fetched without hurting the stage that runs."""

    def finish(self, *, room_bytes: int | None, in_use: Sequence[Span], needed_again: bool) -> None:
        """A use has ended.

        Args:
            needed_again: The same request comes back to it, after other stages.
            room_bytes: What may stay of the component in host memory; None if nothing presses.
            in_use: Host memory that components still in use need.
        """

    def host_spans(self) -> Sequence[Span]:
        """Mapped host memory that a use reads."""

    def close(self) -> None:
        """Ends its threads and hooks."""


@dataclass(kw_only=True)
class Resident:
    """The weights stay where they are.

    Attributes:
        files: Behind those that are mapped; None if none is.
        undo: Takes the hooks off that look at the files.
    """

    files: MappedFiles | None = None
    undo: Callable[[], None] = lambda: None

    def prepare(self) -> None:
        """Makes sure that what is mapped is still there.

        Raises:
            ModelError: A file was cut under us.
        """
        if self.files is not None:
            self.files.check()

    def prefetch(self) -> None:
        """Nothing to do."""

    def finish(self, *, room_bytes: int | None, in_use: Sequence[Span], needed_again: bool) -> None:
        """Nothing to do."""

    def host_spans(self) -> Sequence[Span]:
        """Not this strategy's business."""
        return ()

    def close(self) -> None:
        """Takes the hooks off, closes the files."""
        self.undo()
        if self.files is not None:
            self.files.close()


class Copied:
    """Host stores and a window on the device.

    Args:
        window: Over the component's layers, or over the component as its only layer.
        undo: Takes the window's hooks off.
        empty_cache: Gives the device allocator's cache back when a use ends.
        whole: Whether the component comes and goes as one.
    """

    def __init__(
        self, window: LayerWindow, *, undo: Callable[[], None], empty_cache: Callable[[], None], whole: bool
    ) -> None:
        self.window = window
        self._whole = whole
        self._undo = undo
        self._empty_cache = empty_cache

    def prepare(self) -> None:
        """Sends for what stays and for the head of the stream, or for everything."""
        self.window.prepare()
        if self._whole:
            self.window.make_ready()

    def prefetch(self) -> None:
        """Nothing: the stage that runs was given the whole device."""

    def finish(self, *, room_bytes: int | None, in_use: Sequence[Span], needed_again: bool) -> None:
        """Leaves the device, also for a while: the plan gives all of it to the stages between."""
        self.window.release()
        self._empty_cache()

    def host_spans(self) -> Sequence[Span]:
        """The stores were sized by the hosting plan; nothing of them can be dropped."""
        return ()

    def close(self) -> None:
        """Takes the hooks off; the parameters stay placeholders."""
        self.finish(room_bytes=None, in_use=(), needed_again=False)
        self._undo()


@dataclass(kw_only=True)
class Paged:
    """Computes on mapped weights.

    Attributes:
        name: Of the component.
        spans: Its mapped whole pages, in the order of their use.
        files: Behind them.
        adviser: Carries advice out.
        window: Gives advice within a pass; None to do so at the ends of a use only.
        undo: Takes the window's hooks off.
        fetch_whole: Whether `prefetch` starts reading all of it.
        cold_advice: Whether anything is given back when a use ends.
        advice: The kernel calls.
        observer: Told of page-outs.
        warn: Called with a text when page-out turns out to be without effect.
    """

    name: str
    spans: Sequence[Span]
    files: MappedFiles
    adviser: Adviser
    window: PageWindow | None = None
    undo: Callable[[], None] = lambda: None
    fetch_whole: bool = False
    cold_advice: bool = True
    advice: PageAdvice | None = None
    observer: Observer = silent
    warn: Callable[[str], None] = lambda text: None
    _ineffective: Stuck | None = None

    def prepare(self) -> None:
        """Makes sure that what is mapped is still there.

        Raises:
            ModelError: A file was cut under us.
        """
        self.files.check()

    def prefetch(self) -> None:
        """Starts reading the component in the background, if it is to be held as a whole."""
        if self.fetch_whole:
            self.adviser.submit((self.advice or PageAdvice()).will_need, self.spans)

    def finish(self, *, room_bytes: int | None, in_use: Sequence[Span], needed_again: bool) -> None:
        """Gives back what does not fit, marks the rest as first in line, and verifies."""
        if needed_again:
            return
        if self.window is not None:
            self.window.pause()
        if not self.cold_advice:
            return
        self.adviser.drain()
        plan = plan_cold(self._in_order_of_going(), room_bytes=room_bytes)
        calls = self.advice or PageAdvice()
        outcome = page_out_verified(plan.page_out, in_use=in_use, advice=calls)
        for start, end in whole_pages(without(plan.cold, in_use)):
            calls.cold(start, end - start)
        self._report(outcome)

    def _in_order_of_going(self) -> list[Span]:
        """What streamed goes first, then what stayed, from its end: the next use begins at the beginning."""
        streamed = [span for spans in self.window.plan.streamed for span in spans] if self.window else []
        stayed = without(self.spans, streamed)
        return [*streamed, *reversed(stayed)]

    def _report(self, outcome: PageOutcome) -> None:
        self.observer.paged_out(
            component=self.name,
            requested_bytes=outcome.requested_bytes,
            verified_bytes=outcome.verified_bytes,
        )
        self.observer.stuck(component=self.name, by_reason=outcome.stuck)
        without_effect = outcome.reason if outcome.requested_bytes and not outcome.verified_bytes else None
        if without_effect and without_effect is not self._ineffective:
            self.warn(without_effect_text(self.name, outcome, without_effect))
        if outcome.requested_bytes:
            self._ineffective = without_effect

    def host_spans(self) -> Sequence[Span]:
        """All mapped pages."""
        return self.spans

    def close(self) -> None:
        """Takes the hooks off, ends the thread, closes the files."""
        self.undo()
        if self.window is not None:
            self.window.close()
        self.adviser.close()
        self.files.close()


_REMEDIES = {
    Stuck.NOT_OWNER: "uid {uid} neither owns nor may write the weight files: run as their owner, or own them (fsGroup)",
    Stuck.SHARED: "another process has them mapped too: page-out works once it ends",
    Stuck.LOCKED: "they are locked in memory (mlock)",
    Stuck.IN_USE: "another component in use needs them",
    Stuck.OTHER: "the kernel gives no reason",
}


def without_effect_text(name: str, outcome: PageOutcome, reason: Stuck) -> str:
    """The warning that page-out does nothing, with what to change."""
    why = _REMEDIES[reason].format(uid=os.geteuid())
    return f"{name}: page-out of {outcome.requested_bytes} bytes had no effect ({reason.value}): {why}"
