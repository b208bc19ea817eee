"""Tiers on a chunked family: base, mid and distilled, over two chunks and, where there are some, pyramid levels."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from sojourn.inference.pipeline import DeviceChoice, Pipeline, load_pipeline
from sojourn.inference.quality.observer import Part
from sojourn.inference.quality.settings import Fusions, QualitySettings
from sojourn.inference.requests import Clip, GenerationRequest, OutputFormat, QualityTier, Workflow
from sojourn.inference.tiny import tiny_random
from sojourn.inference.watch import Watch

from tests.inference.quality.conftest import entry
from tests.inference.quality.toys import Remembering

RELEASES = ("helios-base", "helios-mid", "helios-distilled")
CHUNKS, LAYERS = 2, 2


def run(pipeline: Pipeline, tier: QualityTier) -> Clip:
    request = GenerationRequest(
        prompt="a moving seven", workflow=Workflow.T2VA, width=64, height=64, frames=34, steps=4, flow_shift=0.0,
        audio_flow_shift=0.0, seeds=(7,), outputs=(OutputFormat.LATENTS,), quality=tier,
    )  # fmt: skip
    return pipeline.run_clip(request, 0, Watch(clock=time.monotonic))


@pytest.mark.parametrize("release", RELEASES)
def test_each_tier_is_used_and_lossless_is_what_it_was(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = Remembering()
    pipeline = load_pipeline(
        tiny_random(release, tmp_path), device=DeviceChoice.CPU, quality_observer=observer,
        quality_settings=QualitySettings(fusions=Fusions.ON),
    )  # fmt: skip
    changes = {"transformer": "HeliosTransformer3DModel", "threshold": 0.5}
    pipeline.quality._table = (entry(pipeline.fingerprint(), **changes),)
    first = run(pipeline, QualityTier.LOSSLESS).latents
    found = {}
    for tier in (QualityTier.EXTRA_HIGH, QualityTier.HIGH):
        clip = run(pipeline, tier)
        assert (clip.quality, clip.quality_reason) == (tier, "")
        found[tier] = clip.latents
        assert observer.sites[Part.GATED_RESIDUAL] == 2 * LAYERS
        assert torch.equal(run(pipeline, QualityTier.LOSSLESS).latents, first)
    assert not torch.equal(found[QualityTier.EXTRA_HIGH], first)
    assert 0 < sum(observer.evaluations) < len(observer.evaluations)
    assert observer.sites == {Part.GATED_RESIDUAL: 0, Part.STEP_CACHE: 0}


@pytest.mark.parametrize("release", RELEASES)
def test_every_chunk_begins_with_whole_steps(release: str, tmp_path: Path) -> None:
    """Nothing of a chunk, or of a level of another size, is taken for one of the next."""
    observer = Remembering()
    pipeline = load_pipeline(tiny_random(release, tmp_path), device=DeviceChoice.CPU, quality_observer=observer)
    pipeline.quality._table = (entry(pipeline.fingerprint(), threshold=1e9),)
    begun: list[bool] = []
    transformer = pipeline.components["transformer"].value
    seen: list[tuple[Any, float]] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        now = kwargs["hidden_states"].shape, float(kwargs["timestep"].max())
        begun.append(not seen or seen[-1][0] != now[0] or now[1] > seen[-1][1])
        seen.append(now)

    handle = transformer.register_forward_pre_hook(note, with_kwargs=True)
    run(pipeline, QualityTier.HIGH)
    handle.remove()
    assert len(begun) == len(observer.evaluations)
    assert sum(begun) >= CHUNKS
    whole = [not skipped for skipped in observer.evaluations]
    assert all(is_whole for is_whole, is_first in zip(whole, begun, strict=True) if is_first)
    assert not all(whole)
