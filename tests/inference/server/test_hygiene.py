"""Requests on every path say nothing above DEBUG, and each counter moves by exactly what happened.

Every server here has its plan cache and its offload on; memory pressure is the one thing that is played.
"""

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sojourn.inference.adaln.settings import Mode as PlanMode
from sojourn.inference.adaln.settings import PlanCacheSettings
from sojourn.inference.logs import CountingHandler
from sojourn.inference.offload.options import OffloadOptions
from sojourn.inference.offload.settings import parse_settings
from sojourn.inference.pipeline import DeviceChoice, Pipeline, load_pipeline
from sojourn.inference.quality.settings import Fusions, QualitySettings
from sojourn.inference.telemetry import LEVELS, Telemetry
from sojourn.inference.tiny import tiny_random
from sojourn.v1 import inference_pb2 as pb

from tests.inference.server.serving import Served, request, serving
from tests.inference.server.test_metrics import moved, series

# Two plans, three, and two again; the slab holds three. All begin with the same one, at the first timestep.
SHORT, LONG, OTHER = {"steps": 3}, {"steps": 4}, {"steps": 3, "flow_shift": 5.0}
TWO, THREE = 2, 3
PAGED = ("text_encoder", "transformer")
# Lines at DEBUG are one for each event; those of the request itself are counted in test_metrics.
QUIET = tuple(level for level in LEVELS if level != "debug")


@pytest.fixture(scope="module")
def telemetry() -> Telemetry:
    return Telemetry(model_name="tiny", max_waiting=4)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, telemetry: Telemetry) -> Pipeline:
    """With a slab for three plans, a host tier, and components that leave memory after their stage.

    Of a folder of its own: pages that another pipeline maps too stay.
    """
    folder = tiny_random("minimax-h3", tmp_path_factory.mktemp("hygiene") / "tiny")
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return load_pipeline(
        folder,
        device=DeviceChoice.CPU,
        plan_settings=PlanCacheSettings(mode=PlanMode.ON, plans=THREE, width=2, host_bytes=1 << 20),
        plan_observer=telemetry.plan_cache,
        offload=OffloadOptions(settings=parse_settings([f"{name}=component" for name in PAGED])),
        offload_observer=telemetry.offload,
        quality_settings=QualitySettings(fusions=Fusions.ON),
        quality_observer=telemetry.quality,
    )


@pytest.fixture
def counted(telemetry: Telemetry) -> Iterator[None]:
    """Lines are counted, as in a real process."""
    handler, logger = CountingHandler(telemetry.log_line), logging.getLogger("sojourn")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
async def served(pipeline: Pipeline, telemetry: Telemetry, counted: None) -> AsyncIterator[Served]:
    async with serving(pipeline, telemetry=telemetry, max_waiting=4) as running:
        yield running


async def events(served: Served, **asked: object) -> dict[str, float]:
    """What one request has moved in the plan cache, in offload and in the log; bytes of one component apart."""
    before = series(served.server.telemetry.registry)
    await served.client.generate(request(**asked))
    await served.until_idle()
    found = moved(served, before)
    assert found["requests_total{OK,t2va}"] == 1
    return {
        name: value
        for name, value in found.items()
        if name.startswith(("plan_cache", "pageout", "fusion", "log_lines", "offload_fallbacks"))
    }


def paths(found: dict[str, float]) -> dict[str, float]:
    """Without sizes, which are not the point here, and without the lines at DEBUG."""
    return {name: value for name, value in found.items() if "_bytes_" not in name and name != "log_lines_total{debug}"}


