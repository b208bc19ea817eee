"""The two calls of the contract.

`Generate` is a coroutine that writes, not a generator: a cancelled call then raises CancelledError at the line that
waits, and nothing is left to a finaliser. Every way out of it goes through `Job.close`.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeAlias

import grpc
import grpc.aio
from sojourn.inference import errors, tracing
from sojourn.inference.requests import GenerationRequest
from sojourn.inference.server import messages, validation
from sojourn.inference.server.admission import Admission, work_of
from sojourn.inference.server.engine import Engine
from sojourn.inference.server.figures import add_figures
from sojourn.inference.server.health import Health
from sojourn.inference.server.info import info
from sojourn.inference.server.job import Hands, Job
from sojourn.inference.server.run import ClipDone, Made, Moved, UnexpectedFailure
from sojourn.inference.server.status import is_expected, status_of
from sojourn.inference.telemetry import UNKNOWN_WORKFLOW, Telemetry
from sojourn.inference.tracing import CallTrace, NoTraces, Traces
from sojourn.inference.watch import Watch
from sojourn.v1 import inference_pb2 as pb
from sojourn.v1 import inference_pb2_grpc as pb_grpc

_logger = logging.getLogger(__name__)

# A call that ends this close to its deadline ended because of it: the caller's clock and ours tick apart.
DEADLINE_SLACK_SECONDS = 0.05

_GONE = "the caller has gone"

# Generic in the stubs, not at run time.
Context: TypeAlias = "grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]"
InfoContext: TypeAlias = "grpc.aio.ServicerContext[pb.GetInfoRequest, pb.GetInfoResponse]"


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """Serves one model.

    Args:
        health: Whether there is a model, and which.
        telemetry: What is counted.
        worker: The one thread that runs the pipeline.
        clock: Seconds of a monotonic clock.
        max_waiting: Places in the queue.
        stall_seconds: How long a reader may take nothing before its call is ended.
        model_name: What GetInfo says before the model is there.
        traces: Begins the traces of calls; none by default.
    """

    def __init__(
        self,
        *,
        health: Health,
        telemetry: Telemetry,
        worker: Executor,
        clock: Callable[[], float],
        max_waiting: int,
        stall_seconds: float,
        model_name: str,
        traces: Traces | None = None,
    ) -> None:
        admission = Admission(limit=max_waiting, clock=clock, changed=telemetry.queue_changed)
        self._hands = Hands(
            admission=admission, telemetry=telemetry, traces=traces or NoTraces(), worker=worker, clock=clock
        )
        self._health = health
        self._stall_seconds = stall_seconds
        self._model_name = model_name
        # Tokenizers are not made for two threads, and decoding media must not stop the event loop.
        self._judge = ThreadPoolExecutor(max_workers=1, thread_name_prefix="validation")
        self._judging = 0
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._jobs: set[Job] = set()

    async def GetInfo(  # noqa: N802 - the contract's name
        self, request: pb.GetInfoRequest, context: InfoContext
    ) -> pb.GetInfoResponse:
        """See the contract."""
        response = info(
            self._health,
            model_name=self._model_name,
            max_waiting=self._hands.admission.line.limit,
        )
        add_figures(response, self._hands.telemetry)
        return response

    async def Generate(  # type: ignore[override]  # noqa: N802 - the contract's name; the stubs know generators only
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """See the contract."""
        request_id = uuid.uuid4().hex
        trace = self._hands.traces.call(tuple(context.invocation_metadata() or ()))
        trace.describe({"sojourn.request_id": request_id})
        self._calls += 1
        self._idle.clear()
        try:
            error = await self._attempt(request, context, request_id, trace)
            if error is not None:
                await _abort(context, error, request_id)
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def drain(self, *, grace_seconds: float) -> None:
        """Lets what runs finish within the grace; what waits, or runs longer, ends with UNAVAILABLE."""
        draining = errors.NotServing("the server is shutting down; try another one")
        self._hands.admission.dismiss_waiting(draining)
        if await self._idle_within(grace_seconds):
            return
        for job in tuple(self._jobs):
            job.stop(errors.NotServing("the server shut down before the request was done; try another one"))

    async def idle(self, *, timeout_seconds: float) -> bool:
        """Waits until no call is left; answers whether that came within the time."""
        return await self._idle_within(timeout_seconds)

    def shutdown(self) -> None:
        """Lets the validation thread go."""
        self._judge.shutdown(wait=False, cancel_futures=True)

    async def _idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _attempt(
        self, message: pb.GenerateRequest, context: Context, request_id: str, trace: CallTrace
    ) -> BaseException | None:
        """Serves a call and counts its end; answers the error that the caller is to get."""
        deadline = self._deadline(context)
        error: BaseException | None = None
        try:
            await self._serve(message, context, request_id, deadline, trace)
        except asyncio.CancelledError:
            self._count(message, self._timely(errors.RequestCancelled(_GONE), deadline), request_id, trace)
            raise
        except errors.RequestCancelled as caught:
            error = self._timely(caught, deadline)
        except (Exception, errors.RequestStopped) as caught:
            error = caught.with_traceback(None) if is_expected(caught) else caught
            self._log_unexpected(error, request_id)
        self._count(message, error, request_id, trace)
        return error

    def _timely(self, cancelled: errors.RequestCancelled, deadline: float | None) -> BaseException:
        """What ended a call whose stream is gone: the caller, or its deadline, which looks the same from here."""
        if deadline is None or self._hands.clock() < deadline - DEADLINE_SLACK_SECONDS:
            return cancelled.with_traceback(None)
        return errors.DeadlineExceeded("the deadline of the request has passed")

    def _deadline(self, context: Context) -> float | None:
        left = context.time_remaining()
        return None if left is None else self._hands.clock() + left

    async def _serve(
        self,
        message: pb.GenerateRequest,
        context: Context,
        request_id: str,
        deadline: float | None,
        trace: CallTrace,
    ) -> None:
        engine = self._health.require_engine()
        request = await self._validated(message, engine)
        job = self._admit(request, request_id, deadline, trace)
        try:
            accepted_at = self._hands.clock()
            await self._write(context, self._accepted(job, engine))
            await self._write(context, messages.queued())
            await job.turn()
            job.start(engine)
            await self._stream(job, context)
            seconds = self._hands.clock() - accepted_at
            self._hands.telemetry.request_duration.labels(request.workflow).observe(seconds, trace.exemplar)
        finally:
            self._jobs.discard(job)
            job.close()

    async def _validated(self, message: pb.GenerateRequest, engine: Engine) -> GenerationRequest:
        self._hands.admission.line.require_place(now=self._hands.clock(), arriving=self._judging)
        self._judging += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._judge, validation.resolve, message, engine)
        finally:
            self._judging -= 1

    def _admit(self, request: GenerationRequest, request_id: str, deadline: float | None, trace: CallTrace) -> Job:
        engine = self._health.require_engine()  # the server may have begun to drain during validation
        work = work_of(request, evaluations=engine.evaluations(request), step_frames=engine.step_frames(request))
        place = self._hands.admission.enter(work, deadline=deadline)
        watch = Watch(clock=self._hands.clock, deadline=deadline)
        job = Job(
            hands=self._hands,
            request_id=request_id,
            request=request,
            work=work,
            place=place,
            watch=watch,
            trace=trace,
        )
        trace.describe(_facts(request))
        self._jobs.add(job)
        return job

    def _accepted(self, job: Job, engine: Engine) -> pb.GenerateResponse:
        request = job.request
        accepted = pb.Accepted(
            request_id=job.request_id,
            queue_position=job.place.position,
            seed=request.seeds[0],
            parameters=messages.parameters(request, frames_per_second=engine.frames_per_second),
        )
        return pb.GenerateResponse(accepted=accepted)

    async def _stream(self, job: Job, context: Context) -> None:
        clips: list[ClipDone] = []
        artifacts: list[pb.ArtifactSummary] = []
        while True:
            happening = await job.happenings.get()
            if isinstance(happening, Moved):
                await self._write(context, messages.progress(happening))
            elif isinstance(happening, Made):
                artifacts.append(await self._send(happening, len(artifacts), context))
            elif isinstance(happening, ClipDone):
                clips.append(happening)
            else:
                break
        if (error := job.error_of(happening)) is not None:
            raise error
        await self._write(context, await self._completed(job, clips, artifacts))

    async def _send(self, made: Made, index: int, context: Context) -> pb.ArtifactSummary:
        artifact = made.artifact
        with artifact.file:
            for chunk in messages.chunks(artifact, index=index, clip=made.clip):
                await self._write(context, chunk)
        return pb.ArtifactSummary(index=index, size_bytes=artifact.size_bytes, sha256=artifact.sha256)

    async def _completed(
        self, job: Job, clips: list[ClipDone], artifacts: list[pb.ArtifactSummary]
    ) -> pb.GenerateResponse:
        used, reason = messages.tier_used(clips)
        self._hands.telemetry.quality_requests.labels(job.request.quality, used).inc()
        # Shielded: the calls that wait for it share it, and one that is cancelled must not take it along.
        fingerprint = await asyncio.shield(self._health.fingerprint)
        completed = pb.Completed(
            timings=messages.timings(job.timings),
            model_fingerprint=fingerprint,
            clips=messages.clip_summaries(job.request, clips),
            artifacts=artifacts,
            quality=messages.TIER_NUMBERS[used],
            quality_reason=reason,
        )
        return pb.GenerateResponse(completed=completed)

    async def _write(self, context: Context, message: pb.GenerateResponse) -> None:
        """Writes, as fast as the caller reads."""
        try:
            # Not wait_for: before Python 3.12 it swallows a cancellation that comes just as the write is done.
            async with asyncio.timeout(self._stall_seconds):
                await context.write(message)
        except TimeoutError:
            raise errors.RequestCancelled(f"the caller has read nothing for {self._stall_seconds:g} s") from None
        except grpc.aio.BaseError as error:
            # The stream is gone, and the cancellation that says so has not come through yet.
            raise errors.RequestCancelled(_GONE) from error

    def _log_unexpected(self, error: BaseException, request_id: str) -> None:
        if not is_expected(error) and not isinstance(error, UnexpectedFailure):
            _logger.error("a request failed in the server", exc_info=error, extra={"request_id": request_id})

    def _count(
        self, message: pb.GenerateRequest, error: BaseException | None, request_id: str, trace: CallTrace
    ) -> None:
        workflow = validation.asked_workflow(message) or UNKNOWN_WORKFLOW
        code = "OK" if error is None else status_of(error, request_id=request_id).code.name
        self._hands.telemetry.ended(workflow=workflow, code=code, refused=refusal(error))
        trace.ended(code, message=str(error) if error is not None else "")
        if isinstance(error, errors.NonFiniteOutput):
            _logger.warning("%s", error, extra={"request_id": request_id})
        _logger.debug("request ended", extra={"request_id": request_id, "workflow": str(workflow), "code": code})


def _facts(request: GenerationRequest) -> tracing.Attributes:
    """What a trace tells of a request; never its prompt."""
    return {
        "sojourn.workflow": request.workflow.value,
        "sojourn.width": request.width,
        "sojourn.height": request.height,
        "sojourn.frames": request.frames,
        "sojourn.steps": request.steps,
        "sojourn.clips": len(request.seeds),
        "sojourn.quality": request.quality.value,
    }


async def _abort(context: Context, error: BaseException, request_id: str) -> None:
    status = status_of(error, request_id=request_id)
    message, trailers = status.trailers()
    try:
        await context.abort(status.code, message, trailers)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError:
        _logger.debug("nobody was there to be told of the end", extra={"request_id": request_id})


def refusal(error: BaseException | None) -> str | None:
    """The reason for which a request was refused before work; None where it was not."""
    if isinstance(error, errors.InvalidRequest):
        too_large = any("bytes; at most" in violation.description for violation in error.violations)
        return "too_large" if too_large else "invalid"
    table = (
        (errors.Unsupported, "invalid"),
        (errors.QueueFull, "queue_full"),
        (errors.DeadlineTooShort, "deadline"),
        (errors.NotServing, "not_ready"),
    )
    return next((reason for kind, reason in table if isinstance(error, kind)), None)
