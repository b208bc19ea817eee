"""What the step cache of tier `high` costs in the picture and saves in time, measured on one checkpoint.

Each clip is made at `lossless` and at `high` from the same seed; frames and latents are compared. The fusions are on:
the error is that of the whole tier. Thresholds beside each other show the choice; `--write FILE` puts the entry of
the one threshold given into a table that `sojourn serve --step-cache-table` reads (the table that comes with Sojourn is
inference/sojourn/inference/quality/measured.json). Only what was measured is served: these workflows, this dtype, and
numbers of steps between the lowest and the highest one here.

- psnr: of the frames of a clip, in dB, all channels; worst and mean over clips.
- ssim: over windows of 7 × 7, per channel, worst clip.
- latents: root mean square error relative to the lossless latents', worst clip.
- skipped: share of the evaluations; faster: seconds of lossless by seconds of high, of the denoising alone.

    python bench/step_cache.py [MODEL] [--threshold 0.1] [--steps 12,20,50] [--prompt TEXT ...] [--write FILE] [--json]
"""

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("proto", "inference", "residencyd", "operator")]
os.environ["HF_HUB_OFFLINE"] = "1"

import diffusers  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from sojourn.inference.pipeline import Pipeline, Precision, load_pipeline  # noqa: E402
from sojourn.inference.quality.measured import Measured, read_table, write_table  # noqa: E402
from sojourn.inference.quality.observer import Action, Part  # noqa: E402
from sojourn.inference.quality.settings import Fusions, QualitySettings  # noqa: E402
from sojourn.inference.requests import Clip, GenerationRequest, QualityTier, Workflow  # noqa: E402
from sojourn.inference.watch import Event, Stage, StageBegan, Watch  # noqa: E402

DIGITS = ROOT / "models" / "h3-digits"
PROMPTS = ("a moving seven", "a moving three", "a moving zero", "a moving five")
WINDOW = 7
# Of the field's usual constants of SSIM, for values from 0 to 1.
C1, C2 = 0.01**2, 0.03**2


