"""Whether a fusion pays on a device: measured once, when a model is loaded, on operands of the model's own width."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from sojourn.inference.quality.fusions.fusion import Fusion
from sojourn.inference.quality.settings import FUSIONS_SETTING, Fusions

# Rows of the trial: enough that the operands of a real model exceed the caches of a core, few enough for a tenth of a
# second and for 200 MiB, most of which are the modulation rows that a gate is one of.
_ROWS = {"cpu": 256, "cuda": 1024}
_ROUNDS = 5
# Below this a fusion stays off: a difference that a busy machine makes must not decide which rounding clips get.
LEAST_GAIN = 1.1

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a fusion is offered.

    Attributes:
        obstacle: Why not; None where it is.
        gain: Seconds of the reference by seconds of the fusion; None where that was not measured.
    """

    obstacle: str | None
    gain: float | None = None


def judge(
    fusion: Fusion, *, setting: Fusions, device: torch.device, dtype: torch.dtype, width: int, clock: Clock
) -> Verdict:
    """Decides whether a fusion is offered on a device.

    Args:
        fusion: Which.
        setting: AUTO measures, ON takes it wherever it runs, OFF never.
        device: Where the model runs.
        dtype: What its blocks compute in.
        width: Elements of its tokens.
        clock: Seconds of a monotonic clock.
    """
    if setting is Fusions.OFF:
        return Verdict(obstacle=f"fusions are switched off; set {FUSIONS_SETTING} auto")
    if (obstacle := fusion.obstacle(device, dtype)) is not None:
        return Verdict(obstacle=obstacle)
    if setting is Fusions.ON:
        return Verdict(obstacle=None)
    try:
        gain = measure(fusion, device=device, dtype=dtype, rows=_ROWS[device.type], width=width, clock=clock)
    except Exception as error:  # such as no compiler for Triton, or no room: the model can be served without
        return Verdict(obstacle=f"its trial at load failed: {error}")
    if gain < LEAST_GAIN:
        return Verdict(
            obstacle=f"it takes {1 / gain:.2f} times the reference's time on this {device.type}; set "
            f"{FUSIONS_SETTING} on to have it nevertheless",
            gain=gain,
        )
    return Verdict(obstacle=None, gain=gain)


def measure(
    fusion: Fusion,
    *,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    width: int,
    clock: Clock = time.perf_counter,
    rounds: int = _ROUNDS,
) -> float:
    """Seconds of the reference by seconds of the fusion: the best of interleaved rounds of each."""
    operands = fusion.operands(device, dtype, rows, width)
    kernel = fusion.kernels[device.type]

    def seconds(run: Callable[..., torch.Tensor]) -> float:
        began = clock()
        run(*operands)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - began

    with torch.no_grad():
        for run in (fusion.reference, kernel):
            seconds(run)
        taken = [(seconds(fusion.reference), seconds(kernel)) for _ in range(rounds)]
    return min(reference for reference, _ in taken) / max(min(fused for _, fused in taken), 1e-9)
