"""Cancels, deadlines and callers that go: the work stops within a step, the place is free, the next bits are equal."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from sojourn.inference.pipeline import Pipeline
from sojourn.inference.watch import Event, Stage, StageBegan
from sojourn.v1 import inference_pb2 as pb

from tests.inference.server.serving import Client, Gated, Served, Slowed, error_detail, request, serving

CANCELLED, DEADLINE = "CANCELLED", "DEADLINE_EXCEEDED"
SLOW = 0.05
LONG = 40  # steps of a request that is stopped before its end


async def until_step(call: object, step: int) -> None:
    async for response in call:  # type: ignore[attr-defined]
        if response.WhichOneof("event") == "progress" and response.progress.step >= step:
            return
    raise AssertionError("the stream ended")


def at_stage(stage: Stage) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, StageBegan) and event.stage is stage


def ended(served: Served, code: str) -> float:
    return served.sample("requests_total", workflow="t2va", code=code)


async def assert_unharmed(served: Served, before: list[str]) -> None:
    await served.until_idle()
    assert served.sample("requests_running") == served.sample("requests_waiting") == 0
    assert (await served.client.generate(request())).sha256 == before


@pytest.mark.parametrize("step", [1, 3, 7])
async def test_cancel_at_a_step_stops_within_the_next(pipeline: Pipeline, step: int) -> None:
    engine = Slowed(pipeline, SLOW)
    async with serving(engine) as served:
        before = (await served.client.generate(request())).sha256
        call = served.client.call(request(seed=1, steps=LONG))
        await until_step(call, step)
        done = engine.steps_done[1]
        call.cancel()
        await served.until_idle()
        assert engine.steps_done[1] <= done + 2  # the one that ran, and one if it ended while the cancel travelled
        assert ended(served, CANCELLED) == 1
        assert served.sample("cancel_latency_seconds_count") == 1
        assert served.sample("cancel_latency_seconds_sum") < 2 * SLOW + 0.5
        await assert_unharmed(served, before)


@pytest.mark.parametrize("stage", [Stage.TEXT_ENCODE, Stage.DENOISE, Stage.DECODE, Stage.ENCODE_OUTPUT])
async def test_cancel_is_seen_in_every_stage(pipeline: Pipeline, stage: Stage) -> None:
    engine = Gated(pipeline, at_stage(stage), seeds=(1,))
    async with serving(engine) as served:
        before = (await served.client.generate(request())).sha256
        call = served.client.call(request(seed=1, outputs=[pb.OUTPUT_FORMAT_MP4]))
        reading = asyncio.create_task(call.read())
        await asyncio.to_thread(engine.reached.wait, 60)
        call.cancel()
        await served.until(lambda: ended(served, CANCELLED) == 1)
        steps_before = served.sample("step_duration_seconds_count")
        assert served.sample("requests_running") == 1, "the place is not free while the worker is busy"
        engine.open.set()
        await served.until_idle()
        assert served.sample("step_duration_seconds_count") == steps_before
        await asyncio.gather(reading, return_exceptions=True)
        await assert_unharmed(served, before)


async def test_cancel_while_queued_frees_the_place_at_once(pipeline: Pipeline) -> None:
    engine = Gated(pipeline, at_stage(Stage.DENOISE), seeds=(1,))
    async with serving(engine, max_waiting=1) as served:
        before = (await served.client.generate(request())).sha256
        running = asyncio.create_task(served.client.generate(request(seed=1)))
        await asyncio.to_thread(engine.reached.wait, 60)
        queued = served.client.call(request(seed=2))
        accepted = (await queued.read()).accepted
        assert accepted.queue_position == 1
        assert served.sample("requests_waiting") == 1
        queued.cancel()
        await served.until(lambda: served.sample("requests_waiting") == 0)
        assert ended(served, CANCELLED) == 1
        assert served.sample("cancel_latency_seconds_count") == 0
        next_one = asyncio.create_task(served.client.generate(request()))
        engine.open.set()
        assert (await next_one).sha256 == before
        await running


async def test_closed_channel_stops_the_work(pipeline: Pipeline) -> None:
    engine = Slowed(pipeline, SLOW)
    async with serving(engine) as served:
        before = (await served.client.generate(request())).sha256
        channel = grpc.aio.insecure_channel(served.target)
        await until_step(Client(channel).call(request(seed=1, steps=LONG)), 2)
        await channel.close()
        await served.until_idle()
        assert engine.steps_done[1] < 8
        assert ended(served, CANCELLED) == 1
        await assert_unharmed(served, before)


CALLER = """
import sys, grpc
from sojourn.v1 import inference_pb2 as pb, inference_pb2_grpc
stub = inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel(sys.argv[1]))
for response in stub.Generate(pb.GenerateRequest.FromString(bytes.fromhex(sys.argv[2]))):
    if response.progress.step:
        print(response.progress.step, flush=True)
