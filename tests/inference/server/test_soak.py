"""64 callers at once, with cancels, deadlines and disconnects at random: nothing grows, sticks or answers wrongly."""

import asyncio
import gc
import os
import random
import threading
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest
from sojourn.inference.pipeline import Pipeline
from sojourn.v1 import inference_pb2 as pb

from tests.inference.server.serving import Client, Served, request, serving

CALLERS = 64
ROUNDS = 3
SEED = int(os.environ.get("SOAK_SEED", time.time_ns() % 10**6))

OK, CANCELLED, DEADLINE, FULL, INVALID = (
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INVALID_ARGUMENT,
)


class Caller:
    """Makes one call after another, each in a way drawn at random, and notes code and bits."""

    def __init__(self, served: Served, draw: random.Random, solo: dict[int, list[str]]) -> None:
        self._served, self._draw, self._solo = served, draw, solo
        self.outcomes: list[tuple[str, grpc.StatusCode]] = []

    async def call(self) -> None:
        way = self._draw.choice(("patient", "patient", "cancel", "deadline", "disconnect", "invalid"))
        code = await getattr(self, f"_{way}")()
        self.outcomes.append((way, code))

    async def _patient(self) -> grpc.StatusCode:
        seed = self._draw.choice(list(self._solo))
        try:
            result = await self._served.client.generate(request(seed=seed))
        except grpc.aio.AioRpcError as error:
            return error.code()
        assert result.sha256 == self._solo[seed], f"bits of seed {seed} changed"
        return OK

    async def _cancel(self) -> grpc.StatusCode:
        call = self._served.client.call(request(seed=1, steps=24))
        asyncio.get_running_loop().call_later(self._draw.uniform(0, 1.5), call.cancel)
        return await self._finish(call)

    async def _deadline(self) -> grpc.StatusCode:
        timeout = self._draw.uniform(0.001, 2)
        return await self._finish(self._served.client.call(request(seed=2, steps=24), timeout=timeout))

    async def _disconnect(self) -> grpc.StatusCode:
        async with grpc.aio.insecure_channel(self._served.target) as channel:
            call = Client(channel).call(request(seed=3, steps=24))
            reading = asyncio.create_task(self._finish(call))
            await asyncio.sleep(self._draw.uniform(0, 1))
        return await reading

    async def _invalid(self) -> grpc.StatusCode:
        return await self._finish(self._served.client.call(request(steps=self._draw.choice([0, -1, 10**9]))))

    @staticmethod
    async def _finish(call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]") -> grpc.StatusCode:
        try:
            async for _ in call:
                pass
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass
        return await call.code()


ALLOWED = {
    "patient": {OK, FULL},
    "cancel": {OK, CANCELLED, FULL},
    "deadline": {OK, DEADLINE, FULL},
    "disconnect": {OK, CANCELLED, FULL},
    "invalid": {INVALID, FULL},
}


def footprint() -> tuple[int, int, int]:
    """Threads, open files, tasks."""
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir())), len(asyncio.all_tasks())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def come_to_rest(settled: tuple[int, int, int]) -> None:
    """Closed connections take a moment to go; what is there a while later has come to stay."""
    limit = time.monotonic() + 5
    while any(now > then for now, then in zip(footprint(), settled, strict=True)):
        assert time.monotonic() < limit, f"threads, files, tasks: {settled} became {footprint()}"
        await asyncio.sleep(0.1)


async def flood(served: Served, draw: random.Random, solo: dict[int, list[str]]) -> list[tuple[str, grpc.StatusCode]]:
    callers = [Caller(served, random.Random(draw.random()), solo) for _ in range(CALLERS)]
    await asyncio.gather(*(caller.call() for caller in callers))
    await served.until_idle()
    return [outcome for caller in callers for outcome in caller.outcomes]


@pytest.mark.timeout(290)
async def test_soak(pipeline: Pipeline) -> None:
    print(f"SOAK_SEED={SEED}")
    draw = random.Random(SEED)
    async with serving(pipeline, max_waiting=40) as served:
        solo = {seed: (await served.client.generate(request(seed=seed))).sha256 for seed in range(10, 14)}
        outcomes = await flood(served, draw, solo)
        gc.collect()
        await asyncio.sleep(1)
        settled, resident = footprint(), resident_bytes()
        for _ in range(ROUNDS - 1):
            outcomes += await flood(served, draw, solo)
            await come_to_rest(settled)
        assert resident_bytes() - resident < 64 * 2**20
        wrong = [(way, code) for way, code in outcomes if code not in ALLOWED[way]]
        assert not wrong
        assert {OK, CANCELLED, DEADLINE, INVALID} <= {code for _, code in outcomes}
        assert served.sample("requests_running") == served.sample("requests_waiting") == 0
        for seed, sha256 in solo.items():
            assert (await served.client.generate(request(seed=seed))).sha256 == sha256
