"""Who runs, who waits, and who is refused before any work.

One request runs at a time; a bounded number waits in order of arrival. A request whose clips are made but not yet
sent ("delivering") has left the pipeline, yet keeps a place in the queue: readers that are slow can then hold up
new requests, but never make the process grow.

The core (`Pace`, `Line`) is pure: time is passed in. `Admission` adds somebody to wake. All of it lives on the event
loop's thread.
"""

import asyncio
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sojourn.inference.errors import DeadlineTooShort, QueueFull
from sojourn.inference.requests import GenerationRequest, QualityTier

# Measurements older than this say nothing: a load that made steps slow an hour ago must not refuse deadlines now,
# and a service that refuses everything would never measure again.
MAX_AGE_SECONDS = 600.0

# Measurements kept for each size class.
WINDOW = 64

# Suggested when nothing has been measured yet.
MIN_RETRY_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a request costs.

    Attributes:
        clips: Clips to make.
        evaluations: Steps of the denoising loop of each clip, over all its chunks and levels.
        voxels: width × height × frames.
        decodes: Whether the latents are decoded and encoded, too.
        step_voxels: width × height × the frames that one step works on; `voxels` where a step works on all of them.
        quality: The tier: a step of one says nothing of a step of another.
    """

    clips: int
    evaluations: int
    voxels: int
    decodes: bool
    step_voxels: int | None = None
    quality: QualityTier = QualityTier.LOSSLESS

    @property
    def size_class(self) -> int:
        """Works of one class differ in voxels by less than a factor of two."""
        return self.voxels.bit_length()

    @property
    def step_class(self) -> int:
        """Works of one class differ in the voxels of a step by less than a factor of two."""
        return (self.step_voxels or self.voxels).bit_length()


def work_of(request: GenerationRequest, *, evaluations: int, step_frames: int) -> Work:
    """The cost of a request.

    Args:
        request: The request.
        evaluations: Steps of the denoising loop of each of its clips.
        step_frames: Frames that a step works on.
    """
    area = request.width * request.height
    return Work(
        clips=len(request.seeds),
        evaluations=evaluations,
        voxels=area * request.frames,
        step_voxels=area * step_frames,
        decodes=request.decodes,
        quality=request.quality,
    )


class Samples:
    """The median of recent measurements in seconds."""

    def __init__(self) -> None:
        self._taken: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def add(self, seconds: float, *, now: float) -> None:
        """Adds a measurement."""
        self._taken.append((now, seconds))

    def median(self, *, now: float) -> float | None:
        """The median; None without a measurement young enough."""
        recent = [seconds for at, seconds in self._taken if now - at <= MAX_AGE_SECONDS]
        return statistics.median(recent) if recent else None


class Pace:
    """How long requests take here, by size class, as measured."""

    def __init__(self) -> None:
        self._steps: dict[tuple[QualityTier, int], Samples] = {}
        self._overheads: dict[tuple[bool, int], Samples] = {}

    def observe_step(self, work: Work, seconds: float, *, now: float) -> None:
        """Notes the seconds of one transformer evaluation."""
        self._steps.setdefault((work.quality, work.step_class), Samples()).add(seconds, now=now)

    def observe_overhead(self, work: Work, seconds: float, *, now: float) -> None:
        """Notes the seconds that one clip took outside its steps."""
        self._overheads.setdefault((work.decodes, work.size_class), Samples()).add(seconds, now=now)

    def step_seconds(self, work: Work, *, now: float) -> float:
        """Seconds of one evaluation; 0 where unknown.

        Of an unmeasured class, those of the nearest smaller one of its tier: a bound from below, as more work is never
        quicker.
        """
        classes = sorted((size for quality, size in self._steps if quality is work.quality), reverse=True)
        for size_class in classes:
            median = self._steps[work.quality, size_class].median(now=now)
            if size_class <= work.step_class and median is not None:
                return median
        return 0.0

    def seconds(self, work: Work, *, now: float) -> float:
        """Seconds of the whole request; 0 where nothing is known."""
        overheads = self._overheads.get((work.decodes, work.size_class))
        overhead = (overheads.median(now=now) if overheads else None) or 0.0
        return work.clips * (work.evaluations * self.step_seconds(work, now=now) + overhead)


@dataclass(eq=False, kw_only=True)
class Ticket:
    """A request's place. `started` is None while it waits."""

    work: Work
    started: float | None = None