"""


async def test_killed_client_process_stops_the_work(pipeline: Pipeline) -> None:
    engine = Slowed(pipeline, SLOW)
    async with serving(engine) as served:
        before = (await served.client.generate(request())).sha256
        message = request(seed=1, steps=LONG).SerializeToString().hex()
        environment = os.environ | {"PYTHONPATH": str(Path("proto").resolve())}
        caller = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CALLER, served.target, message, stdout=asyncio.subprocess.PIPE, env=environment
        )
        assert caller.stdout is not None
        assert await asyncio.wait_for(caller.stdout.readline(), 20) == b"1\n"
        caller.send_signal(signal.SIGKILL)
        await caller.wait()
        await served.until_idle()
        assert engine.steps_done[1] < LONG - 1
        assert ended(served, CANCELLED) == 1
        await assert_unharmed(served, before)


@pytest.mark.parametrize("timeout", [0.02, 0.4])
async def test_deadline_stops_a_run_within_a_step(pipeline: Pipeline, timeout: float) -> None:
    engine = Slowed(pipeline, 0.1)
    async with serving(engine) as served:  # nothing is measured yet, so nothing is refused
        error = await served.client.error(request(seed=1, steps=LONG), timeout=timeout)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await served.until_idle()
        assert engine.steps_done.get(1, 0) <= timeout / 0.1 + 2
        # On a busy machine the shorter one passes before the call has left the client.
        assert ended(served, DEADLINE) in ({0, 1} if timeout < 0.1 else {1})
        assert ended(served, CANCELLED) == 0
        before = (await served.client.generate(request())).sha256
        await assert_unharmed(served, before)


async def test_deadline_shorter_than_the_run_is_refused_before_work(pipeline: Pipeline) -> None:
    engine = Slowed(pipeline, SLOW)
    async with serving(engine) as served:
        before = (await served.client.generate(request())).sha256
        began = time.monotonic()
        error = await served.client.error(request(seed=1, steps=400), timeout=15)
        assert time.monotonic() - began < 10
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "s per step" in (error.details() or "")
        assert 1 not in engine.steps_done
        assert served.sample("requests_refused_total", reason="deadline") == 1
        assert ended(served, DEADLINE) == 1
        await served.client.generate(request(seed=1, steps=5), timeout=60)
        await assert_unharmed(served, before)


async def test_deadline_shorter_than_the_queue_is_refused_before_work(pipeline: Pipeline) -> None:
    engine = Slowed(pipeline, SLOW)
    async with serving(engine) as served:
        await served.client.generate(request())
        running = served.client.call(request(seed=1, steps=100))
        await until_step(running, 1)
        error = await served.client.error(request(seed=2), timeout=1)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "of work before it" in (error.details() or "")
        assert 2 not in engine.steps_done
        running.cancel()
        await served.until_idle()


async def test_deadline_that_passes_in_the_queue_ends_the_wait(pipeline: Pipeline) -> None:
    engine = Gated(pipeline, at_stage(Stage.TEXT_ENCODE))
    async with serving(engine) as served:
        running = asyncio.create_task(served.client.generate(request(seed=1)))
        await asyncio.to_thread(engine.reached.wait, 60)
        error = await served.client.error(request(seed=2), timeout=0.3)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await served.until(lambda: served.sample("requests_waiting") == 0)
        assert ended(served, DEADLINE) == 1
        engine.open.set()
        await running


async def test_full_queue_refuses_with_the_time_to_come_back(pipeline: Pipeline) -> None:
    engine = Slowed(pipeline, SLOW)
    async with serving(engine, max_waiting=1) as served:
        await served.client.generate(request())
        running = served.client.call(request(seed=1, steps=101))
        await until_step(running, 3)
        queued = served.client.call(request(seed=2))
        assert (await queued.read()).accepted.queue_position == 1
        error = await served.client.error(request(seed=3))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        retry = error_detail(error, error_details_pb2.RetryInfo()).retry_delay.ToMilliseconds() / 1000
        steps = served.sample("step_duration_seconds_sum") / served.sample("step_duration_seconds_count")
        assert 0.3 < retry / (100 * steps) < 1.2
        assert served.sample("requests_refused_total", reason="queue_full") == 1
        for call in (running, queued):
            call.cancel()
        await served.until_idle()


async def test_slow_reader_neither_grows_memory_nor_blocks_others(pipeline: Pipeline) -> None:
    async with serving(pipeline, max_waiting=1) as served:
        big = request(seed=1, size=pb.Size(width=48, height=48), frames=345, outputs=[pb.OUTPUT_FORMAT_PNG_FRAMES])
        slow = served.client.call(big)
        responses = aiter(slow)
        assert (await anext(responses)).HasField("accepted")
        await served.until(lambda: served.sample("requests_running") == 0)
        quick = await served.client.generate(request())  # the pipeline is free
        assert quick.completed is not None
        kinds = [response.WhichOneof("event") async for response in responses]
        assert kinds[-1] == "completed"


async def test_reader_that_stalls_loses_its_call(pipeline: Pipeline) -> None:
    async with serving(pipeline, stall_seconds=0.2) as served:
        options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(served.target, options=options) as channel:
            big = request(seed=1, size=pb.Size(width=48, height=48), frames=345, outputs=[pb.OUTPUT_FORMAT_PNG_FRAMES])
            stalled = Client(channel).call(big)
            await stalled.read()
            await served.until(lambda: ended(served, CANCELLED) == 1)
            line = served.server._servicer._hands.admission.line
            await served.until(lambda: line.size == 0)
            stalled.cancel()
        await served.until_idle()
