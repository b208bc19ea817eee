"""What the tests of the server share: a server in this loop, a client, and engines that misbehave on demand.

Every engine here is the real one with something put around it: time is stretched, a gate is closed, a weight is bad.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from sojourn.inference.requests import Clip, GenerationRequest
from sojourn.inference.server.config import Address, ServerConfig
from sojourn.inference.server.main import Server
from sojourn.inference.telemetry import Telemetry
from sojourn.inference.tracing import Traces
from sojourn.inference.watch import Event, StepDone, Watch
from sojourn.v1 import inference_pb2 as pb
from sojourn.v1 import inference_pb2_grpc as pb_grpc

ANY_PORT = Address(host="127.0.0.1", port=0)
LATENTS = pb.OUTPUT_FORMAT_LATENTS
PROMPT = "a moving seven"


def request(**fields: Any) -> pb.GenerateRequest:
    """A small request: latents of a 32 × 32 clip in 4 points, unless told otherwise."""
    asked = {"prompt": PROMPT, "steps": 4, "seed": 7, "outputs": [LATENTS], "size": pb.Size(width=32, height=32)}
    asked |= fields
    return pb.GenerateRequest(**{name: value for name, value in asked.items() if value is not None})


class Around:
    """An engine around another; what is not overridden is the other's."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class Slowed(Around):
    """Steps that take `step_seconds` longer; counts them by seed."""

    def __init__(self, engine: Any, step_seconds: float) -> None:
        super().__init__(engine)
        self.step_seconds = step_seconds
        self.steps_done: dict[int, int] = {}

    def run_clip(self, request: GenerationRequest, clip_index: int, watch: Watch) -> Clip:
        seed, listener = request.seeds[clip_index], watch.listener
        self.steps_done.setdefault(seed, 0)

        def heard(event: Event) -> None:
            if isinstance(event, StepDone):
                time.sleep(self.step_seconds)
                self.steps_done[seed] += 1
            listener(event)

        watch.listener = heard
        try:
            return self.engine.run_clip(request, clip_index, watch)
        finally:
            watch.listener = listener


class Gated(Around):
    """Stops at the events for which `closes` says so until `open` is called; for the seeds given, or all."""

    def __init__(self, engine: Any, closes: Callable[[Event], bool], *, seeds: tuple[int, ...] = ()) -> None:
        super().__init__(engine)
        self._closes, self._seeds = closes, seeds
        self.reached = threading.Event()
        self.open = threading.Event()

    def run_clip(self, request: GenerationRequest, clip_index: int, watch: Watch) -> Clip:
        listener = watch.listener

        def heard(event: Event) -> None:
            listener(event)
            if self._closes(event) and (not self._seeds or request.seeds[clip_index] in self._seeds):
                self.reached.set()
                assert self.open.wait(90), "nobody opened the gate"
                watch.check()

        # Left in place: the stage after the engine's own, ENCODE_OUTPUT, goes through it too.
        watch.listener = heard
        return self.engine.run_clip(request, clip_index, watch)


@dataclass
class Result:
    """All that a stream brought."""

    accepted: pb.Accepted | None = None
    progress: list[pb.Progress] = field(default_factory=list)
    artifacts: dict[int, bytes] = field(default_factory=dict)
    chunks: list[pb.ArtifactChunk] = field(default_factory=list)
    completed: pb.Completed | None = None
    order: list[str] = field(default_factory=list)

    @property
    def sha256(self) -> list[str]:
        assert self.completed is not None
        return [clip.latents_sha256 for clip in self.completed.clips]

    def add(self, response: pb.GenerateResponse) -> None:
        kind = response.WhichOneof("event")
        assert kind is not None
        self.order.append(kind)
        if kind == "progress":
            self.progress.append(response.progress)
        elif kind == "artifact":
            chunk = response.artifact
            self.chunks.append(chunk)
            self.artifacts[chunk.index] = self.artifacts.get(chunk.index, b"") + chunk.data
        else:
            setattr(self, kind, getattr(response, kind))


class Client:
    """A caller of one server."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub = pb_grpc.InferenceServiceStub(channel)

    def call(self, message: pb.GenerateRequest, **options: Any) -> Any:
        return self.stub.Generate(message, **options)

    async def generate(self, message: pb.GenerateRequest, **options: Any) -> Result:
        result = Result()
        async for response in self.call(message, **options):
            result.add(response)
        return result

    async def error(self, message: pb.GenerateRequest, **options: Any) -> grpc.aio.AioRpcError:
        try:
            await self.generate(message, **options)
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError("the call ended with OK")

    async def info(self, **options: Any) -> pb.GetInfoResponse:
        return await self.stub.GetInfo(pb.GetInfoRequest(), **options)


@dataclass
class Served:
    """A running server and a caller."""

    server: Server
    client: Client

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def sample(self, name: str, **labels: str) -> float:
        value = self.server.telemetry.registry.get_sample_value(f"sojourn_{name}", labels)
        assert value is not None, f"no series {name} {labels}"
        return value

    async def until(self, condition: Callable[[], bool], *, seconds: float = 60) -> None:
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, "it did not come to it"
            await asyncio.sleep(0.005)

    async def until_idle(self) -> None:
        line = self.server._servicer._hands.admission.line
        await self.until(lambda: line.size == 0 and self.server._servicer._calls == 0)


@contextlib.asynccontextmanager
async def serving(
    engine: Any,
    *,
    load: Callable[[], Any] | None = None,
    telemetry: Telemetry | None = None,
    traces: Traces | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """A server of `engine` on a free port, ready."""
    config = replace(ServerConfig(listen=ANY_PORT, metrics_listen=None, model_name="model"), **settings)
    server = Server(config, load or (lambda: engine), telemetry=telemetry, traces=traces)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            served = Served(server, Client(channel))
            if load is None:
                assert await ready(server)
            yield served
    finally:
        assert await server.stop(grace_seconds=0), "the worker thread is stuck"


async def ready(server: Server) -> bool:
    limit = time.monotonic() + 60
    while server.health.state == "loading":
        assert time.monotonic() < limit
        await asyncio.sleep(0.005)
    return server.health.state == "serving"


def violations(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """Field → description of the BadRequest detail."""
    detail = error_detail(error, error_details_pb2.BadRequest())
    return {violation.field: violation.description for violation in detail.field_violations}


def error_detail(error: grpc.aio.AioRpcError, kind: Any) -> Any:
    """The detail of that kind."""
    status = rpc_status.from_call(_AsCall(error))
    assert status is not None, "no details"
    for packed in status.details:
        if packed.Unpack(kind):
            return kind
    raise AssertionError(f"no {type(kind).__name__} in {status}")


class _AsCall:
    """grpc_status reads calls of the blocking API."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code, self.details = error.code, error.details
        self.trailing_metadata = lambda: tuple(error.trailing_metadata())