class Line:
    """One running request, those waiting in order, and those delivering."""

    def __init__(self, *, limit: int, pace: Pace) -> None:
        self.limit = limit
        self.pace = pace
        self.running: Ticket | None = None
        self.waiting: deque[Ticket] = deque()
        self.delivering: set[Ticket] = set()

    @property
    def size(self) -> int:
        """All requests that hold a place."""
        return (self.running is not None) + len(self.waiting) + len(self.delivering)

    def remaining_seconds(self, *, now: float) -> float:
        """Estimated seconds until the running request leaves the pipeline."""
        if self.running is None or self.running.started is None:
            return 0.0
        return max(0.0, self.pace.seconds(self.running.work, now=now) - (now - self.running.started))

    def ahead_seconds(self, *, now: float) -> float:
        """Estimated seconds until a request that comes now would start."""
        queued = sum(self.pace.seconds(ticket.work, now=now) for ticket in self.waiting)
        return self.remaining_seconds(now=now) + queued

    def require_place(self, *, now: float, arriving: int = 0) -> None:
        """Refuses when all places are taken, `arriving` requests that are being judged included.

        Raises:
            QueueFull: With the time when a place is likely to be free.
        """
        held = self.size + arriving
        # One more than the limit fits: the one that runs, or will at once.
        if held > self.limit:
            retry = max(MIN_RETRY_SECONDS, self.remaining_seconds(now=now))
            raise QueueFull(waiting=held - 1, limit=self.limit, retry_after_seconds=retry)

    def admit(self, work: Work, *, now: float, deadline: float | None) -> Ticket:
        """Gives the last place.

        Args:
            work: What the request costs.
            now: Reading of the clock that `deadline` is on.
            deadline: When the caller stops waiting; None for never.

        Raises:
            QueueFull: No place.
            DeadlineTooShort: What is measured, and the work before it, do not fit before the deadline.
        """
        self.require_place(now=now)
        if deadline is not None:
            self._require_time(work, now=now, left=deadline - now)
        ticket = Ticket(work=work)
        self.waiting.append(ticket)
        return ticket

    def _require_time(self, work: Work, *, now: float, left: float) -> None:
        ahead, own = self.ahead_seconds(now=now), self.pace.seconds(work, now=now)
        if left <= 0 or ahead + own > left:
            step = self.pace.step_seconds(work, now=now)
            raise DeadlineTooShort(
                f"the deadline is in {max(left, 0.0):.3g} s, but this request takes about {own:.3g} s "
                f"({step:.3g} s per step) after {ahead:.3g} s of work before it; allow {ahead + own:.3g} s, "
                "or ask for fewer steps, frames or pixels"
            )

    def start_next(self, *, now: float) -> Ticket | None:
        """Starts the first that waits, when nothing runs."""
        if self.running is not None or not self.waiting:
            return None
        self.running = self.waiting.popleft()
        self.running.started = now
        return self.running

    def deliver(self, ticket: Ticket) -> None:
        """Frees the pipeline; the request goes on sending."""
        if self.running is ticket:
            self.running = None
            self.delivering.add(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Gives a place up, whichever it is. Leaving twice does nothing."""
        if self.running is ticket:
            self.running = None
        elif ticket in self.waiting:
            self.waiting.remove(ticket)
        else:
            self.delivering.discard(ticket)


@dataclass(eq=False, kw_only=True)
class Place:
    """A ticket, and what its holder awaits.

    Attributes:
        position: Requests before this one when it was admitted, the running one included.
    """

    ticket: Ticket
    position: int
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Admission:
    """The line, with its waiters woken in order."""

    def __init__(
        self,
        *,
        limit: int,
        clock: Callable[[], float],
        changed: Callable[[int, int], None] = lambda running, waiting: None,
    ) -> None:
        """Args: `changed` is called with the numbers of running and waiting requests."""
        self.pace = Pace()
        self.line = Line(limit=limit, pace=self.pace)
        self._clock = clock
        self._changed = changed
        self._places: dict[Ticket, Place] = {}

    def enter(self, work: Work, *, deadline: float | None) -> Place:
        """Takes the last place; see `Line.admit`."""
        held_before = (self.line.running is not None) + len(self.line.waiting)
        ticket = self.line.admit(work, now=self._clock(), deadline=deadline)
        place = Place(ticket=ticket, position=held_before)
        self._places[ticket] = place
        self._advance()
        return place

    def deliver(self, place: Place) -> None:
        """See `Line.deliver`."""
        self.line.deliver(place.ticket)
        self._advance()

    def leave(self, place: Place) -> None:
        """See `Line.leave`."""
        self.line.leave(place.ticket)
        self._places.pop(place.ticket, None)
        self._advance()

    def dismiss_waiting(self, error: Exception) -> None:
        """Ends the wait of all that wait with `error`."""
        for ticket in tuple(self.line.waiting):
            place = self._places[ticket]
            self.leave(place)
            if not place.turn.done():
                place.turn.set_exception(error)

    def _advance(self) -> None:
        while (ticket := self.line.start_next(now=self._clock())) is not None:
            turn = self._places[ticket].turn
            if turn.done():  # its holder was cancelled and has not come to leave yet
                self.line.leave(ticket)
                continue
            turn.set_result(None)
        self._changed(int(self.line.running is not None), len(self.line.waiting))
