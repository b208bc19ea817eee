"""What pods answer, and what of it reaches the status."""

import logging
from dataclasses import replace
from typing import Any

import pytest
from sojourn.operator import logs
from sojourn.operator.conditions import PLAN_FITS, READY, find
from sojourn.operator.desired import Policies
from sojourn.operator.nodes import Node
from sojourn.operator.observe import View, rounded, summarise
from sojourn.operator.plan import Space, host_plan, human
from sojourn.operator.pods import Health, PodView
from sojourn.operator.reporting import Findings, _page_out, changes, service_status
from sojourn.operator.resources import AdaLNCacheSpec, DiffusionServiceSpec, LayerwiseOffloadSpec
from sojourn.operator.resources.status import DiffusionServiceStatus, FailureStatus
from sojourn.operator.telemetry import Telemetry
from sojourn.operator.workload import Workload
from sojourn.v1 import inference_pb2, residency_pb2
from sojourn.v1.residency_pb2 import Tier

MIB = 2**20


def info(**changes: Any) -> inference_pb2.GetInfoResponse:
    cache = inference_pb2.PlanCacheInfo(
        requests={"hit": 6, "host": 1, "store": 0, "built": 1, "refused": 5},
        unloaded_weight_bytes=4 * MIB,
        device_bytes=MIB,
        host_bytes=MIB,
    )
    spaces = [inference_pb2.PlannedSpace(space="host", peak_bytes=3 * MIB, budget_bytes=8 * MIB)]
    plan = inference_pb2.MemoryPlanInfo(spaces=spaces)
    fields = {"model": "h3-digits", "family": "minimax-h3", "plan_cache": cache, "memory_plan": plan}
    return inference_pb2.GetInfoResponse(**(fields | changes))


def tier(which: int, mapped: int, resident: int) -> residency_pb2.TierBytes:
    return residency_pb2.TierBytes(tier=which, mapped_bytes=mapped, resident_bytes=resident)  # type: ignore[arg-type]


def residency(*, blind: str = "", stuck: int = 0) -> residency_pb2.Residency:
    transformer = residency_pb2.ComponentResidency(
        name="transformer", tiers=[tier(Tier.TIER_HOST_MAPPED, 8 * MIB, 2 * MIB), tier(Tier.TIER_VRAM, MIB, 0)]
    )
    vae = residency_pb2.ComponentResidency(
        name="vae",
        tiers=[tier(Tier.TIER_HOST_PAGEABLE, 9 * MIB, MIB)],
        stuck=[residency_pb2.Stuck(reason="not_owner", size_bytes=stuck)] if stuck else [],
    )
    components = [] if blind else [transformer, vae]
    return residency_pb2.Residency(
        processes=[residency_pb2.ProcessResidency(blind_reason=blind, components=components)]
    )


def pod(name: str = "a", health: Health = Health.SERVING, **changes: Any) -> PodView:
    return PodView(name, health, **({"info": info(), "residency": residency()} | changes))


def test_figures_are_summed_over_pods() -> None:
    view = summarise([pod("a"), pod("b")])
    assert (view.serving, view.visible, view.model, view.family) == ("True", True, "h3-digits", "minimax-h3")
    assert view.adaln
    assert (view.adaln.hit_ratio, view.adaln.builds) == ("88", 2)
    assert view.adaln.saved == human(rounded(6 * MIB)), "weights less slab; the host tier is another memory"
    assert view.adaln.host_tier == human(rounded(2 * MIB))
    assert view.residency
    by_name = {row.component: row for row in view.residency.components}
    assert by_name["transformer"].mapped_bytes == rounded(16 * MIB)
    assert by_name["transformer"].mapped_resident_bytes == rounded(4 * MIB)
    assert by_name["vae"].pageable_bytes == rounded(2 * MIB)
    assert view.residency.vram == human(rounded(2 * MIB))


def test_a_sidecar_that_is_blind_or_silent_is_a_condition_and_never_zeros() -> None:
    view = summarise([pod(residency=residency(blind="other_uid"))])
    assert (view.visible, view.reason, view.residency) == (False, "Blind", None)
    assert "other_uid" in view.message
    silent = summarise([pod(residency=None)])
    assert (silent.visible, silent.reason, silent.residency) == (False, "Unreachable", None)


