"""Measuring a checkpoint: the digit it shows, the tone it sounds, the sharpness of its codec.

The judge is a support vector machine trained on 8x8 crops of real, drawn digits. It always answers
one of ten, so chance is 10 %. Importing this module has no side effects, and the judging functions
take plain arrays, so that tests may use them on any clip:

    judge = train_judge()
    judge.vote(frames)             # frames: (n, h, w[, 3]), uint8 or float in [0, 1]
    spectral_peak_hz(samples, 32_000)

Any checkpoint can be measured from the command line:

    python -m tools.demo_model.evaluate CHECKPOINT -o DIR [--clips 3]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tools.demo_model import data

Array = NDArray[Any]

CROP_PX = data.GLYPH_PX
CELLS = 8
RENDERS_PER_GLYPH = 3  # Different subpixel places of each training glyph.
JUDGE_SEED = 7
# Fifteen frames over the whole clip; neighbouring frames hardly differ.
JUDGED_FRAMES = tuple(range(4, data.CLIP_FRAMES, 8))
FIRST_CLIP_SEED = 1000
STEPS = 12
PROMPT = data.TEMPLATES[0]
TONE_TOLERANCE_HZ = 5.0  # An eighth of the distance between two digits' tones.
TONE_WINDOW_S = 1.0


@dataclass(frozen=True)
class Vote:
    """What the judge saw in one clip.

    Attributes:
        digit: The digit most frames were taken for.
        frames: The digit each frame was taken for.
    """

    digit: int
    frames: tuple[int, ...]

    def share(self, digit: int) -> float:
        """The share of frames taken for `digit`."""
        return self.frames.count(digit) / len(self.frames)


@dataclass(frozen=True)
class Judge:
    """A trained digit classifier.

    Attributes:
        svm: The fitted scikit-learn classifier.
        held_out_accuracy: On one real render of each of the 297 held-out glyphs.
    """

    svm: Any
    held_out_accuracy: float

    def read(self, frames: Array) -> list[int]:
        """Return the digit in each of the frames `(n, h, w[, 3])`."""
        return [int(digit) for digit in self.svm.predict(features(frames))]

    def vote(self, frames: Array) -> Vote:
        """Judge a clip by the majority of its frames."""
        digits = tuple(self.read(frames))
        return Vote(int(np.bincount(digits, minlength=10).argmax()), digits)


def as_grey(frames: Array) -> Array:
    """Any of `(n, h, w)`, `(n, h, w, 3)`, uint8 or float in [0, 1], to `(n, h, w)` in [0, 1]."""
    grey = np.asarray(frames)
    scale = 255.0 if grey.dtype == np.uint8 else 1.0
    grey = grey.astype(np.float32) / scale
    return grey.mean(axis=-1) if grey.ndim == 4 else grey


def crop(frame: Array) -> Array:
    """Cut the 32x32 window around the ink's centre of mass and average it to 8x8.

    Args:
        frame: `(h, w)` grey in [0, 1]. A frame without ink gives zeros.
    """
    ink = np.where(frame > 0.1, frame, 0.0)
    total = ink.sum()
    if total == 0:
        return np.zeros((CELLS, CELLS), np.float32)
    height, width = frame.shape
    y = round(float((ink.sum(axis=1) * np.arange(height)).sum() / total))
    x = round(float((ink.sum(axis=0) * np.arange(width)).sum() / total))
    half = CROP_PX // 2
    window = np.pad(frame, half)[y : y + CROP_PX, x : x + CROP_PX]
    side = CROP_PX // CELLS
    cells = window.reshape(CELLS, side, CELLS, side).mean(axis=(1, 3))
    return cells / max(float(cells.max()), 1e-6)


def features(frames: Array) -> Array:
    """The judge's view of `(n, h, w[, 3])` frames: `(n, 64)`."""
    return np.stack([crop(frame).ravel() for frame in as_grey(frames)])