async def test_every_path_moves_its_counters_and_says_nothing(
    served: Served, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = {"plan_cache_requests_total{built}": 1, "plan_cache_build_duration_seconds_count{}": 1}
    assert paths(await events(served, **SHORT)) == {**built, "plan_cache_plans_total{built}": TWO}, "a build"
    assert paths(await events(served, **SHORT)) == {
        "plan_cache_requests_total{hit}": 1,
        "plan_cache_plans_total{gpu}": TWO,
    }, "a hit"
    assert paths(await events(served, **LONG)) == {
        **built,
        "plan_cache_plans_total{gpu}": 1,
        "plan_cache_plans_total{built}": TWO,
        "plan_cache_evicted_plans_total{gpu}": 1,
    }, "a build that evicts"
    assert paths(await events(served, **SHORT)) == {
        "plan_cache_requests_total{host}": 1,
        "plan_cache_plans_total{gpu}": 1,
        "plan_cache_plans_total{host}": 1,
        "plan_cache_evicted_plans_total{gpu}": 1,
    }, "a hit of the host tier"
    for transformer in pipeline.plans.transformers.values():
        monkeypatch.setattr(transformer.cache.host, "available_bytes", lambda: 0)
        monkeypatch.setattr(transformer.cache.host, "_touched", set())
    assert paths(await events(served, **OTHER)) == {
        **built,
        "plan_cache_plans_total{gpu}": 1,
        "plan_cache_plans_total{built}": 1,
        "plan_cache_evicted_plans_total{gpu}": 1,
        "plan_cache_host_skipped_groups_total{pressure}": 1,
    }, "a build that the host tier skips"


@pytest.fixture
def one_processor() -> Iterator[None]:
    """All threads on one processor.

    The kernel lists pages that were just read for each processor, some at a time, and page-out passes over those that
    another one has still to list: of weights as small as these, all.
    """
    before = os.sched_getaffinity(0)
    _run_on({min(before)})
    yield
    _run_on(before)


def _run_on(processors: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), processors)


async def test_page_out_moves_its_counters_and_says_nothing(
    one_processor: None, served: Served, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    await events(served, **SHORT)
    monkeypatch.setattr(pipeline.life, "_room", lambda situation: 0)
    for _ in range(3):
        found = await events(served, **SHORT)
        for component in PAGED:
            requested = found[f"pageout_requested_bytes_total{{{component}}}"]
            assert requested > 0
            assert found[f"pageout_verified_bytes_total{{{component}}}"] == requested
        assert not [name for name in found if name in {f"log_lines_total{{{level}}}" for level in QUIET}]


async def test_mounts_move_their_counters_and_say_nothing(served: Served) -> None:
    await events(served, **SHORT)
    for _ in range(2):
        mounted = changes(await events(served, **SHORT, quality=pb.QUALITY_TIER_EXTRA_HIGH))
        unmounted = changes(await events(served, **SHORT))
        assert set(mounted) == {"mount"}
        assert set(unmounted) == {"unmount"}
        assert mounted["mount"] == unmounted["unmount"]


def changes(found: dict[str, float]) -> dict[str, dict[str, float]]:
    """Parts mounted and unmounted, by action; nothing above DEBUG was said."""
    assert not [name for name in found if name in {f"log_lines_total{{{level}}}" for level in QUIET}]
    by_action: dict[str, dict[str, float]] = {}
    for name, value in found.items():
        if name.startswith("fusion_changes_total"):
            action, part = name.removesuffix("}").split("{")[1].split(",")
            by_action.setdefault(action, {})[part] = value
    return by_action


async def test_requests_that_fail_say_nothing_either(served: Served) -> None:
    before = series(served.server.telemetry.registry)
    await served.client.error(request(steps=900))
    await served.client.error(request(steps=0))
    found = moved(served, before)
    assert found["plan_cache_refused_requests_total{too_many_plans}"] == 1
    assert not [name for name in found if name in {f"log_lines_total{{{level}}}" for level in QUIET}]


async def test_each_event_has_a_line_at_debug(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="sojourn"):
        await served.client.generate(request(**SHORT))
        await served.until_idle()
    said = [record.message for record in caplog.records if record.name.startswith("sojourn.inference")]
    assert said.count("plan cache transaction") == 1
    assert said.count("step ended") == TWO
    assert said.count("stage ended") == 4
    assert {"plan cache served", "stage read", "request ended"} <= set(said)
