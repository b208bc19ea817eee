"""The error that is told of the shipped model at tier high is the one that its clips have."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sojourn.inference.pipeline import DeviceChoice, Pipeline, load_pipeline
from sojourn.inference.quality.measured import SHIPPED, read_table
from sojourn.inference.quality.settings import Fusions, QualitySettings
from sojourn.inference.requests import GenerationRequest, OutputFormat, QualityTier
from sojourn.inference.watch import Watch

# Other processors round elsewhere, and a step near the threshold may then fall on its other side.
SLACK = 1.25


@pytest.fixture(scope="module")
def fused_digits(digits_folder: Path) -> Pipeline:
    settings = QualitySettings(fusions=Fusions.ON)
    pipeline = load_pipeline(digits_folder, device=DeviceChoice.CPU, quality_settings=settings)
    pipeline.fingerprint()
    return pipeline


def test_error_of_a_measured_clip(fused_digits: Pipeline, make_request: Callable[..., GenerationRequest]) -> None:
    (entry,) = [one for one in read_table(SHIPPED) if one.fingerprint == fused_digits.fingerprint()]

    def latents(tier: QualityTier) -> torch.Tensor:
        request = make_request(
            width=64, height=64, steps=entry.min_steps, seeds=(0,), outputs=(OutputFormat.LATENTS,), quality=tier
        )
        clip = fused_digits.run_clip(request, 0, Watch(clock=time.monotonic))
        assert clip.quality is tier
        return clip.latents.double()

    lossless, high = latents(QualityTier.LOSSLESS), latents(QualityTier.HIGH)
    error = float((high - lossless).pow(2).mean().sqrt() / lossless.pow(2).mean().sqrt())
    assert 0 < error <= SLACK * entry.largest_latents_error
