"""Faults in one request: told truthfully, counted, and without a trace in the next one."""

import asyncio
import gc
import logging
import weakref
from typing import Any

import grpc
import grpc.aio
import pytest
from sojourn.inference.pipeline import Pipeline
from sojourn.inference.requests import Clip, GenerationRequest
from sojourn.inference.watch import Watch
from sojourn.v1 import inference_pb2 as pb

from tests.inference.server.serving import Around, Client, request, serving, violations

BAD_SEED = 666


class BadFor(Around):
    """Another engine for one seed."""

    def __init__(self, engine: Any, other: Any) -> None:
        super().__init__(engine)
        self._other = other

    def run_clip(self, request: GenerationRequest, clip_index: int, watch: Watch) -> Clip:
        engine = self._other if request.seeds[clip_index] == BAD_SEED else self.engine
        return engine.run_clip(request, clip_index, watch)


class Broken(Around):
    """Fails in the middle of the real pipeline, with a tensor on its stack."""

    tensor: "weakref.ref[Any] | None" = None

    def run_clip(self, request: GenerationRequest, clip_index: int, watch: Watch) -> Clip:
        clip = self.engine.run_clip(request, clip_index, watch)
        Broken.tensor = weakref.ref(clip.latents)
        raise RuntimeError("secret /path/of/ours")


async def read(call: Any) -> pb.GenerateResponse | None:
    try:
        response: pb.GenerateResponse = await call.read()
    except grpc.aio.AioRpcError:
        return None
    return response if response is not grpc.aio.EOF else None


async def test_nan_is_an_error_with_its_step_and_never_a_picture(pipeline: Pipeline, poisoned: Pipeline) -> None:
    async with serving(BadFor(pipeline, poisoned)) as served:
        before = (await served.client.generate(request())).sha256
        call = served.client.call(request(seed=BAD_SEED, outputs=[pb.OUTPUT_FORMAT_MP4, pb.OUTPUT_FORMAT_LATENTS]))
        kinds = set()
        while (response := await read(call)) is not None:
            kinds.add(response.WhichOneof("event"))
        assert await call.code() is grpc.StatusCode.INTERNAL
        assert "step 1 of stage denoise holds a NaN or infinity" in await call.details()
        assert kinds == {"accepted", "progress"}
        assert served.sample("nonfinite_outputs_total", stage="denoise") == 1
        assert served.sample("requests_total", workflow="t2va", code="INTERNAL") == 1
        assert (await served.client.generate(request())).sha256 == before


async def test_unexpected_error_leaks_nothing_and_harms_nothing(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(BadFor(pipeline, Broken(pipeline))) as served:
        before = (await served.client.generate(request())).sha256
        error = await served.client.error(request(seed=BAD_SEED))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in str(error.details())
        (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
        assert record.request_id in str(error.details())  # type: ignore[attr-defined]
        assert "secret" in str(record.exc_info)
        assert (await served.client.generate(request())).sha256 == before


async def test_failed_request_keeps_no_tensors(pipeline: Pipeline) -> None:
    gc.disable()
    logging.disable()  # pytest keeps the records, and with them the frames
    try:
        async with serving(BadFor(pipeline, Broken(pipeline))) as served:
            await served.client.error(request(seed=BAD_SEED))
            assert Broken.tensor is not None
            assert Broken.tensor() is None, "kept alive by a reference cycle"
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


async def test_invalid_request_tells_every_field_over_the_wire(pipeline: Pipeline) -> None:
    async with serving(pipeline) as served:
        error = await served.client.error(request(prompt="", steps=0, size=pb.Size(width=1080, height=8)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert set(violations(error)) == {"prompt", "steps", "size.width", "size.height"}
        assert served.sample("requests_refused_total", reason="invalid") == 1


async def test_hundreds_of_violations_fit_through(pipeline: Pipeline) -> None:
    async with serving(pipeline) as served:
        error = await served.client.error(request(outputs=[1] * 500, prompt="\x00" * 20_000))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(violations(error)) >= 10


async def test_unsupported_is_a_failed_precondition(pipeline: Pipeline) -> None:
    async with serving(pipeline) as served:
        error = await served.client.error(request(quality=pb.QUALITY_TIER_HIGH))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "lossless" in str(error.details())


async def test_request_larger_than_the_limit_is_refused(pipeline: Pipeline) -> None:
    async with serving(pipeline, max_message_bytes=100_000) as served:
        error = await served.client.error(request(prompt="x" * 200_000))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await served.client.generate(request())


async def test_bytes_that_are_no_request_are_refused(pipeline: Pipeline) -> None:
    async with serving(pipeline) as served:
        call = served.client.channel.unary_stream("/sojourn.v1.InferenceService/Generate")
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in call(b"\x0a\x02\xff\xfe"):  # the prompt is not UTF-8
                pass
        await served.client.generate(request())


async def test_parallel_requests_equal_their_solo_runs(pipeline: Pipeline) -> None:
    messages = [request(seed=100 + n, steps=3 + n % 4, flow_shift=4.0 + n) for n in range(8)]
    async with serving(pipeline) as served:
        solo = [(await served.client.generate(message)).sha256 for message in messages]
        async with grpc.aio.insecure_channel(served.target) as channel:
            callers = [served.client, Client(channel)]
            together = await asyncio.gather(*(callers[n % 2].generate(m) for n, m in enumerate(messages)))
    assert [result.sha256 for result in together] == solo
    assert len({sha for (sha,) in solo}) == 8
    positions = [result.accepted.queue_position for result in together if result.accepted]
    assert sorted(positions) == list(range(8))
