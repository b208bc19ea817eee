"""Measuring a checkpoint chunk by chunk: the digit it shows, how it moves on at a seam, the sharpness of its codec.

    python -m tools.demo_model.helios.evaluate CHECKPOINT -o DIR [--clips 3] [--guidance 2.5]

The judge is that of `tools.demo_model.evaluate`. A seam is where one chunk ends and the next begins.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tools.demo_model import data
from tools.demo_model.evaluate import (
    FIRST_CLIP_SEED,
    PROMPT,
    Array,
    as_grey,
    framed,
    speed_px_per_s,
    train_judge,
)
from tools.demo_model.helios import chunks, codec, export

STEPS = 12
JUDGED_EVERY = 6


@dataclass(frozen=True)
class Clip:
    """One generated clip.

    Attributes:
        digit: The digit asked for.
        frames: `(132, 64, 64)` grey in [0, 1].
    """

    digit: int
    frames: Array


@dataclass(frozen=True)
class Report:
    """Figures of one checkpoint.

    Attributes:
        judge_held_out: Accuracy of the judge on real held-out digits.
        clips: Number of generated clips.
        clip_accuracy: Share whose majority of frames is the digit asked for.
        frame_accuracy: Share of judged frames that are.
        frame_accuracy_by_chunk: The same per chunk: whether the digit survives from chunk to chunk.
        frame_accuracy_by_digit: The same per digit.
        seam_step: Mean absolute change of a pixel from the last frame of a chunk to the first of the next.
        inner_step: The same between neighbouring frames within chunks.
        speed_px_per_s: Median speed of the ink's centre of mass (12 to 36 was taught).
        vae_psnr_db: Stock encode and decode of held-out chunks.
        seconds_per_clip: Mean time of a generation here.
        steps: Denoising steps of a chunk.
        guidance_scale: Of the guider.
    """

    judge_held_out: float
    clips: int
    clip_accuracy: float
    frame_accuracy: float
    frame_accuracy_by_chunk: tuple[float, ...]
    frame_accuracy_by_digit: tuple[float, ...]
    seam_step: float
    inner_step: float
    speed_px_per_s: float
    vae_psnr_db: float
    seconds_per_clip: float
    steps: int
    guidance_scale: float


def generate(pipeline: Any, digit: int, seed: int) -> Clip:
    """Generate one clip of four chunks with the stock pipeline, uncut."""
    latents = pipeline(
        prompt=PROMPT.format(data.WORDS[digit]),
        num_inference_steps=STEPS,
        height=data.CANVAS_PX,
        width=data.CANVAS_PX,
        num_frames=chunks.CLIP_FRAMES,
        generator=torch.Generator().manual_seed(seed),
        output="latent_chunks",
    )
    config = pipeline.vae.config
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std))
    with torch.no_grad():
        videos = [pipeline.vae.decode(chunk * std + mean).sample for chunk in latents]
    return Clip(digit, codec.to_grey(torch.cat(videos, dim=2))[0].numpy())


def generate_clips(pipeline: Any, per_digit: int) -> Iterator[Clip]:
    """Generate `per_digit` clips of each digit, seeds 1000, 1001, and so on."""
    for digit in range(10):
        for number in range(per_digit):
            yield generate(pipeline, digit, FIRST_CLIP_SEED + number)


def steps_between_frames(clips: Sequence[Clip]) -> tuple[float, float]:
    """Mean absolute change of a pixel at the seams, and elsewhere."""
    changes = np.stack([np.abs(np.diff(as_grey(clip.frames), axis=0)).mean(axis=(1, 2)) for clip in clips])
    seams = np.arange(chunks.FRAMES - 1, changes.shape[1], chunks.FRAMES)
    return float(changes[:, seams].mean()), float(np.delete(changes, seams, axis=1).mean())


def judge_clips(clips: Sequence[Clip], *, psnr_db: float, seconds_per_clip: float, guidance_scale: float) -> Report:
    """Sum up what the judge says about clips of one length."""
    judge = train_judge()
    judged = range(0, len(clips[0].frames), JUDGED_EVERY)
    read = np.array([judge.read(clip.frames[list(judged)]) for clip in clips])
    asked = np.array([clip.digit for clip in clips])
    right = read == asked[:, None]
    chunk = np.array(judged) // chunks.FRAMES
    seam, inner = steps_between_frames(clips)
    return Report(
        judge_held_out=judge.held_out_accuracy,
        clips=len(clips),
        clip_accuracy=float(np.mean([np.bincount(row, minlength=10).argmax() for row in read] == asked)),
        frame_accuracy=float(right.mean()),
        frame_accuracy_by_chunk=tuple(float(right[:, chunk == c].mean()) for c in range(int(chunk.max()) + 1)),
        frame_accuracy_by_digit=tuple(float(right[asked == d].mean()) for d in range(10)),
        seam_step=seam,
        inner_step=inner,
        speed_px_per_s=float(np.median([speed_px_per_s(clip.frames) for clip in clips])),
        vae_psnr_db=psnr_db,
        seconds_per_clip=seconds_per_clip,
        steps=STEPS,
        guidance_scale=guidance_scale,
    )


def save_sheet(clips: Sequence[Clip], path: Path) -> None:
    """Write a contact sheet: one row per clip, six frames of each chunk, first and last among them."""
    shown = np.linspace(0, chunks.FRAMES - 1, 6).astype(int)
    rows = []
    for clip in clips:
        whole = len(clip.frames) // chunks.FRAMES
        tiles = [framed(clip.frames[c * chunks.FRAMES + i]) for c in range(whole) for i in shown]
        for c in range(1, whole):
            tiles[c * len(shown)][:, :2] = 255  # a white line marks the seam
        rows.append(np.concatenate(tiles, axis=1))
    Image.fromarray(np.concatenate(rows, axis=0)).save(path)


def evaluate(checkpoint: Path, folder: Path, per_digit: int, guidance: float | None = None) -> Report:
    """Measure a checkpoint; leave `report.json` and `sheet.png` in `folder`."""
    pipeline = export.load(checkpoint)
    if guidance is not None:
        pipeline.guider.guidance_scale = guidance
    started = time.monotonic()
    clips = list(generate_clips(pipeline, per_digit))
    seconds = (time.monotonic() - started) / len(clips)
    psnr = float(codec.psnr_db(pipeline.vae, 8, FIRST_CLIP_SEED).mean())
    scale = float(pipeline.guider.guidance_scale)
    report = judge_clips(clips, psnr_db=psnr, seconds_per_clip=seconds, guidance_scale=scale)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    save_sheet(clips, folder / "sheet.png")
    return report


def main() -> None:
    """Measure a checkpoint from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.helios.evaluate")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--clips", type=int, default=3, help="clips per digit")
    parser.add_argument("--guidance", type=float, help="instead of the checkpoint's own scale")
    arguments = parser.parse_args()
    report = evaluate(arguments.checkpoint, arguments.output, arguments.clips, arguments.guidance)
    print(json.dumps(asdict(report), indent=2))


if __name__ == "__main__":
    main()
