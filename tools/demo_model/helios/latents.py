"""The pool of encoded clips that the transformer learns from."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan

from tools.demo_model import data
from tools.demo_model.helios.chunks import CHUNKS, CLIP_FRAMES, FRAMES
from tools.demo_model.helios.codec import to_pixels
from tools.demo_model.latents import Pool, normalise
from tools.demo_model.progress import Progress

# One clip's chunks fit the caches.
_CLIPS_PER_FORWARD = 1


@torch.no_grad()
def encode_pool(vae: AutoencoderKLWan, clips: int, generator: torch.Generator, progress: Progress) -> Pool:
    """Draw and encode `clips` training clips of four chunks to posterior means, each chunk as it will be decoded.

    Returns:
        Latents `(clips, 16, 36, 4, 4)`.
    """
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