def _renders(glyphs: data.Glyphs, per_glyph: int, seed: int) -> tuple[Array, Array]:
    generator = torch.Generator().manual_seed(seed)
    paths = data.random_paths(len(glyphs.digits), per_glyph, generator)
    frames = data.draw(glyphs.sprites, paths).flatten(0, 1)
    return features(frames.numpy()), glyphs.digits.repeat_interleave(per_glyph).numpy()


@cache
def train_judge() -> Judge:
    """Train the judge on real renders of the training glyphs; about two seconds."""
    from sklearn.svm import SVC

    train, held_out = data.load_glyphs()
    svm = SVC(C=10.0, gamma="scale").fit(*_renders(train, RENDERS_PER_GLYPH, JUDGE_SEED))
    return Judge(svm, float(svm.score(*_renders(held_out, 1, JUDGE_SEED + 1))))


def spectral_peak_hz(samples: Array, rate_hz: int) -> float:
    """The loudest frequency of mono samples `(n,)` above 20 Hz; resolution is rate / n."""
    window = np.asarray(samples, np.float64) * np.hanning(len(samples))
    spectrum = np.abs(np.fft.rfft(window))
    frequencies = np.fft.rfftfreq(len(samples), 1.0 / rate_hz)
    spectrum[frequencies < 20.0] = 0.0
    return float(frequencies[spectrum.argmax()])


def sounds_like(samples: Array, rate_hz: int, digit: int) -> bool:
    """Whether the loudest frequency is the digit's tone."""
    return abs(spectral_peak_hz(samples, rate_hz) - data.tone_hz(digit)) <= TONE_TOLERANCE_HZ


@dataclass(frozen=True)
class Clip:
    """One generated clip.

    Attributes:
        digit: The digit asked for.
        seed: Of its noise.
        frames: `(124, 64, 64)` grey in [0, 1].
        audio: `(2, samples)`.
        rate_hz: Sampling rate.
    """

    digit: int
    seed: int
    frames: Array
    audio: Array
    rate_hz: int


def generate(pipeline: Any, digit: int, seed: int, steps: int = STEPS) -> Clip:
    """Generate one clip with the stock pipeline."""
    output = pipeline(
        prompt=PROMPT.format(data.WORDS[digit]),
        num_inference_steps=steps,
        height=data.CANVAS_PX,
        width=data.CANVAS_PX,
        num_frames=data.CLIP_FRAMES,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
        output=["videos", "audio", "sampling_rate"],
    )
    frames = as_grey(np.asarray(output["videos"])[0])
    audio = output["audio"][0].float().numpy()
    return Clip(digit, seed, frames, audio, int(output["sampling_rate"]))


def generate_clips(pipeline: Any, per_digit: int, steps: int = STEPS) -> Iterator[Clip]:
    """Generate `per_digit` clips of each digit, seeds 1000, 1001, and so on."""
    for digit in range(10):
        for number in range(per_digit):
            yield generate(pipeline, digit, FIRST_CLIP_SEED + number, steps)


@dataclass(frozen=True)
class Report:
    """Figures of one checkpoint.

    Attributes:
        judge_held_out: Accuracy of the judge on real held-out digits.
        clips: Number of generated clips.
        clip_accuracy: Share whose majority of frames is the digit asked for.
        frame_accuracy: Share of judged frames that are.
        frame_accuracy_by_digit: The same per digit.
        tone_accuracy: Share of clips whose first second's loudest frequency is the digit's tone.
        tone_amplitude: Mean amplitude of the left channel (0.25 was taught).
        speed_px_per_s: Median speed of the ink's centre of mass (12 to 36 was taught).
        vae_psnr_db: Stock encode and decode of held-out clips.
        seconds_per_clip: Mean time of a generation here.
        steps: Denoising steps.
    """

    judge_held_out: float
    clips: int
    clip_accuracy: float
    frame_accuracy: float
    frame_accuracy_by_digit: tuple[float, ...]
    tone_accuracy: float
    tone_amplitude: float
    speed_px_per_s: float
    vae_psnr_db: float
    seconds_per_clip: float
    steps: int


