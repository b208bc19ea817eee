"""What the worker thread does for one request: make each clip, encode it, and tell the event loop of every step.

Nothing of the event loop is touched from here but `post`; what is told is frozen.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from sojourn.inference.encoding import Artifact, encode, latents_sha256
from sojourn.inference.requests import GenerationRequest, QualityTier
from sojourn.inference.server.engine import Engine
from sojourn.inference.server.status import is_expected
from sojourn.inference.server.stopwatch import Stopwatch
from sojourn.inference.watch import Event, Stage, StageBegan, Watch

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A stage has begun, or a step of it is done; the fields are those of the message `sojourn.v1.Progress`.

    Attributes:
        ended: The stage that ended with this one's begin, and its seconds.
        step_seconds: Seconds of the step; None at a stage's begin.
        at: Unix time.
    """

    stage: Stage
    step: int
    steps: int
    seconds_per_step: float
    clip: int
    ended: tuple[Stage, float] | None
    step_seconds: float | None
    at: float


@dataclass(frozen=True, kw_only=True)
class Made:
    """An artifact is encoded; whoever gets this closes its file."""

    clip: int
    artifact: Artifact


@dataclass(frozen=True, kw_only=True)
class ClipDone:
    """A clip is made and encoded.

    Attributes:
        ended: The last stage and its seconds.
        overhead_seconds: Seconds of the clip outside its steps.
        quality, quality_reason: The tier that it was made at, and why that is not all that was asked for.
    """

    clip: int
    latents_sha256: str
    ended: tuple[Stage, float] | None
    overhead_seconds: float
    quality: QualityTier
    quality_reason: str


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The worker is done with the request; `error` is what ended it, None at success."""

    error: BaseException | None


Happening = Moved | Made | ClipDone | Ended


class UnexpectedFailure(Exception):
    """Stands for an error that is in the log with its traceback already."""


class Run:
    """One request in the worker thread; called once.

    Args:
        request_id: For the log.
        engine: Makes the clips.
        request: What to make.
        watch: Stops the request; its listener is taken over.
        post: Gets everything that happens, `Ended` last and always. Must not block or raise.
    """

    def __init__(
        self,
        *,
        request_id: str,
        engine: Engine,
        request: GenerationRequest,
        watch: Watch,
        post: Callable[[Happening], None],
    ) -> None:
        self._request_id = request_id
        self._engine, self._request, self._watch, self._post = engine, request, watch, post
        self._clip = 0
        self._stopwatch = Stopwatch(began=watch.clock())
        watch.listener = self._heard

    def __call__(self) -> None:
        """Makes every clip of the request."""
        error: BaseException | None = None
        try:
            for clip in range(len(self._request.seeds)):
                self._clip = clip
                self._make_clip()
        except BaseException as caught:
            error = self._bare(caught)
        self._post(Ended(error=error))

    def _bare(self, error: BaseException) -> BaseException:
        """The error without its tracebacks: their frames hold the tensors of the request, in a reference cycle."""
        if not is_expected(error):
            extra = {"request_id": self._request_id}
            _logger.error("a request failed in the pipeline", exc_info=error, extra=extra)
            return UnexpectedFailure()
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)

    def _make_clip(self) -> None:
        stopwatch = self._stopwatch = Stopwatch(began=self._watch.clock())
        clip = self._engine.run_clip(self._request, self._clip, self._watch)
        self._watch.begin(Stage.ENCODE_OUTPUT)
        digest = latents_sha256(clip)
        for output in self._request.outputs:
            artifact = encode(clip, output, check=self._watch.check)
            self._post(Made(clip=self._clip, artifact=artifact))
        now = self._watch.clock()
        ended = stopwatch.end(at=now)
        overhead = now - stopwatch.began - sum(stopwatch.steps)
        done = ClipDone(
            clip=self._clip, latents_sha256=digest, ended=ended, overhead_seconds=overhead, quality=clip.quality,
            quality_reason=clip.quality_reason,
        )  # fmt: skip
        self._post(done)

    def _heard(self, event: Event) -> None:
        now = self._watch.clock()
        if isinstance(event, StageBegan):
            ended = self._stopwatch.begin(event.stage, at=now)
            self._tell(event.stage, 0, event.steps, ended=ended, step_seconds=None)
        else:
            seconds = self._stopwatch.step(at=now)
            self._tell(Stage.DENOISE, event.step, event.steps, ended=None, step_seconds=seconds)

    def _tell(
        self, stage: Stage, step: int, steps: int, *, ended: tuple[Stage, float] | None, step_seconds: float | None
    ) -> None:
        moved = Moved(
            stage=stage,
            step=step,
            steps=steps,
            seconds_per_step=self._stopwatch.seconds_per_step,
            clip=self._clip,
            ended=ended,
            step_seconds=step_seconds,
            at=time.time(),
        )
        self._post(moved)
