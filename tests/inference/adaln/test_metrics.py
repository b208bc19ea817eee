"""Each metric moves by exactly what happened, and nothing on the request path is logged above DEBUG."""

import logging
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from sojourn.inference.adaln.counters import Counters, Description, Result, Snapshot
from sojourn.inference.adaln.refusals import PlansRefused
from sojourn.inference.adaln.store import PlanStore
from sojourn.inference.telemetry import Telemetry

from tests.inference.adaln.toys import Injected, Rig, make_rig

Samples = dict[str, float]


def observed(telemetry: Telemetry, **options: object) -> Rig:
    """A cache whose events move the metrics."""
    rig = make_rig(**options)  # type: ignore[arg-type]
    metrics = telemetry.plan_cache
    rig.cache.observer = metrics
    rig.cache.projector._read = metrics.read
    rig.cache.host.evicted = lambda plans: metrics.evicted("host", plans)  # type: ignore[arg-type]
    description = Description(mode="on", precision="match", host_kind="pageable", off_reason="")
    metrics.opened(description, lambda: Snapshot.sum([rig.cache.snapshot()]))
    return rig


def samples(registry: CollectorRegistry) -> Samples:
    """Series of the plan cache that are not 0, without build seconds, which are a matter of speed."""
    return {
        sample.name.removeprefix("sojourn_") + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in registry.collect()
        if family.name.startswith(("sojourn_plan_cache", "sojourn_plan_store"))
        for sample in family.samples
        if sample.value and "le" not in sample.labels and "seconds_sum" not in sample.name
    }


def moved(before: Samples, after: Samples) -> Samples:
    """What counters have gained."""
    return {
        name: value - before.get(name, 0)
        for name, value in after.items()
        if ("_total" in name or "_count" in name) and value != before.get(name, 0)
    }


def test_known_label_values_are_there_at_zero_from_the_start() -> None:
    registry = Telemetry().registry
    for name, labels in {
        "sojourn_plan_cache_requests_total": {"result": "built"},
        "sojourn_plan_cache_plans_total": {"source": "store"},
        "sojourn_plan_cache_evicted_plans_total": {"tier": "host"},
        "sojourn_plan_cache_host_skipped_groups_total": {"reason": "pressure"},
        "sojourn_plan_cache_refused_requests_total": {"reason": "too_wide"},
        "sojourn_plan_store_rejected_files_total": {"reason": "corrupt"},
        "sojourn_plan_cache_read_bytes_total": {},
        "sojourn_plan_cache_build_duration_seconds_count": {},
    }.items():
        assert registry.get_sample_value(name, labels) == 0, name
    assert registry.get_sample_value("sojourn_plan_cache_slots", {"state": "free"}) is None


def test_each_path_moves_its_counters_by_what_happened(tmp_path: Path) -> None:
    telemetry = Telemetry()

    def store(table: object, counters: Counters) -> PlanStore:
        return PlanStore(tmp_path, 1 << 30, "f" * 64, table, telemetry.plan_cache.store_rejected)  # type: ignore[arg-type]

    rig = observed(telemetry, plans=2, width=2, pages=4, store=store)
    weight_bytes = rig.cache.slab.table.weight_bytes
    seen = samples(telemetry.registry)

    def step(what: str, expected: Samples) -> None:
        nonlocal seen
        now = samples(telemetry.registry)
        assert moved(seen, now) == expected, what
        seen = now

    rig.build([0.1], [0.2])
    built = {
        "plan_cache_requests_total built": 1,
        "plan_cache_plans_total built": 2,
        "plan_cache_read_bytes_total": weight_bytes,
        "plan_cache_build_duration_seconds_count": 1,
    }
    step("a build", built)
    rig.build([0.1], [0.2])
    step("a hit", {"plan_cache_requests_total hit": 1, "plan_cache_plans_total gpu": 2})
    rig.build([0.3], [0.4])
    step("a build over others", {**built, "plan_cache_evicted_plans_total gpu": 2})
    rig.build([0.1], [0.2])
    swapped = {"plan_cache_requests_total host": 1, "plan_cache_plans_total host": 2}
    step("a swap-in", {**swapped, "plan_cache_evicted_plans_total gpu": 2})
    rig.build([0.5], [0.6])
    evicted = {"plan_cache_evicted_plans_total gpu": 2, "plan_cache_evicted_plans_total host": 2}
    step("an eviction from both tiers", {**built, **evicted})
    rig.build([0.3], [0.4])
    loaded = {"plan_cache_requests_total store": 1, "plan_cache_plans_total store": 2}
    step("a load from the store", {**loaded, **evicted})
    with pytest.raises(PlansRefused):
        rig.build([0.1, 0.2, 0.3])
    step("a refusal", {"plan_cache_requests_total refused": 1, "plan_cache_refused_requests_total too_wide": 1})
    rig.source.fail_at = "norm_out.modulation.weight"
    with pytest.raises(Injected):
        rig.build([0.7])
    unread_bytes = rig.source.tensors["norm_out.modulation.weight"].nbytes
    step(
        "a failure",
        {
            "plan_cache_requests_total failed": 1,
            "plan_cache_read_bytes_total": weight_bytes - unread_bytes,
            "plan_cache_evicted_plans_total gpu": 1,
        },
    )


def test_gauges_are_those_of_the_cache() -> None:
    telemetry = Telemetry()
    rig = observed(telemetry, plans=4, pages=6)
    rig.build([0.1, 0.2], [0.3])
    found = samples(telemetry.registry)
    assert found["plan_cache_slots published"] == found["plan_cache_slots free"] == 2
    assert found["plan_cache_host_pages used"] == found["plan_cache_host_pages free"] == 3
    assert found["plan_cache_allocated_bytes gpu"] == rig.cache.slab.nbytes
    assert found["plan_cache_allocated_bytes host"] == rig.cache.host.nbytes
    assert found["plan_cache_unloaded_weight_bytes"] == rig.cache.slab.table.weight_bytes
    assert found["plan_cache_info on match pageable "] == 1


def test_several_caches_add_up_and_share_one_store() -> None:
    one = make_rig(pages=2).cache.snapshot()
    both = Snapshot.sum([one, one])
    assert both.slots_free == 2 * one.slots_free
    assert both.host_kind == "pageable"
    assert Snapshot.sum([]).host_kind == "none"


def test_the_request_path_logs_nothing_above_debug(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    rig = make_rig(
        plans=2,
        width=2,
        pages=3,
        store=lambda table, counters: PlanStore(tmp_path, 1 << 30, "f" * 64, table, counters.store_rejected),
    )
    caplog.clear()
    for _ in range(3):
        rig.build([0.1])
        rig.build([0.1])
        rig.build([0.6], [0.7])
        rig.build([0.1])
        rig.build([0.1, 0.8], [0.2, 0.9])
        rig.build([0.3, 0.4], [0.5])
        rig.build([0.9])
        with pytest.raises(PlansRefused):
            rig.build([0.1, 0.2, 0.3])
        rig.source.fail_at = "norm_out.modulation.weight"
        with pytest.raises(Injected):
            rig.build([0.99])
        rig.source.fail_at = None
        for path in list(tmp_path.glob("*.safetensors"))[:2]:
            path.write_bytes(b"broken")
    rig.cache.invalidate(store=rig.cache.store)
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    assert set(rig.counters.requests) == set(Result)
    assert rig.counters.host_skips
    assert rig.counters.store_rejects