def speed_px_per_s(frames: Array) -> float:
    """Median speed of the ink's centre of mass over a quarter of a second."""
    grey = as_grey(frames)
    ink = np.where(grey > 0.1, grey, 0.0)
    total = np.maximum(ink.sum(axis=(1, 2)), 1e-6)
    y = (ink.sum(axis=2) * np.arange(grey.shape[1])).sum(axis=1) / total
    x = (ink.sum(axis=1) * np.arange(grey.shape[2])).sum(axis=1) / total
    lag = data.FPS // 4
    return float(np.median(np.hypot(y[lag:] - y[:-lag], x[lag:] - x[:-lag])) * 4)


def measure(pipeline: Any, per_digit: int, psnr_clips: int = 8) -> tuple[Report, list[Clip]]:
    """Generate clips and judge them; also measure the codec."""
    from tools.demo_model.vae import psnr_db

    started = time.monotonic()
    clips = list(generate_clips(pipeline, per_digit))
    seconds = (time.monotonic() - started) / len(clips)
    psnr = float(psnr_db(pipeline.vae, psnr_clips, seed=FIRST_CLIP_SEED).mean())
    return judge_clips(clips, psnr, seconds), clips


def judge_clips(clips: Sequence[Clip], psnr: float, seconds_per_clip: float) -> Report:
    """Sum up what the judge and the spectrum say about clips."""
    judge = train_judge()
    votes = [judge.vote(clip.frames[list(JUDGED_FRAMES)]) for clip in clips]
    shares = np.array([vote.share(clip.digit) for vote, clip in zip(votes, clips, strict=True)])
    asked = np.array([clip.digit for clip in clips])
    seconds = [clip.audio[0][: int(TONE_WINDOW_S * clip.rate_hz)] for clip in clips]
    right_tones = [sounds_like(heard, clip.rate_hz, clip.digit) for heard, clip in zip(seconds, clips, strict=True)]
    return Report(
        judge_held_out=judge.held_out_accuracy,
        clips=len(clips),
        clip_accuracy=float(np.mean([vote.digit for vote in votes] == asked)),
        frame_accuracy=float(shares.mean()),
        frame_accuracy_by_digit=tuple(float(shares[asked == d].mean()) for d in range(10)),
        tone_accuracy=float(np.mean(right_tones)),
        tone_amplitude=float(np.mean([np.sqrt(2) * heard.std() for heard in seconds])),
        speed_px_per_s=float(np.median([speed_px_per_s(clip.frames) for clip in clips])),
        vae_psnr_db=psnr,
        seconds_per_clip=seconds_per_clip,
        steps=STEPS,
    )


def save_sheet(clips: Iterable[Clip], path: Path, columns: int = 8) -> None:
    """Write a contact sheet: one row per clip, evenly spaced frames from left to right."""
    from PIL import Image

    rows = []
    for clip in clips:
        shown = np.linspace(4, len(clip.frames) - 4, columns).astype(int)
        rows.append(np.concatenate([framed(clip.frames[i]) for i in shown], axis=1))
    Image.fromarray(np.concatenate(rows, axis=0)).save(path)


def framed(frame: Array) -> Array:
    """The frame as bytes, in a grey frame one pixel wide."""
    pixels = (np.clip(frame, 0.0, 1.0) * 255).round().astype(np.uint8)
    return np.pad(pixels, 1, constant_values=96)


def save_report(report: Report, path: Path) -> None:
    """Write the figures as JSON."""
    path.write_text(json.dumps(asdict(report), indent=2) + "\n")


def evaluate(checkpoint: Path, folder: Path, per_digit: int) -> Report:
    """Measure a checkpoint; leave `report.json` and `sheet.png` in `folder`."""
    from tools.demo_model import export

    report, clips = measure(export.load(checkpoint), per_digit)
    folder.mkdir(parents=True, exist_ok=True)
    save_report(report, folder / "report.json")
    save_sheet(clips, folder / "sheet.png")
    return report


def main() -> None:
    """Measure a checkpoint from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.evaluate")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--clips", type=int, default=3, help="clips per digit")
    arguments = parser.parse_args()
    report = evaluate(arguments.checkpoint, arguments.output, arguments.clips)
    print(json.dumps(asdict(report), indent=2))


if __name__ == "__main__":
    main()
