"""What the fused operations of the quality tiers save, at the shapes of the real models.

For each fusion and dtype, on this device, on tokens of the model's own width (the default configuration of its class):

- ratio: seconds of the reference by seconds of the fused operation, the median over interleaved rounds of one run; the
  goal is 1.0 at least for whatever `sojourn serve --fusions auto` would mount here, which is told beside it. A mounted
  fusion that is slower is a failure (exit status 1); one that is slower and not mounted is what the judge is for.
- moved: bytes that the operation has to move at the least (operands read once, the result written once) by the bytes
  that a plain copy moves in the time that the fused operation took; 1.0 is as fast as memory allows.
- alike: root mean square error against float64, by the reference's own.

Rows are a part of a real sequence (Helios: 11 040 tokens in a chunk of 640×384; MiniMax-H3: 10^4 to 10^5), as many as
keep every operand far beyond the caches of two cores and a run below two minutes.

    python bench/fusions.py [--rows 1024] [--rounds 7] [--json]
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("proto", "inference", "residencyd", "operator")]
os.environ["HF_HUB_OFFLINE"] = "1"

import inspect  # noqa: E402

import diffusers  # noqa: E402
import torch  # noqa: E402
from sojourn.inference.quality import speed  # noqa: E402
from sojourn.inference.quality.fusions.fusion import Fusion  # noqa: E402
from sojourn.inference.quality.fusions.norm_modulate import epsilon  # noqa: E402
from sojourn.inference.quality.observer import Part  # noqa: E402
from sojourn.inference.quality.settings import Fusions  # noqa: E402
from sojourn.inference.quality.sites import SITES  # noqa: E402

DTYPES = (torch.bfloat16, torch.float32)
GOAL_RATIO = 1.0


@dataclass(frozen=True)
class Figure:
    """One fusion in one dtype.

    Attributes:
        mounted: Whether the judge of `--fusions auto` takes it on this device.
        reference_seconds, fused_seconds: Medians.
        least_bytes: What has to be moved.
        moved: See the module.
        alike: See the module.
    """

    transformer: str
    fusion: str
    dtype: str
    rows: int
    width: int
    mounted: bool
    reference_seconds: float
    fused_seconds: float
    ratio: float
    least_bytes: int
    moved: float
    alike: float

    @property
    def met(self) -> bool:
        """Whether the goal is reached, or nothing is mounted."""
        return not self.mounted or self.ratio >= GOAL_RATIO


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024, help="tokens")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds, of which the median counts")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad():
        figures = list(figures_of(device, options.rows, options.rounds))
    print(json.dumps([asdict(figure) for figure in figures], indent=1) if options.json else table(figures, device))
    return 0 if all(figure.met for figure in figures) else 1


def figures_of(device: torch.device, rows: int, rounds: int) -> Iterator[Figure]:
    for transformer, sites in SITES.items():
        width = sites.width(default_config(transformer))
        for place in sites.fusions:
            for dtype in DTYPES:
                if place.fusion.obstacle(device, dtype) is None:
                    yield figure_of(transformer, place.fusion, device, dtype, rows, width, rounds)


def default_config(transformer: str) -> Any:
    """The defaults of the class, which are those of the released model, without making one."""
    parameters = inspect.signature(getattr(diffusers, transformer).__init__).parameters
    return argparse.Namespace(**{name: parameter.default for name, parameter in parameters.items() if name != "self"})


def figure_of(
    transformer: str, fusion: Fusion, device: torch.device, dtype: torch.dtype, rows: int, width: int, rounds: int
) -> Figure:
    verdict = speed.judge(
        fusion, setting=Fusions.AUTO, device=device, dtype=dtype, width=width, clock=time.perf_counter
    )
    alike = error_ratio(fusion, device, dtype, width)
    operands = fusion.operands(device, dtype, rows, width)
    kernel = fusion.kernels[device.type]
    least = least_bytes(fusion, operands)
    # As many bytes as the operation moves at the least: half of them read, half of them written.
    source = torch.zeros(least // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    taken = interleaved(
        (lambda: fusion.reference(*operands), lambda: kernel(*operands), lambda: target.copy_(source)), device, rounds
    )
    reference, fused, copy = (statistics.median(seconds) for seconds in taken)
    return Figure(
        transformer=transformer, fusion=fusion.part.value, dtype=str(dtype).removeprefix("torch."), rows=rows,
        width=width, mounted=verdict.obstacle is None, reference_seconds=reference, fused_seconds=fused,
        ratio=reference / fused, least_bytes=least, moved=copy / fused, alike=alike,
    )  # fmt: skip


def interleaved(runs: tuple[Callable[[], object], ...], device: torch.device, rounds: int) -> list[list[float]]:
    """Seconds of each run in every round; one round beforehand is not counted."""
    taken: list[list[float]] = [[] for _ in runs]
    for round_ in range(rounds + 1):
        for seconds, run in zip(taken, runs, strict=True):
            began = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if round_:
                seconds.append(time.perf_counter() - began)
    return taken


def least_bytes(fusion: Fusion, operands: tuple[Any, ...]) -> int:
    """Each token-sized operand read once, the result written once; tables of a few rows are left out."""
    result = operands[0].nbytes
    if fusion.part is Part.GATED_RESIDUAL:
        residual, update, gate = operands
        return int(residual.nbytes + update.nbytes + gate.numel() * gate.element_size() + result)
    return int(operands[0].nbytes + operands[4].nbytes + result)


def error_ratio(fusion: Fusion, device: torch.device, dtype: torch.dtype, width: int) -> float:
    """Root mean square error of the fused operation by the reference's, both against float64."""
    operands = fusion.operands(device, dtype, 64, width)
    exact = EXACT[fusion.part](*operands)
    own = rms(fusion.reference(*operands), exact)
    return rms(fusion.kernels[device.type](*operands), exact) / own


def rms(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).pow(2).mean().sqrt())


def exact_gated_residual(residual: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return residual.double() + update.double() * gate.double()


def exact_norm_modulate(
    x: torch.Tensor, norm: Any, shift: torch.Tensor, scale: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    wide = x.double()
    normed = wide * (wide.pow(2).mean(-1, keepdim=True) + epsilon(x, norm)).rsqrt() * norm.weight.double()
    return normed * (1 + scale.double()[index]) + shift.double()[index]


EXACT: dict[Part, Callable[..., torch.Tensor]] = {
    Part.GATED_RESIDUAL: exact_gated_residual,
    Part.NORM_MODULATE: exact_norm_modulate,
}


def table(figures: list[Figure], device: torch.device) -> str:
    head = (
        f"{'fusion':<15} {'dtype':<9} {'width':>6} {'mounted':>8} {'ratio':>7} {'moved':>6} {'alike':>6}  on {device}"
    )
    return "\n".join([head, *(line(figure) for figure in figures)])


def line(figure: Figure) -> str:
    mounted = "yes" if figure.mounted else "no"
    told = f"{figure.fusion:<15} {figure.dtype:<9} {figure.width:>6} {mounted:>8} {figure.ratio:>6.2f}x"
    missed = "" if figure.met else f"  BELOW THE GOAL of {GOAL_RATIO:.1f}x"
    return f"{told} {figure.moved:>6.2f} {figure.alike:>6.2f}{missed}"


if __name__ == "__main__":
    sys.exit(main())
