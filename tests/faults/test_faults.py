"""Faults made for real: each is seen by its alert, is gone after the cure, and no other alert fires meanwhile.

All are played at once, each on a pod of its own, and judged one by one.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import pytest
from prometheus_client import start_http_server
from sojourn.inference.tiny import tiny_random
from sojourn.operator.telemetry import Telemetry
from sojourn.v1 import inference_pb2 as pb
from sojourn.v1 import residency_pb2

from tests.faults.prometheus import Prometheus, free_port
from tests.faults.stage import NAMESPACE, Load, Pod
from tests.inference.offload.capped import Cap, capped
from tests.kubernetes import ROOT
from tools import prometheus

MIB = 1 << 20
OTHER = 65532
DIGITS = ROOT / "models/h3-digits"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


class Stage:
    """What the scenarios share."""

    def __init__(self, folder: Path, seen: Prometheus, pods: dict[str, Pod], caps: dict[str, Cap]) -> None:
        self.folder, self.prometheus, self.pods, self.caps = folder, seen, pods, caps

    def model(self, name: str, *, source: Path | None = None) -> Path:
        """A copy of a model, the tiny one by default, so that no pod's pages are shared with another's."""
        target = self.folder / f"model-{name}"
        shutil.copytree(source or self.folder / "model", target)
        return target

    @contextlib.asynccontextmanager
    async def healthy(self, name: str, start: Callable[[Pod], object]) -> AsyncIterator[Pod]:
        """A pod that serves, is seen, and for which nothing fires."""
        pod = self.pods[name]
        start(pod)
        await pod.until_serving()
        scanned = f'sojourn_scan_timestamp_seconds{{pod="{name}"}}'
        await self.prometheus.until(lambda: self.prometheus.query(scanned), seconds=60, what=f"{name} is seen")
        await self.prometheus.until_quiet(name)
        # On a busy machine a start takes more than the fifteen seconds that are minutes here.
        self.prometheus.fired[name].clear()
        yield pod


Scenario = Callable[[Stage], Awaitable[None]]
SCENARIOS: dict[str, tuple[str, Scenario]] = {}


def scenario(alert: str) -> Callable[[Scenario], Scenario]:
    """Registers one under its name, which is the pod's too."""

    def register(play: Scenario) -> Scenario:
        SCENARIOS[play.__name__] = alert, play
        return play

    return register


def served(stage: Stage, name: str, *options: str) -> Callable[[Pod], None]:
    """Starts `sojourn serve` and its residencyd."""

    def start(pod: Pod) -> None:
        pod.serve(stage.model(name), *options)
        pod.watch()

    return start


@scenario("SojournPlanCacheRebuilding")
async def plan_cache_too_small(stage: Stage) -> None:
    name = "plan_cache_too_small"
    options = ("--adaln-cache", "on", "--adaln-plans", "3", "--adaln-plan-width", "2", "--adaln-host-bytes", "0")
    async with stage.healthy(name, served(stage, name, *options)) as pod:
        # Schedules of two and three plans in a slab for three.
        mix = ({"steps": steps} for steps in itertools.cycle((3, 4)))
        async with Load(pod, mix, pause_seconds=0.5):
            await stage.prometheus.until_firing(name, "SojournPlanCacheRebuilding")
        async with Load(pod, itertools.repeat({"steps": 3}), pause_seconds=0.3):
            await stage.prometheus.until_quiet(name)


@scenario("SojournHostTierSkipping")
async def host_tier_starved(stage: Stage) -> None:
    name = "host_tier_starved"
    options = ("--adaln-cache", "on", "--adaln-plans", "3", "--adaln-plan-width", "2", "--adaln-host-bytes", "50000000")
    async with stage.healthy(name, served(stage, name, *options)) as pod:
        # The tier takes no memory that the host needs: under a cap with less than 2 GiB left it stores nothing new.
        stage.caps[name].limit(1536 * MIB)
        # Each schedule is new, and comes three times: a third of the requests build.
        shifts = ({"flow_shift": 1 + number / 64} for number in itertools.count() for _ in range(3))
        async with Load(pod, shifts, pause_seconds=0.2):
            await stage.prometheus.until_firing(name, "SojournHostTierSkipping")
            stage.caps[name].limit(6144 * MIB)
            await stage.prometheus.until_quiet(name)


