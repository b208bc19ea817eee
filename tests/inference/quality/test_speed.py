"""A fusion is offered where it is faster, and the setting has the last word; time is passed in."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from sojourn.inference.quality import speed
from sojourn.inference.quality.fusions.fusion import Fusion
from sojourn.inference.quality.fusions.gated_residual import GATED_RESIDUAL
from sojourn.inference.quality.fusions.norm_modulate import NORM_MODULATE
from sojourn.inference.quality.settings import Fusions

CPU = torch.device("cpu")


def clock_of(*, reference: float, fused: float) -> Callable[[], float]:
    """Readings of a clock for which reference and fused runs, which take turns, last so long."""
    now, calls = 0.0, 0

    def clock() -> float:
        nonlocal now, calls
        if calls % 2:
            now += reference if calls % 4 == 1 else fused
        calls += 1
        return now

    return clock


def judge(fusion: Fusion, setting: Fusions, *, reference: float = 1.0, fused: float = 1.0) -> speed.Verdict:
    clock = clock_of(reference=reference, fused=fused)
    return speed.judge(fusion, setting=setting, device=CPU, dtype=torch.bfloat16, width=64, clock=clock)


@pytest.mark.parametrize("fusion", [GATED_RESIDUAL, NORM_MODULATE])
def test_auto_offers_what_is_faster(fusion: Fusion) -> None:
    verdict = judge(fusion, Fusions.AUTO, reference=3.0, fused=1.0)
    assert verdict.obstacle is None
    assert verdict.gain == pytest.approx(3.0)


@pytest.mark.parametrize("fused", [2.0, 1.0, 0.95])
def test_auto_refuses_what_is_slower_or_within_the_noise(fused: float) -> None:
    verdict = judge(GATED_RESIDUAL, Fusions.AUTO, fused=fused)
    assert verdict.obstacle is not None
    assert f"takes {fused:.2f} times the reference's time on this cpu; set --fusions on" in verdict.obstacle


def test_on_offers_the_slower_one_and_off_the_faster_one_not() -> None:
    assert judge(GATED_RESIDUAL, Fusions.ON, fused=9.0).obstacle is None
    off = judge(GATED_RESIDUAL, Fusions.OFF, fused=0.1).obstacle
    assert off is not None
    assert "switched off" in off


def test_trial_that_fails_keeps_it_off_and_the_model_loads() -> None:
    def broken(*operands: object) -> torch.Tensor:
        raise RuntimeError("no compiler")

    verdict = judge(replace(GATED_RESIDUAL, kernels={"cpu": broken}), Fusions.AUTO)
    assert verdict.obstacle == "its trial at load failed: no compiler"


def test_what_cannot_run_is_not_measured() -> None:
    def judged(device: str, dtype: torch.dtype) -> str | None:
        verdict = speed.judge(
            GATED_RESIDUAL, setting=Fusions.ON, device=torch.device(device), dtype=dtype, width=64, clock=lambda: 0.0
        )
        return verdict.obstacle

    assert judged("cpu", torch.float64) == "it is not written for torch.float64"
    assert judged("mps", torch.bfloat16) == "it is not written for mps devices"


def test_without_triton_there_is_nothing_for_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sojourn.inference.quality.fusions.fusion.find_spec", lambda name: None)
    obstacle = GATED_RESIDUAL.obstacle(torch.device("cuda"), torch.bfloat16)
    assert obstacle == "triton is not installed; pip install triton"
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert GATED_RESIDUAL.obstacle(torch.device("cuda"), torch.bfloat16) == "it is not written for ROCm"


def test_real_clock_gives_a_ratio() -> None:
    assert speed.measure(NORM_MODULATE, device=CPU, dtype=torch.float32, rows=8, width=64, rounds=1) > 0
