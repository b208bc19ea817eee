"""The window on devices that compute where the weights are mapped: advice about pages instead of copies.

A pass over the layers is a cyclic scan, and a cache that drops what was used longest ago serves a scan larger than
itself worst of all: it always drops what is needed next. So a fixed part of the bytes stays, a prefix of the pass or
spread over it; the others are paged out right behind their use, before the kernel has to choose a victim, and are
read ahead of it. Measured on 3072 MiB under a cap of 2048 MiB: LRU re-reads 3072 MiB a pass, this the 1536 MiB that
do not fit (MADV_COLD in place of MADV_PAGEOUT changes nothing).

What streams is read around the page cache where the file system allows it (see `direct`), and else through it: brought
in before its use and paged out behind it.

Room is measured before every pass, so what is kept follows a cap that moves. The mapping is there all the time: advice
can make a pass slow, never wrong.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from sojourn.inference.errors import ModelError
from sojourn.inference.offload.adviser import Adviser, Job, PageAdvice
from sojourn.inference.offload.direct import DirectReader, Landing, Placement, place
from sojourn.inference.offload.observer import Fallback, Observer, silent
from sojourn.inference.offload.order import CallOrder
from sojourn.inference.offload.pass_plan import PassPlan, buffers, plan_pass
from sojourn.inference.offload.passes import hook_passes
from sojourn.inference.offload.pieces import Piece
from sojourn.inference.offload.room import SLACK_BYTES, Room
from sojourn.inference.offload.settings import ResidentPolicy
from sojourn.inference.offload.spans import Span, merged, size_of, without
from sojourn.residencyd.kernel.errors import KernelError
from torch import nn
from torch.utils.hooks import RemovableHandle

# What is on its way ahead of the computation, besides the module that runs; one module in any case. Every byte of it is
# one that cannot be kept, and a disk is kept busy by one module of a few MiB on its way.
READ_AHEAD_BYTES = 4 << 20

# Left free in the first pass, of which it is not known yet what it allocates.
FIRST_PASS_BYTES = 64 << 20


@dataclass(frozen=True)
class _Ahead:
    """A piece on its way: pages that are being brought in, and a buffer that is being filled."""

    pages: Job | None
    landing: Landing | None


class PageWindow:
    """Gives page advice around the modules of a component. All methods are called from threads that compute.

    Args:
        name: Of the component, for metrics.
        pieces: What can stream.
        room: Measures what may be in memory, given the spans of all pieces.
        adviser: Carries the advice out.
        policy: Which pieces stay.
        rest: Whole pages of mapped weights that are in no piece's spans: small ones, and the ends of large ones. Every
            pass uses them, they stay.
        anonymous: Reads what the process has allocated, to learn what a pass takes.
        read_ahead_bytes: On their way ahead of the module that runs.
        resident: Counts the bytes of spans that are in memory, to verify what was paged out.
        advice: The kernel calls.
        direct: Opens the way around the page cache; None if there is none.
        observer: Told of page-outs and waits.
        warn: Called with a text at the first failure.
    """

    def __init__(
        self,
        name: str,
        pieces: Sequence[Piece],
        *,
        room: Callable[[Sequence[Span]], Room],
        adviser: Adviser,
        resident: Callable[[Sequence[Span]], int],
        policy: ResidentPolicy = ResidentPolicy.STRIDED,
        rest: Sequence[Span] = (),
        anonymous: Callable[[], int] = lambda: 0,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
        advice: PageAdvice | None = None,
        direct: Callable[[], DirectReader] | None = None,
        observer: Observer = silent,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.name = name
        self.pieces = tuple(pieces)
        self.order = CallOrder.of(len(self.pieces))
        self.spans = merged(span for piece in self.pieces for span in piece.spans)
        self.plan = PassPlan(kept_bytes=size_of(self.spans), streamed=((),) * len(self.pieces))
        self.room_bytes = size_of(self.spans)
        self._room = room
        self._adviser = adviser
        self._resident = resident
        self._policy = policy
        self.rest = tuple(rest)
        self._anonymous = anonymous
        self._read_ahead_bytes = read_ahead_bytes
        self._advice = advice or PageAdvice()
        self._open_direct = direct
        self._direct: DirectReader | None = None
        self._placements: dict[int, Placement] = {}
        self._placed_for: PassPlan | None = None
        self._in_use: dict[int, Landing] = {}
        self._observer = observer
        self._warn = warn
        self._warned = False
        self._ahead: dict[int, _Ahead] = {}
        self._given_back: list[Span] = []
        self._peak_bytes = 0
        self._planned_for = self.order.known
        self._cold = False
        self._passed = False

    # The life of a pass

    @property
    def streams(self) -> bool:
        """Whether this pass gives anything back."""
        return self.plan.streamed_bytes > 0

    @property
    def acts(self) -> bool:
        """Whether this pass gives any advice."""
        return self.streams or self._cold

    def begin_pass(self) -> None:
        """Measures the room and decides what this pass keeps."""
        self.order = self.order.begun()
        try:
            if self.streams:
                self._adviser.drain()
                self._account()
            room = self._room(self.spans)
        except (KernelError, OSError) as error:
            self._fell_back(f"the room cannot be measured: {error}")
            return
        coming_bytes = max(0, self._peak_bytes - self._allocated()) if self._passed else FIRST_PASS_BYTES
        self.room_bytes = room.for_weights(coming_bytes=coming_bytes) + self._buffers_bytes() - size_of(self.rest)
        before, self.plan = self.plan, self._steady(self._planned())
        self._make_buffers()
        self._observer.streams(component=self.name, size_bytes=self.plan.streamed_bytes)
        # What is missing of the kept bytes is brought in exactly. Left to page faults it would come with read-ahead,
        # into what was given back a moment ago; that meets the cap, and costs other kept bytes.
        changed = before.streamed != self.plan.streamed
        self._cold = changed or room.resident_bytes < self.plan.kept_bytes
        self._peak_bytes = 0
        if changed:
            self._give_back_what_stayed(before)
        if self._cold:
            self._warm_up()
        self._read_on()

    def _planned(self) -> PassPlan:
        return plan_pass(
            [piece.spans for piece in self.pieces],
            self.order.known,
            room_bytes=self.room_bytes - self._slack_bytes,
            read_ahead_bytes=self._read_ahead_bytes,
            policy=self._policy,
            buffered=self._open_direct is not None,
        )

    @property
    def _slack_bytes(self) -> int:
        """Half of it where nothing enters or leaves the page cache within a pass."""
        return SLACK_BYTES if self._open_direct is None else SLACK_BYTES // 2

    def _steady(self, new: PassPlan) -> PassPlan:
        """The plan so far while it fits and the new one keeps little more: each change reads what it exchanges."""
        old = self.plan
        fits = old.kept_bytes + old.window_bytes + self._slack_bytes // 2 <= self.room_bytes
        gains = not new.streamed_bytes or new.kept_bytes - old.kept_bytes > 2 * self._slack_bytes
        same_order, self._planned_for = self._planned_for == self.order.known, self.order.known
        return old if old.streamed_bytes and fits and same_order and not gains else new

    def end_pass(self) -> None:
        """The component's forward has ended well: its calls are known now."""
        self.order = self.order.ended()
        self._passed = True

    def enter(self, index: int) -> None:
        """A module is about to compute: waits for its pages if they are on their way, and sends for the next ones."""
        self.order = self.order.called(index)
        began = time.perf_counter()
        ahead = self._ahead.pop(index, None) or self._unexpected(index)
        if ahead is not None:
            self._receive(index, ahead)
            self._observer.waited(component=self.name, seconds=time.perf_counter() - began)
        self._read_on()

    def leave(self, index: int) -> None:
        """A module has computed: what streams of it goes."""
        landing = self._in_use.pop(index, None)
        if landing is None or self._direct is None:
            self._give_back(index)
            return
        self._direct.give_back(landing)
        self._observer.read_directly(component=self.name, size_bytes=size_of(self.plan.streamed[index]))
        self._read_on()

    def pause(self) -> None:
        """The component is not needed for a while: the buffers go."""
        for index in list(self._ahead):
            self._forget(index)
        self._placed_for = None
        if self._direct is not None:
            self._direct.open(0, 0)

    def close(self) -> None:
        """Ends what reads."""
        self.pause()
        if self._direct is not None:
            self._direct.close()

    def buffers(self) -> list[torch.Tensor]:
        """Memory that weights are in while they stream."""
        return self._direct.tensors() if self._direct is not None else []

    def _read_on(self) -> None:
        """Sends for the next streamed pieces, and gives back what was sent for and is no longer next."""
        wanted = list(self._next_streamed())
        for index in [index for index in self._ahead if index not in wanted]:
            self._forget(index)
        for index in wanted:
            if index not in self._ahead:
                self._ahead[index] = self._sent_for(index)

    def _sent_for(self, index: int) -> _Ahead:
        pages, landing = self._fetched(index), None
        if self._direct is not None and index in self._placements:
            landing = self._direct.fetch(index, self.pieces[index].weights, self._placements[index])
        return _Ahead(self._adviser.submit(self._populate, pages) if pages else None, landing)

    def _unexpected(self, index: int) -> _Ahead | None:
        """Sends for a piece at its use: left to page faults it would come with read-ahead."""
        lands = index in self._placements
        if not lands and not self._fetched(index):
            return None
        if lands and self._ahead and self._direct is not None and not self._direct.free:
            self._forget(next(reversed(self._ahead)))
        if lands and self._direct is not None and not self._direct.free:
            return None
        return self._sent_for(index)

    def _receive(self, index: int, ahead: _Ahead) -> None:
        """Waits for a piece, and has its module compute on the buffer that it has landed in."""
        if ahead.pages is not None:
            ahead.pages.done.wait()
        if ahead.landing is None or self._direct is None:
            return
        try:
            ahead.landing.bind()
        except OSError as error:
            self._go_through_the_cache(error)
        except ModelError:
            self._direct.give_back(ahead.landing)
            raise
        else:
            self._in_use[index] = ahead.landing

    def _forget(self, index: int) -> None:
        """What was sent for is not needed."""
        landing = self._ahead.pop(index).landing
        if landing is not None and self._direct is not None:
            self._direct.give_back(landing)
        else:
            self._give_back(index)

    def _fetched(self, index: int) -> tuple[Span, ...]:
        """Pages to bring in of a piece: what streams through them, and what is kept while little of that is there."""
        piece, streamed = self.pieces[index].spans, self.plan.streamed[index]
        if self._direct is None or not streamed:
            return piece if self._cold else streamed
        return without(piece, streamed) if self._cold else ()

    def _next_streamed(self) -> Iterator[int]:
        """The next streamed pieces, one at least, and no more than the read-ahead and the free buffers hold."""
        if not self.acts:
            return
        left, free = self._read_ahead_bytes, self._free_buffers()
        for index in self.order.ahead():
            size, lands = size_of(self._fetched(index)), index in self._placements
            if not size and not lands:
                continue
            if (size and size > left < self._read_ahead_bytes) or (lands and not free):
                return
            yield index
            left, free = left - size, free - lands

    # Around the page cache

    def _make_buffers(self) -> None:
        """Buffers for what streams by the plan, where they are not there yet."""
        if self._open_direct is None or self._placed_for is self.plan:
            return
        for index in list(self._ahead):
            self._forget(index)
        streamed = {index: spans for index, spans in enumerate(self.plan.streamed) if spans}
        self._placements = {index: place(list(self.pieces[index].weights), own) for index, own in streamed.items()}
        largest = max((placement.size_bytes for placement in self._placements.values()), default=0)
        try:
            if self._direct is None and largest:
                self._direct = self._open_direct()
            if self._direct is not None:
                self._direct.open(buffers(largest, self._read_ahead_bytes) if largest else 0, largest)
        except OSError as error:
            self._go_through_the_cache(error)
            self.plan = self._planned()
        self._placed_for = self.plan

    def _go_through_the_cache(self, error: OSError) -> None:
        """There is no way around it, or no longer."""
        for landing in self._in_use.values():
            landing.unbind()
        self._in_use.clear()
        for index in list(self._ahead):
            self._forget(index)
        if self._direct is not None:
            self._direct.close()
        self._open_direct, self._direct, self._placements = None, None, {}
        self._observer.fell_back(reason=Fallback.DIRECT)
        self._warn(f"{self.name}: weights that stream go through the page cache: {error}")

    def _free_buffers(self) -> int:
        on_their_way = sum(ahead.landing is not None for ahead in self._ahead.values())
        return on_their_way + (self._direct.free if self._direct is not None else 0)

    def _buffers_bytes(self) -> int:
        return self._direct.size_bytes if self._direct is not None else 0

    def _allocated(self) -> int:
        """What the process has allocated, these buffers apart."""
        return self._anonymous() - self._buffers_bytes()

    def _warm_up(self) -> None:
        """Brings in what is in no piece, before a page fault does it with read-ahead."""
        if self._direct is not None:
            self._adviser.submit(self._direct.drop, [span for spans in self.plan.streamed for span in spans])
        for act in (self._advice.will_need, self._advice.populate):
            self._adviser.submit(act, self.rest)
        self._adviser.drain()

    def _give_back_what_stayed(self, before: PassPlan) -> None:
        """What streams now and did not before may still be in memory, in the place of what is to be kept."""
        for index, spans in enumerate(self.plan.streamed):
            if index not in self._ahead and (new := without(spans, before.streamed[index])):
                self._adviser.submit(self._page_out, new)
                self._given_back.extend(new)

    # On the adviser's thread, where a look at what the computation has allocated just now costs it nothing: within an
    # operation that is more than between two (a matrix product packs its weights first).

    def look(self) -> None:
        """Sees what is allocated now."""
        self._peak_bytes = max(self._peak_bytes, self._allocated())

    def _populate(self, address: int, length: int) -> None:
        self.look()
        self._advice.populate(address, length)

    def _page_out(self, address: int, length: int) -> None:
        self.look()
        self._advice.page_out(address, length)

    def _give_back(self, index: int) -> None:
        if spans := self.plan.streamed[index]:
            self._adviser.submit(self._page_out, spans)
            self._given_back.extend(spans)

    def _account(self) -> None:
        """What the last pass gave back and what is gone of it; what was sent for again since is left out."""
        again = [index for index, ahead in self._ahead.items() if ahead.landing is None]
        spans = without(self._given_back, [span for index in again for span in self.plan.streamed[index]])
        self._given_back = []
        requested = size_of(spans)
        if requested:
            verified = max(0, requested - self._resident(spans))
            self._observer.paged_out(component=self.name, requested_bytes=requested, verified_bytes=verified)

    def _fell_back(self, why: str) -> None:
        self._observer.fell_back(reason=Fallback.PREFETCH)
        if not self._warned:
            self._warned = True
            self._warn(f"{self.name}: the kernel alone decides which weights stay in memory: {why}")