def test_rows_that_take_more_than_the_weights_are_told_as_what_they_cost() -> None:
    costly = inference_pb2.PlanCacheInfo(unloaded_weight_bytes=MIB, device_bytes=9 * MIB)
    view = summarise([pod(info=info(plan_cache=costly))])
    assert view.adaln
    assert view.adaln.saved == "-8.01Mi" == human(-rounded(8 * MIB))


def test_a_model_without_a_plan_cache_has_no_figures_of_one() -> None:
    bare = inference_pb2.GetInfoResponse(model="a")
    assert summarise([pod(info=bare)]).adaln is None
    unused = inference_pb2.PlanCacheInfo(requests={"hit": 0})
    view = summarise([pod(info=info(plan_cache=unused))])
    assert view.adaln
    assert view.adaln.hit_ratio == ""


@pytest.mark.parametrize(
    ("healths", "serving", "reason"),
    [
        ((Health.SERVING, Health.SERVING), "True", "Serving"),
        ((Health.SERVING, Health.SILENT), "Unknown", "HealthUnreachable"),
        ((Health.SILENT, Health.NOT_SERVING), "False", "NotServing"),
        ((Health.UNASKED,), "True", "Serving"),
        ((), "Unknown", "HealthUnreachable"),
    ],
)
def test_one_model_that_does_not_serve_is_enough(healths: tuple[Health, ...], serving: str, reason: str) -> None:
    view = summarise([pod(str(number), health) for number, health in enumerate(healths)])
    assert (view.serving, view.health) == (serving, reason)


def test_why_a_model_failed_to_load_is_said() -> None:
    view = summarise([pod(health=Health.NOT_SERVING, info=info(state_reason="WeightsTruncated: a.safetensors"))])
    assert "WeightsTruncated: a.safetensors" in view.health_message


def test_what_the_operator_may_not_ask_is_said_beside_what_it_sees() -> None:
    view = summarise([pod(health=Health.UNASKED, info=None)], obstacle="the operator cannot read Secret cert")
    assert view.visible
    assert "cannot read Secret cert" in view.message


SERVICE = {
    "metadata": {"name": "demo", "namespace": "studio", "generation": 3},
    "spec": {"model": {"builtIn": {}}},
}
SERVES = Workload("True", "Serving", "1 of 1 pods serve", wanted=1, existing=1, updated=1, serving=1)


def status(before: dict[str, Any] | None = None, view: View | None = None, **changes: Any) -> DiffusionServiceStatus:
    findings = Findings(plan=plan({}), in_place=True, workload=SERVES, view=view, **changes)
    known = DiffusionServiceStatus.model_validate(before or {})
    return DiffusionServiceStatus.model_validate(service_status(known, SERVICE, findings, now="2026-09-01T12:00:00Z"))


def test_ready_needs_the_word_of_the_model_itself() -> None:
    for health, wanted in ((Health.SERVING, "True"), (Health.NOT_SERVING, "False"), (Health.SILENT, "Unknown")):
        ready = find(status(view=summarise([pod(health=health)])).conditions, READY)
        assert ready
        assert ready.status == wanted


def test_the_plan_of_the_model_is_told_and_stays_until_it_is_asked_again() -> None:
    asked = status(view=summarise([pod()]))
    assert [(entry.name, entry.size, entry.budget) for entry in asked.memory_plan] == [
        ("sharedHostMemory", "1Gi", ""),
        ("hostPeak", human(rounded(3 * MIB)), human(rounded(8 * MIB))),
    ]
    dumped = asked.model_dump(by_alias=True, exclude_none=True)
    assert status(dumped) == asked, "a pass that does not ask writes nothing"
    edited = dumped | {"observedGeneration": 2}
    assert [entry.name for entry in status(edited).memory_plan] == ["sharedHostMemory"]


