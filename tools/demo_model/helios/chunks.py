"""How a clip falls into chunks, and the pool of encoded clips that the transformer learns from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from tools.demo_model import data
from tools.demo_model.progress import Progress

FRAMES = 33
LATENT_FRAMES = 9
LATENT_SIZE = 4
# Long, mid and short history in latent frames, as the stock blocks have them.
HISTORY_SIZES = (16, 2, 1)
CHUNKS = 4
CLIP_FRAMES = CHUNKS * FRAMES

# One clip's chunks fit the caches.
_CLIPS_PER_FORWARD = 1


@dataclass(frozen=True)
class Pool:
    """Normalised latents of whole clips, each chunk encoded on its own as it will be decoded.

    Attributes:
        latents: `(n, 16, 36, 4, 4)` bfloat16, zero mean and unit deviation per channel.
        digits: `(n,)` int64.
        mean, std: `(16,)` of the raw latents, which belong into the VAE's config.
    """

    latents: Tensor
    digits: Tensor
    mean: Tensor
    std: Tensor


@torch.no_grad()
def encode_pool(vae: AutoencoderKLWan, clips: int, generator: torch.Generator, progress: Progress) -> Pool:
    """Draw and encode `clips` training clips of four chunks to posterior means."""
    from tools.demo_model.helios.codec import to_pixels

    glyphs, _ = data.load_glyphs()
    latents, digits = [], []
    for number in range(clips):
        grey, shown = data.draw_clips(glyphs, _CLIPS_PER_FORWARD, CLIP_FRAMES, generator)
        pixels = to_pixels(grey.unflatten(1, (CHUNKS, FRAMES)).flatten(0, 1))
        with torch.autocast("cpu", torch.bfloat16):
            encoded = vae.encode(pixels).latent_dist.mode().float()
        latents.append(encoded.transpose(0, 1).flatten(1, 2)[None].half())
        digits.append(shown)
        progress.tick(number, clips)
    return normalise(torch.cat(latents).float(), torch.cat(digits))


def normalise(raw: Tensor, digits: Tensor) -> Pool:
    """Whiten raw `(n, 16, 36, 4, 4)` latents per channel."""
    mean, std = raw.mean(dim=(0, 2, 3, 4)), raw.std(dim=(0, 2, 3, 4))
    shape = (1, -1, 1, 1, 1)
    return Pool(((raw - mean.view(shape)) / std.view(shape)).bfloat16(), digits, mean, std)


@dataclass(frozen=True)
class History:
    """What a chunk is told of the chunks before it, as the stock history step slices it.

    Attributes:
        short: `(b, 16, 2, 4, 4)`: the clip's first latent frame, then the last one.
        mid: `(b, 16, 2, 4, 4)`.
        long: `(b, 16, 16, 4, 4)`.
    """

    short: Tensor
    mid: Tensor
    long: Tensor


def history(clips: Tensor, chunk: Tensor) -> History:
    """The history of chunk `chunk[i]` of clip `i`; zeros stand for what is not there yet.

    Args:
        clips: `(b, 16, 36, 4, 4)`.
        chunk: `(b,)` int64 in 0..3.
    """
    total = sum(HISTORY_SIZES)
    padded = torch.cat([clips.new_zeros(*clips.shape[:2], total, *clips.shape[3:]), clips], dim=2)
    starts = (chunk * LATENT_FRAMES)[:, None] + torch.arange(total)
    last = take_frames(padded, starts)
    long, mid, one = last.split(HISTORY_SIZES, dim=2)
    first = clips[:, :, :1] * (chunk > 0).view(-1, 1, 1, 1, 1)
    return History(torch.cat([first, one], dim=2), mid, long)


def current(clips: Tensor, chunk: Tensor) -> Tensor:
    """Latent frames `(b, 16, 9, 4, 4)` of chunk `chunk[i]` of clip `i`."""
    return take_frames(clips, (chunk * LATENT_FRAMES)[:, None] + torch.arange(LATENT_FRAMES))


def take_frames(clips: Tensor, frames: Tensor) -> Tensor:
    """Latent frames `frames[i]` of clip `i`: `(b, c, f, h, w)` and `(b, n)` to `(b, c, n, h, w)`."""
    b, c, _, h, w = clips.shape
    return clips.gather(2, frames.view(b, 1, -1, 1, 1).expand(b, c, -1, h, w))
