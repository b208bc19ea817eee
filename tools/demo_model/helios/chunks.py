"""How a clip falls into chunks, and what a chunk is told of those before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FRAMES = 33
LATENT_FRAMES = 9
LATENT_SIZE = 4
# Long, mid and short history in latent frames, as the stock blocks have them.
HISTORY_SIZES = (16, 2, 1)
CHUNKS = 4
CLIP_FRAMES = CHUNKS * FRAMES


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