@scenario("SojournPageoutIneffective")
async def page_out_of_anothers_file(stage: Stage) -> None:
    name = "page_out_of_anothers_file"
    model = stage.model(name, source=DIGITS)

    def start(pod: Pod) -> None:
        pod.serve_breakable(model, become=OTHER, large=True, offload=["text_encoder=component"])
        pod.watch()

    async with stage.healthy(name, start) as pod, Load(pod, itertools.repeat({}), pause_seconds=2):
        _squeeze(stage, name)
        await stage.prometheus.until_firing(name, "SojournPageoutIneffective")
        stuck = f'max_over_time(sojourn_pageout_stuck_bytes{{pod="{name}", reason="not_owner"}}[1m]) > 0'
        assert stage.prometheus.query(stuck)
        for path in model.rglob("*.safetensors"):
            os.chown(path, OTHER, OTHER)
        await stage.prometheus.until_quiet(name)


def _squeeze(stage: Stage, name: str) -> None:
    """Lowers a pod's cap to what it uses now, but for file cache, and half of what a stage of digits may need.

    That is 286 MiB by the estimate for requests of 1344 × 768; those that are made here take 130.
    """
    of = f'{{pod="{name}"}}'
    usage = stage.prometheus.value(f"sojourn_cgroup_usage_bytes{of} - sojourn_cgroup_reclaimable_bytes{of}")
    assert usage > 0
    stage.caps[name].limit(int(usage) + 160 * MIB)


@scenario("SojournHeadroomShort")
async def cap_below_the_need(stage: Stage) -> None:
    name = "cap_below_the_need"
    # Long requests: while they denoise, decoding is next.
    long = itertools.repeat({"steps": 900, "outputs": [pb.OUTPUT_FORMAT_MP4]})

    def start(pod: Pod) -> None:
        pod.serve_breakable(stage.model(name, source=DIGITS), large=True)
        pod.watch()

    async with stage.healthy(name, start) as pod, Load(pod, long, pause_seconds=0.1):
        need = f'sojourn_headroom_need_bytes{{pod="{name}"}}'
        await stage.prometheus.until(lambda: stage.prometheus.value(need) > 0, seconds=30, what="a need")
        _squeeze(stage, name)
        await stage.prometheus.until_firing(name, "SojournHeadroomShort")
        stage.caps[name].limit(6144 * MIB)
        await stage.prometheus.until_quiet(name)


@scenario("SojournResidencyBlind")
async def sidecar_of_another_user(stage: Stage) -> None:
    name = "sidecar_of_another_user"
    async with stage.healthy(name, served(stage, name)) as pod:
        good = pod.processes[-1]
        good.terminate()
        good.join(20)
        blind = pod.watch(user=OTHER)
        await stage.prometheus.until_firing(name, "SojournResidencyBlind")
        found = stage.prometheus.query(f'sojourn_residency_blind{{pod="{name}"}} == 1')
        assert [series["metric"]["reason"] for series in found] == ["other_uid"]
        blind.terminate()
        blind.join(20)
        pod.watch()
        await stage.prometheus.until_quiet(name)


@scenario("SojournResidencyDisagreement")
async def component_map_that_lies(stage: Stage) -> None:
    name = "component_map_that_lies"
    async with stage.healthy(name, served(stage, name)) as pod:
        _lie(pod.map)
        await stage.prometheus.until_firing(name, "SojournResidencyDisagreement")
        # A request makes the process publish what is true.
        assert await pod.ask() is grpc.StatusCode.OK
        await stage.prometheus.until_quiet(name)


def _lie(path: Path) -> None:
    """Says of the transformer that it is locked in memory; the file stays whole."""
    file, claim = residency_pb2.ComponentMapFile(), residency_pb2.ComponentMap()
    file.ParseFromString(path.read_bytes())
    claim.ParseFromString(file.component_map)
    for component in claim.components:
        if component.name == "transformer":
            for storage in component.storages:
                storage.tier = residency_pb2.TIER_HOST_PINNED
    content = claim.SerializeToString()
    lying = residency_pb2.ComponentMapFile(component_map=content, crc32=zlib.crc32(content))
    draft = path.with_name("lie")
    draft.write_bytes(lying.SerializeToString())
    draft.rename(path)


@scenario("SojournQueueFull")
async def queue_full(stage: Stage) -> None:
    name = "queue_full"
    async with stage.healthy(name, served(stage, name, "--max-waiting", "1")) as pod:
        long = itertools.repeat({"steps": 900})
        # One runs, one waits, one is refused.
        async with contextlib.AsyncExitStack() as stack:
            callers = [await stack.enter_async_context(Load(pod, long, pause_seconds=1)) for _ in range(3)]
            await stage.prometheus.until_firing(name, "SojournQueueFull")
            assert grpc.StatusCode.RESOURCE_EXHAUSTED in {code for caller in callers for code in caller.codes}
        await stage.prometheus.until_quiet(name)