@dataclass
class Evaluations:
    """Counts what the step cache skips."""

    skipped: int = 0
    all: int = 0

    def changed(self, *, part: Part, action: Action) -> None:
        """Of no interest here."""

    def mounted(self, *, part: Part, sites: int) -> None:
        """Of no interest here."""

    def evaluated(self, *, skipped: bool) -> None:
        """Counts."""
        self.skipped += skipped
        self.all += 1


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One clip of the tier beside the lossless one."""

    prompt: str
    steps: int
    psnr_db: float
    ssim: float
    latents_error: float
    lossless_seconds: float
    high_seconds: float


@dataclass
class Denoising:
    """Seconds of the denoising stage of one run."""

    began: float = 0.0
    seconds: float = 0.0

    def __call__(self, event: Event) -> None:
        """Hears of the stages."""
        if isinstance(event, StageBegan):
            now = time.perf_counter()
            if event.stage is Stage.DENOISE:
                self.began = now
            elif self.began and not self.seconds:
                self.seconds = now - self.began


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=DIGITS, help="model folder; h3-digits by default")
    parser.add_argument("--threshold", default="0.1", help="one, or several with commas")
    parser.add_argument("--steps", default="12,20,50", help="points of the schedules, with commas")
    parser.add_argument("--prompt", action="append", help="repeat it; one clip each, with a seed of its own")
    parser.add_argument("--dtype", default="bfloat16", choices=[precision.value for precision in Precision])
    parser.add_argument("--write", type=Path, help="table to put the entry into")
    parser.add_argument("--json", action="store_true", help="print the entries as JSON")
    options = parser.parse_args()
    thresholds = [float(text) for text in options.threshold.split(",")]
    if options.write is not None and len(thresholds) > 1:
        parser.error("--write takes the entry of one --threshold")
    steps = sorted(int(text) for text in options.steps.split(","))
    prompts = tuple(options.prompt or PROMPTS)
    entries = []
    for threshold in thresholds:
        entry, comparisons = measure(options.model, Precision(options.dtype), threshold, steps, prompts)
        entries.append(entry)
        if not options.json:
            print(line(entry, comparisons), flush=True)
    if options.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=1))
    if options.write is not None:
        kept = read_table(options.write) if options.write.exists() else ()
        same = (entries[0].fingerprint, entries[0].dtype)
        write_table(options.write, [*(e for e in kept if (e.fingerprint, e.dtype) != same), entries[0]])
    return 0


def measure(
    model: Path, precision: Precision, threshold: float, steps: list[int], prompts: tuple[str, ...]
) -> tuple[Measured, list[Comparison]]:
    """Makes every clip twice."""
    evaluations = Evaluations()
    with tempfile.TemporaryDirectory() as folder:
        blank = _blank(model, precision, threshold, steps)
        pipeline, blank = _load(model, precision, blank, Path(folder) / "table.json", evaluations)
    comparisons = list(compare(pipeline, steps, prompts))
    entry = replace(
        blank,
        clips=len(comparisons),
        lowest_psnr_db=round(min(found.psnr_db for found in comparisons), 2),
        mean_psnr_db=round(sum(found.psnr_db for found in comparisons) / len(comparisons), 2),
        lowest_ssim=round(min(found.ssim for found in comparisons), 4),
        largest_latents_error=round(max(found.latents_error for found in comparisons), 4),
        skipped_share=round(evaluations.skipped / max(1, evaluations.all), 4),
    )
    return entry, comparisons


def _blank(model: Path, precision: Precision, threshold: float, steps: list[int]) -> Measured:
    """An entry whose numbers are yet to be measured."""
    return Measured(
        fingerprint="", model=model.resolve().name, transformer="", dtype=precision.value, threshold=threshold,
        workflows=(Workflow.T2VA.value,), min_steps=steps[0], max_steps=steps[-1], clips=0, lowest_psnr_db=0.0,
        mean_psnr_db=0.0, lowest_ssim=0.0, largest_latents_error=0.0, skipped_share=0.0, provenance=provenance(),
    )  # fmt: skip


def _load(
    model: Path, precision: Precision, blank: Measured, table: Path, evaluations: Evaluations
) -> tuple[Pipeline, Measured]:
    """The pipeline with tier `high` offered by an entry for the checkpoint, and that entry."""
    pipeline = load_pipeline(model, precision=precision)
    named = next(part for part in pipeline.components.values() if part.name == "transformer")
    entry = replace(blank, fingerprint=pipeline.fingerprint(), transformer=named.class_name)
    del pipeline
    write_table(table, [entry])
    settings = QualitySettings(fusions=Fusions.ON, table=table)
    pipeline = load_pipeline(model, precision=precision, quality_settings=settings, quality_observer=evaluations)
    pipeline.fingerprint()
    return pipeline, entry


def compare(pipeline: Pipeline, steps: list[int], prompts: tuple[str, ...]) -> Iterator[Comparison]:
    """Every prompt at every number of steps."""
    for seed, prompt in enumerate(prompts):
        for count in steps:
            request = _request(pipeline, prompt, count, seed)
            lossless, lossless_seconds = run(pipeline, request)
            high, high_seconds = run(pipeline, replace(request, quality=QualityTier.HIGH))
            if high.quality is not QualityTier.HIGH:
                raise SystemExit(f"tier high was not used: {high.quality_reason}")
            assert lossless.frames is not None
            assert high.frames is not None
            yield Comparison(
                prompt=prompt, steps=count, psnr_db=psnr_db(lossless.frames, high.frames),
                ssim=ssim(lossless.frames, high.frames), latents_error=relative_error(lossless.latents, high.latents),
                lossless_seconds=lossless_seconds, high_seconds=high_seconds,
            )  # fmt: skip


def _request(pipeline: Pipeline, prompt: str, steps: int, seed: int) -> GenerationRequest:
    defaults = pipeline.defaults
    return GenerationRequest(
        prompt=prompt, workflow=Workflow.T2VA, width=defaults.width, height=defaults.height, frames=defaults.frames,
        steps=steps, flow_shift=defaults.flow_shift, audio_flow_shift=defaults.audio_flow_shift, seeds=(seed,),
    )  # fmt: skip


def run(pipeline: Pipeline, request: GenerationRequest) -> tuple[Clip, float]:
    """A clip, and the seconds of its denoising."""
    denoising = Denoising()
    clip = pipeline.run_clip(request, 0, Watch(clock=time.monotonic, listener=denoising))
    return clip, denoising.seconds


def psnr_db(one: np.ndarray, other: np.ndarray) -> float:
    """Of frames [F, H, W, 3] in 0..1; 100 where they are equal."""
    error = float(np.mean((one.astype(np.float64) - other.astype(np.float64)) ** 2))
    return 100.0 if error == 0 else -10 * math.log10(error)


def ssim(one: np.ndarray, other: np.ndarray) -> float:
    """Mean structural similarity of frames [F, H, W, 3] in 0..1."""

    def mean(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.avg_pool2d(values, WINDOW, stride=1)

    left, right = (torch.from_numpy(frames).double().permute(0, 3, 1, 2) for frames in (one, other))
    left_mean, right_mean = mean(left), mean(right)
    left_variance, right_variance = mean(left**2) - left_mean**2, mean(right**2) - right_mean**2
    covariance = mean(left * right) - left_mean * right_mean
    above = (2 * left_mean * right_mean + C1) * (2 * covariance + C2)
    below = (left_mean**2 + right_mean**2 + C1) * (left_variance + right_variance + C2)
    return float((above / below).mean())


def relative_error(exact: torch.Tensor, found: torch.Tensor) -> float:
    return float((found.double() - exact.double()).pow(2).mean().sqrt() / exact.double().pow(2).mean().sqrt())


def provenance() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {platform.machine()}"
    return (
        f"bench/step_cache.py, diffusers {diffusers.__version__}, torch {torch.__version__}, {device}, {date.today()}"
    )


def line(entry: Measured, comparisons: list[Comparison]) -> str:
    lossless = sum(found.lossless_seconds for found in comparisons)
    faster = lossless / max(1e-9, sum(found.high_seconds for found in comparisons))
    return (
        f"{entry.model} {entry.dtype} threshold {entry.threshold}: psnr {entry.lowest_psnr_db:.1f} dB at the worst, "
        f"{entry.mean_psnr_db:.1f} on average, ssim {entry.lowest_ssim:.3f}, latents "
        f"{100 * entry.largest_latents_error:.1f} %, skipped {100 * entry.skipped_share:.0f} %, faster {faster:.2f}x, "
        f"{entry.clips} clips"
    )


if __name__ == "__main__":
    sys.exit(main())