def test_a_model_beyond_its_budget_does_not_fit_and_that_stays_said() -> None:
    spaces = [inference_pb2.PlannedSpace(space="device", peak_bytes=9 * MIB, budget_bytes=8 * MIB)]
    over = status(view=summarise([pod(info=info(memory_plan=inference_pb2.MemoryPlanInfo(spaces=spaces)))]))
    fits = find(over.conditions, PLAN_FITS)
    assert fits
    assert (fits.status, fits.reason) == ("False", "ModelDoesNotFit")
    assert "needs 9Mi of device memory and may take 8Mi" in fits.message
    assert status(over.model_dump(by_alias=True, exclude_none=True)) == over
    assert find(
        status(over.model_dump(by_alias=True, exclude_none=True), summarise([pod()])).conditions, PLAN_FITS
    ) != (fits)


def test_workflows_are_those_that_every_pod_serves() -> None:
    both = info(workflows=[inference_pb2.WORKFLOW_T2VA, inference_pb2.WORKFLOW_FL2VA])
    one = info(workflows=[inference_pb2.WORKFLOW_T2VA])
    assert summarise([pod("a", info=both), pod("b", info=one)]).workflows == {"T2VA"}
    assert summarise([pod("a", info=None)]).workflows is None, "not asked is not missing"


def failing(at: str | None, pod_name: str = "p") -> Workload:
    failure = FailureStatus(reason="OOMKilled", exit_code=137, container="inference", pod=pod_name, finished_at=at)
    return replace(SERVES, ready="False", reason="OOMKilled", failure=failure)


def passes(*found: tuple[Workload, str]) -> dict[str, Any]:
    """The status after several passes, each with a workload at a time, as merge patches leave it."""
    stored: dict[str, Any] = {}
    for workload, now in found:
        findings = Findings(in_place=True, workload=workload)
        known = DiffusionServiceStatus.model_validate(stored)
        stored = merged(stored, changes(stored, service_status(known, SERVICE, findings, now=now)))
    return stored