@scenario("SojournNonFiniteOutputs")
async def nan_in_a_step(stage: Stage) -> None:
    name = "nan_in_a_step"
    trigger = stage.folder / "nan"

    def start(pod: Pod) -> None:
        pod.serve_breakable(stage.model(name), nan=str(trigger))
        pod.watch()

    async with stage.healthy(name, start) as pod, Load(pod, itertools.repeat({}), pause_seconds=0.1) as asked:
        trigger.touch()
        while grpc.StatusCode.INTERNAL not in asked.codes:
            await asyncio.sleep(0.02)
        trigger.unlink()
        await stage.prometheus.until_firing(name, "SojournNonFiniteOutputs")
        await stage.prometheus.until_quiet(name)


@scenario("SojournModelNotServing")
async def checkpoint_missing(stage: Stage) -> None:
    name = "checkpoint_missing"
    model, pod = stage.model(name), stage.pods["checkpoint_missing"]
    (model / WEIGHTS).rename(stage.folder / "weights")
    failed = pod.serve(model, "--failed-grace-seconds", "300")
    pod.watch()
    await stage.prometheus.until_firing(name, "SojournModelNotServing", seconds=120)
    failed.terminate()
    failed.join(30)
    # What the next restart of the container finds.
    (stage.folder / "weights").rename(model / WEIGHTS)
    pod.serve(model)
    await pod.until_serving()
    await stage.prometheus.until_quiet(name)


CAPPED = {"host_tier_starved", "page_out_of_anothers_file", "cap_below_the_need"}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    program = prometheus.program("prometheus")
    if program is None:
        pytest.skip(prometheus.MISSING)
    if os.geteuid() != 0:
        pytest.skip("faults of users and control groups need root")
    with contextlib.ExitStack() as stack:
        # Not in pytest's own folder, which is for its owner alone: some processes here are another user's.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sojourn-faults-")))
        folder.chmod(0o755)
        tiny_random("minimax-h3", folder / "model")
        caps = {name: stack.enter_context(capped(6144 * MIB)) for name in CAPPED}
        pods = {name: Pod(name, folder / name, caps[name].folder if name in caps else None) for name in SCENARIOS}
        operator, _ = stack.enter_context(_operator_exporter())
        targets = [target for pod in pods.values() for target in pod.targets()]
        seen = Prometheus(program, folder, [*targets, {"targets": [f"127.0.0.1:{operator}"]}])
        stack.callback(seen.close)
        for pod in pods.values():
            stack.callback(pod.end)
        yield Stage(folder, seen, pods, caps)


@contextlib.contextmanager
def _operator_exporter() -> Iterator[tuple[int, Telemetry]]:
    """The operator's own metrics, as they are while it watches; without them SojournOperatorDown would fire."""
    telemetry = Telemetry(version="test")
    telemetry.last_event.set_function(time.time)
    server, thread = start_http_server(port := free_port(), "127.0.0.1", registry=telemetry.registry)
    yield port, telemetry
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def outcomes(stage: Stage) -> dict[str, BaseException | None]:
    """How each scenario went, all of them played at once."""

    async def play() -> list[BaseException | None]:
        return await asyncio.gather(*(play(stage) for _, play in SCENARIOS.values()), return_exceptions=True)

    return dict(zip(SCENARIOS, asyncio.run(play()), strict=True))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SCENARIOS)
def test_fault_is_seen_and_gone_after_the_cure(
    stage: Stage, outcomes: dict[str, BaseException | None], name: str
) -> None:
    alert, _ = SCENARIOS[name]
    if (failure := outcomes[name]) is not None:
        raise AssertionError(f"{failure}\n{stage.pods[name].said()}") from failure
    assert stage.prometheus.fired[name] == {alert}
    texts = stage.prometheus.texts[name, alert]
    assert NAMESPACE in texts["description"]
    assert name in texts["description"]
    assert "<no value>" not in str(texts)


def test_nothing_fired_that_belongs_to_no_pod(stage: Stage, outcomes: dict[str, BaseException | None]) -> None:
    assert set(stage.prometheus.fired) <= set(SCENARIOS) | {""}
    assert stage.prometheus.fired[""] == set()
