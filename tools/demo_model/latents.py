"""The pool of encoded clips the transformer learns from, and the codec's latent statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3 import AutoencoderKLMiniMaxH3
from torch import Tensor

from tools.demo_model import data
from tools.demo_model.progress import Progress
from tools.demo_model.vae import encode_moments

# Two clips fit the caches; twenty at once took twice as long per clip on the reference machine.
CLIPS_PER_FORWARD = 2


@dataclass(frozen=True)
class Pool:
    """Normalised latents of whole clips.

    Attributes:
        latents: `(n, 16, latent frames, 4, 4)` bfloat16, zero mean and unit deviation per channel.
        digits: `(n,)` int64.
        mean, std: `(16,)` of the raw latents, which belong into the VAE's config.
    """

    latents: Tensor
    digits: Tensor
    mean: Tensor
    std: Tensor


@torch.no_grad()
def encode_pool(vae: AutoencoderKLMiniMaxH3, clips: int, generator: torch.Generator, progress: Progress) -> Pool:
    """Draw and encode `clips` training clips of 124 frames to posterior means.

    Encoding is in bfloat16, as in the codec's training; that takes 60 % of float32's time.
    """
    glyphs, _ = data.load_glyphs()
    latents, digits = [], []
    batches = max(1, clips // CLIPS_PER_FORWARD)
    for batch in range(batches):
        grey, shown = data.draw_clips(glyphs, CLIPS_PER_FORWARD, data.CLIP_FRAMES, generator)
        with torch.autocast("cpu", torch.bfloat16):
            moments = encode_moments(vae, data.to_pixels(grey))
        latents.append(moments.float().chunk(2, dim=1)[0])
        digits.append(shown)
        progress.tick(batch, batches)
    return normalise(torch.cat(latents), torch.cat(digits))


def normalise(raw: Tensor, digits: Tensor) -> Pool:
    """Whiten raw `(n, 16, latent frames, 4, 4)` latents per channel."""
    mean, std = raw.mean(dim=(0, 2, 3, 4)), raw.std(dim=(0, 2, 3, 4))
    shape = (1, -1, 1, 1, 1)
    return Pool(((raw - mean.view(shape)) / std.view(shape)).bfloat16(), digits, mean, std)
