"""GetInfo tells of the plan cache and the memory plan what the metrics tell, and nothing of what is not there."""

from sojourn.inference.adaln.counters import Description, Result, Snapshot
from sojourn.inference.server.figures import add_figures
from sojourn.inference.telemetry import Telemetry
from sojourn.v1 import inference_pb2 as pb

NOW = Snapshot(
    slots_published=1, slots_reserved=2, slots_free=3, pages_used=4, pages_free=5, device_bytes=600, host_bytes=70,
    host_kind="pageable", weight_bytes=8000, store_bytes=9,
)  # fmt: skip


def described(off_reason: str = "") -> Description:
    return Description(mode="on", precision="exact", host_kind="pageable", off_reason=off_reason)


def told(telemetry: Telemetry) -> pb.GetInfoResponse:
    response = pb.GetInfoResponse()
    add_figures(response, telemetry)
    return response


def test_before_anything_is_set_up_nothing_is_said() -> None:
    response = told(Telemetry())
    assert not response.HasField("plan_cache")
    assert not response.HasField("memory_plan")


def test_a_cache_that_is_off_has_no_figures() -> None:
    telemetry = Telemetry()
    telemetry.plan_cache.opened(described("setting"), lambda: NOW)
    assert not told(telemetry).HasField("plan_cache")


def test_the_plan_cache_is_told_as_counted() -> None:
    telemetry = Telemetry()
    telemetry.plan_cache.opened(described(), lambda: NOW)
    for result in (Result.HIT, Result.HIT, Result.BUILT):
        telemetry.plan_cache.request(result)
    cache = told(telemetry).plan_cache
    assert (cache.requests["hit"], cache.requests["built"]) == (2, 1)
    assert set(cache.requests) == set(Result)
    assert (cache.unloaded_weight_bytes, cache.device_bytes, cache.host_bytes) == (8000, 600, 70)


def test_the_memory_plan_is_told_by_space_and_component() -> None:
    telemetry = Telemetry()
    telemetry.offload.peak(space="host", expected_bytes=5, budget_bytes=7)
    telemetry.offload.planned(component="vae", bytes_by_tier={"host_mapped": 3})
    telemetry.offload.planned(component="transformer", bytes_by_tier={"vram": 2, "host_pinned": 1})
    plan = told(telemetry).memory_plan
    assert [(space.space, space.peak_bytes, space.budget_bytes) for space in plan.spaces] == [("host", 5, 7)]
    assert [part.name for part in plan.components] == ["transformer", "vae"]
    assert dict(plan.components[0].tier_bytes) == {"vram": 2, "host_pinned": 1}