def merged(target: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """RFC 7396, as the API server does it."""
    result = dict(target)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            inside = result.get(key)
            result[key] = (
                merged(inside if isinstance(inside, dict) else {}, value) if isinstance(value, dict) else value
            )
    return result


NOON, ONE, TWO, THREE = (f"2026-09-01T{hour}:00:00Z" for hour in (12, 13, 14, 15))


def test_a_failure_stays_with_the_time_at_which_it_was_over() -> None:
    failed = passes((failing(NOON), NOON))
    assert failed["lastFailure"] == {
        "reason": "OOMKilled", "message": "", "exitCode": 137, "container": "inference", "pod": "p", "finishedAt": NOON,
    }  # fmt: skip
    over = passes((failing(NOON), NOON), (SERVES, ONE))
    assert over["lastFailure"] == {**failed["lastFailure"], "recoveredAt": ONE}
    later = passes((failing(NOON), NOON), (SERVES, ONE), (replace(SERVES, failure=failing(NOON).failure), TWO))
    assert later == over, "pods keep their last state: it is no news, and nothing is written"


def test_a_new_failure_is_not_said_to_be_over() -> None:
    again = passes((failing(NOON), NOON), (SERVES, ONE), (failing(TWO, "q"), TWO))["lastFailure"]
    assert (again["pod"], again["finishedAt"], "recoveredAt" in again) == ("q", TWO, False)


def test_an_older_failure_of_another_pod_is_no_news() -> None:
    """The pod that failed last is gone; what others still tell is older."""
    found = passes((failing(ONE, "gone"), ONE), (failing(NOON, "old"), TWO), (SERVES, THREE))["lastFailure"]
    assert (found["pod"], found["finishedAt"], found["recoveredAt"]) == ("gone", ONE, THREE)


def test_what_is_gone_inside_a_part_of_the_status_is_gone_after_the_patch() -> None:
    before = {"a": {"x": 1, "y": {"z": 1}}, "b": [1], "c": 1}
    for after in ({"a": {"x": 2}, "b": [2]}, {"a": {"y": {"w": 2}}, "c": 1}, {}, {"a": 1, "b": {"x": 1}}):
        assert merged(before, changes(before, after)) == after
    assert changes(before, before) == {}


def test_small_movements_are_no_reason_to_write() -> None:
    assert rounded(1_000_000_000) == rounded(1_004_000_000)
    assert human(0) == "0"
    assert human(1536 * 1024) == "1.5Mi"
    assert human(2**40 * 3) == "3Ti"
    assert human(-1536 * 1024) == "-1.5Mi"


def plan(
    spec: dict[str, Any], adaln: dict[str, Any] | None = None, headroom: str | None = None, node: Node | None = None
) -> Any:
    policies = Policies(AdaLNCacheSpec.model_validate(adaln or {}), LayerwiseOffloadSpec(next_stage_headroom=headroom))
    service = DiffusionServiceSpec.model_validate({"model": {"builtIn": {}}, **spec})
    return host_plan(service, policies, node=node)


LIMIT = {"resources": {"limits": {"memory": "4Gi"}}}


def test_what_does_not_fit_says_needed_against_available() -> None:
    wanted = plan(LIMIT, {"hostTierSize": "8Gi"})
    assert not wanted.fits
    assert "9Gi in all) do not fit the memory limit of 4Gi: raise resources.limits.memory" in wanted.message
    assert plan(LIMIT, {"hostTierSize": "1Gi"}).fits
    assert not plan(LIMIT, {"hostTierSize": "1Gi"}, headroom="12Gi").fits
    assert plan(LIMIT, {"mode": "Disabled", "hostTierSize": "8Gi"}).fits


@pytest.mark.parametrize("limit", [None, "64Mi", "1Gi", "3Gi", "80Gi"])
@pytest.mark.parametrize("adaln", [None, {}, {"mode": "Enabled"}, {"hostTierSize": "0"}])
@pytest.mark.parametrize("node", [None, Node("small", {}, "8Gi"), Node("least", {}, "2Gi")])
def test_no_default_is_a_reason_to_refuse(limit: str | None, adaln: dict[str, Any] | None, node: Node | None) -> None:
    """A policy that leaves everything out must not refuse what no policy would: the engine takes what is there."""
    spec = {"resources": {"limits": {"memory": limit}}} if limit else {}
    found = plan(spec, adaln, node=node)
    assert found.fits, found.message
    assert "hostTier" not in dict(found.parts) or adaln == {"hostTierSize": "0"}


def test_a_model_that_may_take_more_than_its_limit_does_not_fit() -> None:
    """It would be killed for doing what it was told."""
    service = DiffusionServiceSpec.model_validate({"model": {"builtIn": {}}, **LIMIT})
    for budget, fits in (("4Gi", True), ("5Gi", False)):
        found = host_plan(service, Policies(offload=LayerwiseOffloadSpec(host_memory=budget)))
        assert found.fits is fits, found.message
    assert "beside hostMemory 5Gi" in found.message


def test_without_limit_and_node_everything_fits() -> None:
    assert plan({}, {"hostTierSize": "800Gi"}).fits


def test_what_is_larger_than_the_largest_node_does_not_fit() -> None:
    node = Node("big", {}, "64Gi")
    assert plan({}, {"hostTierSize": "32Gi"}, node=node).fits
    wanted = plan({}, {"hostTierSize": "800Gi"}, node=node)
    assert not wanted.fits
    assert "801Gi in all) do not fit the 64Gi allocatable on big" in wanted.message


def test_page_out_without_effect_is_said_with_what_to_do() -> None:
    view = summarise([pod(residency=residency(stuck=MIB))])
    assert view.not_owned == MIB
    said = _page_out(view.not_owned)
    assert (said.status, said.reason) == ("False", "NotOwner")
    assert "modelCache" in said.message
    assert _page_out(0).status == "True"


def test_the_largest_plan_over_the_pods_is_told() -> None:
    small = [inference_pb2.PlannedSpace(space="host", peak_bytes=MIB, budget_bytes=8 * MIB)]
    view = summarise([pod(info=info(memory_plan=inference_pb2.MemoryPlanInfo(spaces=small))), pod("b")])
    assert view.spaces == (Space("host", 3 * MIB, 8 * MIB),)


def test_log_lines_are_counted_whatever_is_printed() -> None:
    telemetry = Telemetry(version="test")
    logs.configure(level="error", as_json=True)
    logs.count(telemetry)
    try:
        logging.getLogger("sojourn.operator.test").debug("not printed")
        assert telemetry.registry.get_sample_value("sojourn_log_lines_total", {"level": "debug"}) == 1
    finally:
        logging.getLogger("sojourn").handlers.clear()
        logging.getLogger("sojourn").setLevel(logging.NOTSET)
