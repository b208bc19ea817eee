"""What is read from pods, and what of it reaches the status."""

import logging
from typing import Any

from sojourn.operator import logs
from sojourn.operator.desired import Policies
from sojourn.operator.observe import PodView, parse, rounded, summarise
from sojourn.operator.plan import host_plan, human
from sojourn.operator.reporting import _page_out
from sojourn.operator.resources import AdaLNCacheSpec, DiffusionServiceSpec, LayerwiseOffloadSpec
from sojourn.operator.telemetry import Telemetry

INFERENCE = """
sojourn_model_info{model="h3-digits",family="minimax-h3",device="cpu"} 1.0
sojourn_plan_cache_requests_total{result="hit"} 6.0
sojourn_plan_cache_requests_total{result="host"} 1.0
sojourn_plan_cache_requests_total{result="store"} 0.0
sojourn_plan_cache_requests_total{result="built"} 1.0
sojourn_plan_cache_requests_total{result="refused"} 5.0
sojourn_plan_cache_unloaded_weight_bytes 4194304.0
sojourn_plan_cache_allocated_bytes{tier="gpu"} 1048576.0
sojourn_plan_cache_allocated_bytes{tier="host"} 1048576.0
"""
RESIDENCYD = """
sojourn_residency_mapped_bytes{component="transformer",tier="host_mapped"} 8388608.0
sojourn_residency_resident_bytes{component="transformer",tier="host_mapped"} 2097152.0
sojourn_residency_mapped_bytes{component="transformer",tier="vram"} 1048576.0
sojourn_residency_resident_bytes{component="vae",tier="host_pageable"} 1048576.0
sojourn_residency_blind{reason="other_uid"} 0.0
"""


def test_figures_are_summed_over_pods() -> None:
    pod = PodView(parse(INFERENCE), parse(RESIDENCYD))
    view = summarise([pod, pod])
    assert (view.visible, view.model, view.family) == (True, "h3-digits", "minimax-h3")
    assert view.adaln
    assert (view.adaln.hit_ratio, view.adaln.builds, view.adaln.saved) == ("88", 2, human(rounded(4194304)))
    assert view.residency
    by_name = {row.component: row for row in view.residency.components}
    assert by_name["transformer"].mapped_bytes == rounded(16777216)
    assert by_name["transformer"].mapped_resident_bytes == rounded(4194304)
    assert by_name["vae"].pageable_bytes == rounded(2097152)
    assert view.residency.vram == human(rounded(2097152))


def test_a_sidecar_that_is_blind_or_silent_is_a_condition_and_never_zeros() -> None:
    blind = RESIDENCYD.replace('reason="other_uid"} 0.0', 'reason="other_uid"} 1.0')
    view = summarise([PodView(parse(INFERENCE), parse(blind))])
    assert (view.visible, view.reason) == (False, "Blind")
    assert "other_uid" in view.message
    silent = summarise([PodView(parse(INFERENCE), None)])
    assert (silent.visible, silent.reason, silent.residency) == (False, "Unreachable", None)
    mapless = summarise([PodView(parse(""), parse('sojourn_residency_blind{reason="no_map"} 1.0\n'))])
    assert (mapless.reason, mapless.residency, mapless.adaln) == ("Blind", None, None)


def test_without_a_request_there_is_no_ratio() -> None:
    view = summarise([PodView(parse('sojourn_plan_cache_requests_total{result="hit"} 0.0\n'), parse(""))])
    assert view.adaln
    assert view.adaln.hit_ratio == ""


def test_small_movements_are_no_reason_to_write() -> None:
    assert rounded(1_000_000_000) == rounded(1_004_000_000)
    assert human(0) == "0"
    assert human(1536 * 1024) == "1.5Mi"
    assert human(2**40 * 3) == "3Ti"


def plan(spec: dict[str, Any], adaln: dict[str, Any] | None = None, headroom: str | None = None) -> Any:
    policies = Policies(AdaLNCacheSpec.model_validate(adaln or {}), LayerwiseOffloadSpec(next_stage_headroom=headroom))
    service = DiffusionServiceSpec.model_validate({"model": {"builtIn": {}}, **spec})
    return host_plan(service, policies, adaln_given=adaln is not None)


LIMIT = {"resources": {"limits": {"memory": "4Gi"}}}


def test_what_does_not_fit_says_needed_against_available() -> None:
    wanted = plan(LIMIT, {"hostTierSize": "8Gi"})
    assert not wanted.fits
    assert "9Gi in all) do not fit the memory limit of 4Gi: raise resources.limits.memory" in wanted.message
    assert plan(LIMIT, {"hostTierSize": "1Gi"}).fits
    assert not plan(LIMIT, {"hostTierSize": "1Gi"}, headroom="12Gi").fits
    assert plan(LIMIT, {"mode": "Disabled", "hostTierSize": "8Gi"}).fits


def test_the_default_host_tier_is_left_to_the_engine_and_no_limit_fits_all() -> None:
    assert plan(LIMIT).fits
    assert plan({}, {"hostTierSize": "800Gi"}).fits


def test_page_out_without_effect_is_said_with_what_to_do() -> None:
    stuck = RESIDENCYD + 'sojourn_headroom_stuck_bytes{component="vae",reason="not_owner"} 1048576.0\n'
    view = summarise([PodView(parse(INFERENCE), parse(stuck))])
    assert view.not_owned == 1048576
    said = _page_out(view.not_owned)
    assert (said.status, said.reason) == ("False", "NotOwner")
    assert "modelCache" in said.message
    assert _page_out(0).status == "True"


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
