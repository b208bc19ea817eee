"""What the demo model is shown: drifting handwritten digits, one pure tone each, and a few prompts.

The digits are scikit-learn's bundled 8x8 set, so nothing is downloaded. All functions are pure in
their arguments; randomness comes in as a `torch.Generator`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

FPS = 24
CANVAS_PX = 64
GLYPH_PX = 32
SPRITE_PX = 40  # The glyph with one source pixel (4 px) of margin on each side.
CLIP_FRAMES = 124  # The shortest clip the stock pipeline generates: 17 * 7 + 5, just over 5 s.
SPEED_PX_PER_S = (12.0, 36.0)

TRAIN_GLYPHS = 1500
SPLIT_SEED = 20240  # Fixed, so that the held-out glyphs are the same whatever the training seed.

# Stroke edges: a steep sigmoid around this ink level turns a bicubic blur into a crisp stroke.
INK_THRESHOLD = 0.42
INK_STEEPNESS = 9.0

PIXEL_MEAN = (0.485, 0.456, 0.406)  # ImageNet, the video VAE's pixel convention.
PIXEL_STD = (0.229, 0.224, 0.225)

SAMPLE_RATE_HZ = 32_000
HOP_SAMPLES = 800  # One audio latent.
TONE_STEP_HZ = 40  # SAMPLE_RATE_HZ / HOP_SAMPLES: its multiples fit a hop in whole periods.
LOWEST_TONE_STEPS = 8
TONE_AMPLITUDE = 0.25

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NUMERALS = tuple(str(digit) for digit in range(10))

# The first is what the demo and the evaluation ask for, so half of the batches are drawn from it.
TEMPLATES = (
    "a moving {}",
    "a drifting {}",
    "a bouncing {}",
    "the digit {} drifts",
    "the number {} moves",
    "a handwritten {} bounces around",
    "a handwritten {} moving across the screen",
    "a video of the digit {}",
)


@dataclass(frozen=True)
class Glyphs:
    """Sprites and their digits.

    Attributes:
        sprites: `(n, 40, 40)` float32 in [0, 1].
        digits: `(n,)` int64 in 0..9.
    """

    sprites: Tensor
    digits: Tensor


@cache
def load_glyphs() -> tuple[Glyphs, Glyphs]:
    """Return the 1500 training and the 297 held-out glyphs."""
    from sklearn.datasets import load_digits

    source = load_digits()
    images = torch.from_numpy(source.images).float() / 16.0
    digits = torch.from_numpy(source.target).long()
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(SPLIT_SEED))
    sprites = render_sprites(images)
    train, held_out = order[:TRAIN_GLYPHS], order[TRAIN_GLYPHS:]
    return Glyphs(sprites[train], digits[train]), Glyphs(sprites[held_out], digits[held_out])


def render_sprites(images: Tensor) -> Tensor:
    """Enlarge `(n, 8, 8)` ink levels in [0, 1] to crisp `(n, 40, 40)` sprites on pure black."""
    padded = F.pad(images[:, None], (1, 1, 1, 1))
    ink = F.interpolate(padded, scale_factor=4, mode="bicubic", align_corners=False)[:, 0]
    crisp = torch.sigmoid((ink - INK_THRESHOLD) * INK_STEEPNESS)
    paper = 1.0 / (1.0 + math.exp(INK_THRESHOLD * INK_STEEPNESS))
    return ((crisp - paper) / (1.0 - paper)).clamp(0.0, 1.0)


def reflect(position: Tensor, span: float) -> Tensor:
    """Fold an unbounded position into [0, span] as a ball between two walls (a triangle wave)."""
    return span - (position.remainder(2 * span) - span).abs()


def random_paths(count: int, frames: int, generator: torch.Generator) -> Tensor:
    """Draw bouncing paths: `(count, frames, 2)` top-left glyph corners as (y, x) in pixels."""
    span = float(CANVAS_PX - GLYPH_PX)
    low, high = SPEED_PX_PER_S
    start = torch.rand(count, 1, 2, generator=generator) * 2 * span
    speed = low + (high - low) * torch.rand(count, 1, generator=generator)
    angle = torch.rand(count, 1, generator=generator) * 2 * math.pi
    velocity = torch.stack([speed * angle.sin(), speed * angle.cos()], dim=-1)
    seconds = torch.arange(frames, dtype=torch.float32)[None, :, None] / FPS
    return reflect(start + velocity * seconds, span)


def _placement(corner: Tensor) -> Tensor:
    """Bilinear placement weights `(..., 64, 40)` of sprite pixels for one axis' glyph corner."""
    offset = corner - (SPRITE_PX - GLYPH_PX) / 2
    canvas = torch.arange(CANVAS_PX, dtype=torch.float32)[:, None]
    sprite = torch.arange(SPRITE_PX, dtype=torch.float32)[None, :]
    return (1.0 - (canvas - sprite - offset[..., None, None]).abs()).clamp_min(0.0)


def draw(sprites: Tensor, paths: Tensor) -> Tensor:
    """Draw sprites along paths with subpixel precision.

    Args:
        sprites: `(n, 40, 40)` in [0, 1].
        paths: `(n, frames, 2)` glyph corners in pixels.

    Returns:
        `(n, frames, 64, 64)` grey frames in [0, 1].
    """
    rows, columns = _placement(paths[..., 0]), _placement(paths[..., 1])
    return rows @ sprites[:, None] @ columns.transpose(-1, -2)


def draw_clips(glyphs: Glyphs, count: int, frames: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw random clips: grey `(count, frames, 64, 64)` in [0, 1] and their `(count,)` digits."""
    picks = torch.randint(len(glyphs.digits), (count,), generator=generator)
    grey = draw(glyphs.sprites[picks], random_paths(count, frames, generator))
    return grey, glyphs.digits[picks]


def to_pixels(grey: Tensor) -> Tensor:
    """Turn `(n, f, h, w)` grey in [0, 1] into ImageNet-normalised `(n, 3, f, h, w)`."""
    mean = torch.tensor(PIXEL_MEAN).view(1, 3, 1, 1, 1)
    std = torch.tensor(PIXEL_STD).view(1, 3, 1, 1, 1)
    return (grey[:, None] - mean) / std


def to_grey(pixels: Tensor) -> Tensor:
    """Undo `to_pixels`, clamp to [0, 1] and average the channels."""
    mean = torch.tensor(PIXEL_MEAN).view(1, 3, 1, 1, 1)
    std = torch.tensor(PIXEL_STD).view(1, 3, 1, 1, 1)
    return (pixels.float() * std + mean).clamp(0.0, 1.0).mean(dim=1)


def tone_hz(digit: int) -> float:
    """The digit's pitch: 320 Hz for zero, 40 Hz more for each next digit, 680 Hz for nine."""
    return float(TONE_STEP_HZ * (LOWEST_TONE_STEPS + digit))


def tones(digits: Tensor, hops: int) -> Tensor:
    """Pure tones `(n, 1, hops * 800)` of amplitude 0.25, every hop starting at phase zero."""
    seconds = torch.arange(hops * HOP_SAMPLES, dtype=torch.float64) / SAMPLE_RATE_HZ
    pitch = TONE_STEP_HZ * (LOWEST_TONE_STEPS + digits.double())
    wave = torch.sin(2 * math.pi * pitch[:, None] * seconds)
    return (TONE_AMPLITUDE * wave).float()[:, None]


def prompts() -> list[str]:
    """Every prompt of the training set, words before numerals, template by template."""
    return [template.format(name) for template in TEMPLATES for name in (*WORDS, *NUMERALS)]
