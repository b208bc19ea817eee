"""One admitted request on the event loop's side: between the worker thread, the line, the metrics and the caller.

The place in the pipeline is given back when the worker ends, whether or not the caller is still there: a caller that
goes only leaves a wish to stop behind.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from sojourn.inference.errors import DeadlineExceeded, NonFiniteOutput, RequestCancelled
from sojourn.inference.requests import GenerationRequest
from sojourn.inference.server.admission import Admission, Place, Work
from sojourn.inference.server.engine import Engine
from sojourn.inference.server.run import ClipDone, Ended, Happening, Made, Moved, Run
from sojourn.inference.telemetry import Telemetry
from sojourn.inference.tracing import CallTrace, Traces
from sojourn.inference.watch import Stage, Watch

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Hands:
    """What all jobs share.

    Attributes:
        worker: The one thread that runs the pipeline.
    """

    admission: Admission
    telemetry: Telemetry
    traces: Traces
    worker: Executor
    clock: Callable[[], float]


@dataclass(eq=False, kw_only=True)
class Job:
    """One admitted request.

    Attributes:
        timings: Ended stages in the order of their first begin, seconds summed over clips.
        happenings: For the caller, in order; `Ended` is the last.
    """

    hands: Hands
    request_id: str
    request: GenerationRequest
    work: Work
    place: Place
    watch: Watch
    trace: CallTrace
    timings: dict[Stage, float] = field(default_factory=dict)
    happenings: asyncio.Queue[Happening] = field(default_factory=asyncio.Queue)
    _submitted: bool = False
    _ended: bool = False
    _abandoned: bool = False
    _stop_reason: Exception | None = None
    _stop_asked_at: float | None = None

    async def turn(self) -> None:
        """Waits in the queue.

        Raises:
            NotServing: The server drains.
        """
        entered = self.hands.clock()
        self.trace.began(Stage.QUEUED, at=time.time())
        await self.place.turn
        self.trace.paused(at=time.time())
        seconds = self.hands.clock() - entered
        self._stage_ended((Stage.QUEUED, seconds))
        self.hands.telemetry.request_queue.observe(seconds)

    def start(self, engine: Engine) -> None:
        """Hands the request to the worker. To be called in one's turn."""
        loop = asyncio.get_running_loop()

        def post(happening: Happening) -> None:
            # The loop may be gone when the process ends with a step still running.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._happened, happening)

        self._submitted = True
        run = Run(request_id=self.request_id, engine=engine, request=self.request, watch=self.watch, post=post)
        self.hands.worker.submit(run)

    def stop(self, reason: Exception) -> None:
        """Makes the worker end at its next check, with `reason` for the caller."""
        self._stop_reason = reason
        self._ask_to_stop()

    def close(self) -> None:
        """The caller is done, or gone. The place is free at once, or as soon as the worker has ended."""
        self._abandoned = True
        while not self.happenings.empty():
            self._dispose(self.happenings.get_nowait())
        if self._submitted and not self._ended:
            self._ask_to_stop()
        else:
            self.hands.admission.leave(self.place)

    def error_of(self, ended: Ended) -> BaseException | None:
        """What to tell the caller of the end."""
        if self._stop_reason is not None and isinstance(ended.error, RequestCancelled):
            return self._stop_reason
        return ended.error

    def _ask_to_stop(self) -> None:
        if self._stop_asked_at is None:
            self._stop_asked_at = self.hands.clock()
        self.watch.cancel()

    def _happened(self, happening: Happening) -> None:
        self._measure(happening)
        if not self._abandoned:
            self._trace(happening)
        if isinstance(happening, Ended):
            self._free_pipeline(happening)
        if self._abandoned:
            self._dispose(happening)
        else:
            self.happenings.put_nowait(happening)

    def _free_pipeline(self, ended: Ended) -> None:
        self._ended = True
        if ended.error is None and not self._abandoned:
            self.hands.admission.deliver(self.place)
        else:
            self.hands.admission.leave(self.place)
        if (asked_at := self._stopped_since(ended)) is not None:
            self.hands.telemetry.cancel_latency.observe(max(0.0, self.hands.clock() - asked_at))
        if isinstance(ended.error, NonFiniteOutput):
            self.hands.telemetry.nonfinite_outputs.labels(ended.error.stage).inc()

    def _stopped_since(self, ended: Ended) -> float | None:
        if isinstance(ended.error, DeadlineExceeded) and self._stop_asked_at is None:
            return self.watch.deadline
        return self._stop_asked_at

    def _measure(self, happening: Happening) -> None:
        now, telemetry, pace = self.hands.clock(), self.hands.telemetry, self.hands.admission.pace
        if isinstance(happening, Moved):
            telemetry.progressed(at=happening.at)
            self._stage_ended(happening.ended)
            if happening.step_seconds is not None:
                self._step_ended(happening.step, happening.step_seconds)
                pace.observe_step(self.work, happening.step_seconds, now=now)
        elif isinstance(happening, ClipDone):
            self._stage_ended(happening.ended)
            pace.observe_overhead(self.work, happening.overhead_seconds, now=now)

    def _trace(self, happening: Happening) -> None:
        if isinstance(happening, ClipDone):
            self.trace.paused(at=time.time())
        elif isinstance(happening, Moved) and happening.step_seconds is None:
            self.trace.began(happening.stage, at=happening.at)
        elif isinstance(happening, Moved) and happening.step_seconds is not None:
            seconds, at = happening.step_seconds, happening.at
            self.trace.stepped(happening.step, steps=happening.steps, seconds=seconds, at=at)

    def _stage_ended(self, ended: tuple[Stage, float] | None) -> None:
        if ended is not None:
            stage, seconds = ended
            self.timings[stage] = self.timings.get(stage, 0.0) + seconds
            self.hands.telemetry.stage_duration.labels(stage).observe(seconds, self.trace.exemplar)
            extra = {"request_id": self.request_id, "stage": stage, "seconds": round(seconds, 6)}
            _logger.debug("stage ended", extra=extra)

    def _step_ended(self, step: int, seconds: float) -> None:
        self.hands.telemetry.step_duration.observe(seconds)
        extra = {"request_id": self.request_id, "step": step, "seconds": round(seconds, 6)}
        _logger.debug("step ended", extra=extra)

    @staticmethod
    def _dispose(happening: Happening) -> None:
        if isinstance(happening, Made):
            happening.artifact.file.close()