def hook_pages(
    component: nn.Module, layers: Sequence[nn.Module], window: PageWindow, *, check: Callable[[], None]
) -> Callable[[], None]:
    """Makes calls of the layers drive the window; returns what undoes it.

    The pieces are hooked only while something streams: a hook on every module costs about 10 µs a call.

    Args:
        component: The module that holds the layers.
        layers: Those that the pieces are parts of.
        window: Over the pieces.
        check: Called before every pass; raises if the weights are no longer whole.
    """
    handles: list[RemovableHandle] = []

    def detach() -> None:
        while handles:
            handles.pop().remove()

    def begin() -> None:
        check()
        window.begin_pass()
        if window.acts and not handles:
            handles.extend(_hook_pieces(window))
        elif not window.acts:
            detach()

    def end(well: bool) -> None:
        if well:
            window.end_pass()

    undo_passes = hook_passes(component, layers, begin=begin, end=end)

    def undo() -> None:
        undo_passes()
        detach()

    return undo


def _hook_pieces(window: PageWindow) -> Iterator[RemovableHandle]:
    for index, piece in enumerate(window.pieces):
        yield piece.module.register_forward_pre_hook(lambda *_, i=index: window.enter(i), prepend=True)
        yield piece.module.register_forward_hook(lambda *_, i=index: window.leave(i), always_call=True)
