"""Generates in this process, with the server's own validation, run and messages, but without a server."""

import queue
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sojourn.inference.cli.loading import lazily_loaded
from sojourn.inference.requests import GenerationRequest
from sojourn.inference.server import messages, validation
from sojourn.inference.server.engine import Engine
from sojourn.inference.server.run import ClipDone, Ended, Happening, Made, Moved, Run
from sojourn.inference.watch import Stage, Watch
from sojourn.v1 import inference_pb2 as pb


@contextmanager
def stream(
    model: Path, device: str, dtype: str, message: pb.GenerateRequest, timeout: float | None
) -> Iterator[Iterator[pb.GenerateResponse]]:
    """The responses that a server of `model` would send; leaving the context stops what still runs.

    Args:
        model: The model folder.
        device: Where to run.
        dtype: What to compute in.
        message: What to make.
        timeout: Seconds that it may take, the loading of the model not counted; None for any.

    Raises:
        SojournError, RequestStopped: As the server would answer with a status.
    """
    engine = lazily_loaded(model, device=device, dtype=dtype)()
    if message.quality == pb.QUALITY_TIER_HIGH:
        engine.fingerprint()  # the tier is bound to it, and there is no server that has hashed the weights meanwhile
    request = validation.resolve(message, engine)
    began = time.monotonic()
    watch = Watch(clock=time.monotonic, deadline=None if timeout is None else began + timeout)
    happenings: queue.Queue[Happening] = queue.Queue()
    run = Run(engine=engine, request=request, request_id=uuid.uuid4().hex, watch=watch, post=happenings.put)
    worker = threading.Thread(target=run)
    worker.start()
    try:
        yield _responses(engine, request, happenings)
    finally:
        watch.cancel()
        worker.join()


def _responses(
    engine: Engine, request: GenerationRequest, happenings: queue.Queue[Happening]
) -> Iterator[pb.GenerateResponse]:
    parameters = messages.parameters(request, frames_per_second=engine.frames_per_second)
    yield pb.GenerateResponse(accepted=pb.Accepted(seed=request.seeds[0], parameters=parameters))
    completed, done = pb.Completed(), []
    seconds: dict[Stage, float] = {}
    while not isinstance(happening := happenings.get(), Ended):
        if isinstance(happening, Made):
            yield from _artifact(happening, completed)
        elif isinstance(happening, Moved):
            yield messages.progress(happening)
        elif isinstance(happening, ClipDone):
            done.append(happening)
        if isinstance(happening, Moved | ClipDone) and happening.ended is not None:
            stage, stage_seconds = happening.ended
            seconds[stage] = seconds.get(stage, 0.0) + stage_seconds
    if happening.error is not None:
        raise happening.error
    used, completed.quality_reason = messages.tier_used(done)
    completed.quality = messages.TIER_NUMBERS[used]
    completed.clips.extend(messages.clip_summaries(request, done))
    completed.timings.extend(messages.timings(seconds))
    completed.model_fingerprint = engine.fingerprint()
    yield pb.GenerateResponse(completed=completed)


def _artifact(made: Made, completed: pb.Completed) -> Iterator[pb.GenerateResponse]:
    artifact, index = made.artifact, len(completed.artifacts)
    with artifact.file:
        yield from messages.chunks(artifact, index=index, clip=made.clip)
    completed.artifacts.add(index=index, size_bytes=artifact.size_bytes, sha256=artifact.sha256)
