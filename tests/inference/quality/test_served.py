"""Tiers through the server: asked for, used, told and counted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from sojourn.inference.cli import local
from sojourn.inference.pipeline import Pipeline
from sojourn.inference.quality.settings import Fusions, QualitySettings
from sojourn.inference.requests import GenerationRequest, QualityTier
from sojourn.inference.server.admission import Pace, Work, work_of
from sojourn.inference.telemetry import Telemetry
from sojourn.v1 import inference_pb2 as pb

from tests.inference.server.serving import request, serving

LOSSLESS, EXTRA_HIGH, HIGH = pb.QUALITY_TIER_LOSSLESS, pb.QUALITY_TIER_EXTRA_HIGH, pb.QUALITY_TIER_HIGH
STEPS = 8


async def test_each_tier_is_served_and_told(tiered: Pipeline) -> None:
    async with serving(tiered) as served:
        found = {}
        for tier in (HIGH, EXTRA_HIGH, LOSSLESS):
            result = await served.client.generate(request(quality=tier, steps=STEPS))
            assert result.accepted is not None
            assert result.completed is not None
            assert result.accepted.parameters.quality == tier
            assert (result.completed.quality, result.completed.quality_reason) == (tier, "")
            found[tier] = result.sha256
        assert len({str(value) for value in found.values()}) == 3
        plain = await served.client.generate(request(steps=STEPS))
        assert plain.sha256 == found[LOSSLESS]
        assert served.sample("quality_requests_total", asked="high", used="high") == 1
        assert served.sample("quality_requests_total", asked="lossless", used="lossless") == 2


async def test_info_tells_every_tier_and_what_was_measured(tiered: Pipeline, tiny: Pipeline) -> None:
    async with serving(tiered) as served:
        info = await served.client.info()
    assert list(info.quality_tiers) == [LOSSLESS, EXTRA_HIGH, HIGH]
    assert [(told.tier, told.obstacle) for told in info.tiers] == [(LOSSLESS, ""), (EXTRA_HIGH, ""), (HIGH, "")]
    assert [told.HasField("measured_error") for told in info.tiers] == [False, False, True]
    error = info.tiers[2].measured_error
    for field in pb.MeasuredError.DESCRIPTOR.fields:
        assert getattr(error, field.name), f"measured_error.{field.name} is not told"
    async with serving(tiny) as served:
        info = await served.client.info()
    assert list(info.quality_tiers) == [LOSSLESS]
    assert all(told.obstacle for told in info.tiers[1:])


async def test_outside_of_what_was_measured_is_a_failed_precondition(tiered: Pipeline) -> None:
    async with serving(tiered) as served:
        error = await served.client.error(request(quality=HIGH, steps=50))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "measured from 3 to 20 steps, not for 50; or ask for lossless" in str(error.details())
        assert served.sample("requests_refused_total", reason="invalid") == 1


async def test_failed_mount_is_in_the_response_and_in_the_metrics(load_tiered: Callable[..., Pipeline]) -> None:
    telemetry = Telemetry()
    pipeline = load_tiered(quality_observer=telemetry.quality)
    norm = pipeline.components["transformer"].value.norm_out.norm
    norm.register_forward_hook(lambda *_: None)
    async with serving(pipeline) as served:
        lossless = await served.client.generate(request())
        result = await served.client.generate(request(quality=EXTRA_HIGH, count=2))
        assert served.sample("quality_requests_total", asked="extra-high", used="lossless") == 1
    assert result.completed is not None
    assert result.completed.quality == LOSSLESS
    assert result.completed.quality_reason.count("norm_modulate could not be mounted: norm_out.norm has hooks") == 1
    assert result.sha256[0] == lossless.sha256[0]
    value = telemetry.registry.get_sample_value
    labels = {"family": "norm_modulate", "action": "failed"}
    assert value("sojourn_fusion_changes_total", labels) == 2  # one for each clip: it is tried again
    assert value("sojourn_fusion_mounted_sites", {"family": "norm_modulate"}) == 0


async def test_metrics_of_mounting_and_of_skipping(load_tiered: Callable[..., Pipeline], make_request: Any) -> None:
    telemetry = Telemetry()
    pipeline = load_tiered(quality_observer=telemetry.quality)
    value = telemetry.registry.get_sample_value

    def values(name: str, label: str) -> dict[str, float]:
        metric = next(metric for metric in telemetry.registry.collect() if metric.name == f"sojourn_{name}")
        return {sample.labels[label]: sample.value for sample in metric.samples}

    assert values("fusion_mounted_sites", "family") == {"gated_residual": 0, "norm_modulate": 0, "step_cache": 0}
    async with serving(pipeline) as served:
        await served.client.generate(request(quality=HIGH, steps=STEPS))
        assert values("fusion_mounted_sites", "family") == {"gated_residual": 0, "norm_modulate": 5, "step_cache": 2}
        evaluations = values("step_cache_evaluations", "result")
        assert evaluations["computed"] + evaluations["skipped"] == STEPS - 1
        assert evaluations["skipped"] > 0
        await served.client.generate(request())
        assert values("fusion_mounted_sites", "family") == {"gated_residual": 0, "norm_modulate": 0, "step_cache": 0}
    for action in ("mount", "unmount"):
        for part in ("norm_modulate", "step_cache"):
            assert value("sojourn_fusion_changes_total", {"family": part, "action": action}) == 1


def test_steps_of_one_tier_say_nothing_of_another(make_request: Callable[..., GenerationRequest]) -> None:
    works: dict[QualityTier, Work] = {
        tier: work_of(make_request(quality=tier), evaluations=2, step_frames=124) for tier in QualityTier
    }
    pace = Pace()
    pace.observe_step(works[QualityTier.LOSSLESS], 4.0, now=0.0)
    pace.observe_step(works[QualityTier.HIGH], 1.0, now=0.0)
    found = {tier: pace.step_seconds(work, now=1.0) for tier, work in works.items()}
    assert found == {QualityTier.LOSSLESS: 4.0, QualityTier.EXTRA_HIGH: 0.0, QualityTier.HIGH: 1.0}


def test_without_a_server_high_waits_for_the_fingerprint(
    tiny_folder: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sojourn.inference.pipeline import load_pipeline

    def lazily_loaded(model: Path, **_: Any) -> Callable[[], Pipeline]:
        return lambda: load_pipeline(model, quality_settings=QualitySettings(fusions=Fusions.ON, table=table))

    monkeypatch.setattr(local, "lazily_loaded", lazily_loaded)
    with local.stream(tiny_folder, "cpu", "bfloat16", request(quality=HIGH, steps=STEPS), None) as responses:
        completed = [response.completed for response in responses if response.HasField("completed")]
    assert [done.quality for done in completed] == [HIGH]
