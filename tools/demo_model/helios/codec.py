"""Training the video VAE on the beginnings of chunks.

The VAE is causal and each chunk is coded on its own, so the first frames of a chunk are coded alike whatever follows:
13 frames, which are 4 latent frames, teach what 33 would.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from torch import Tensor

from tools.demo_model import data
from tools.demo_model.helios import chunks
from tools.demo_model.progress import Progress
from tools.demo_model.run import Snapshots
from tools.demo_model.schedule import cosine_with_warmup
from tools.demo_model.vae import reconstruction_loss

TRAIN_FRAMES = 13
BATCH, LR, DECODER_LR = 8, 3e-3, 2e-3
WARMUP_STEPS = 100
GRADIENT_CLIP = 1.0
KL_WEIGHT = 2e-4


def to_pixels(grey: Tensor) -> Tensor:
    """`(n, f, h, w)` grey in [0, 1] to the stock video's `(n, 3, f, h, w)` in [-1, 1]."""
    return (grey * 2 - 1)[:, None].expand(-1, 3, -1, -1, -1)


def to_grey(pixels: Tensor) -> Tensor:
    """Undo `to_pixels`, averaging the channels."""
    return ((pixels.float() + 1) / 2).clamp(0.0, 1.0).mean(dim=1)


def train(
    vae: AutoencoderKLWan,
    steps: int,
    generator: torch.Generator,
    progress: Progress,
    snapshots: Snapshots,
    *,
    freeze_encoder: bool = False,
) -> None:
    """Train from the last snapshot on: encoder and decoder, or the decoder alone, which leaves the latents alone."""
    glyphs, _ = data.load_glyphs()
    for part in (vae.encoder, vae.quant_conv):
        part.requires_grad_(not freeze_encoder)
    optimizer = torch.optim.AdamW(
        (p for p in vae.parameters() if p.requires_grad), lr=DECODER_LR if freeze_encoder else LR
    )
    schedule = cosine_with_warmup(optimizer, steps, WARMUP_STEPS)
    first = 0
    if (kept := snapshots.load()) is not None:
        vae.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        schedule.load_state_dict(kept["schedule"])
        generator.set_state(kept["generator"])
        first = progress.resumed_at = kept["step"]
    for step in range(first, steps):
        grey, _ = data.draw_clips(glyphs, BATCH, TRAIN_FRAMES, generator)
        loss = _loss(vae, to_pixels(grey), generator)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), GRADIENT_CLIP)
        optimizer.step()
        schedule.step()
        progress.tick(step, steps, loss=float(loss.detach()))
        snapshots.keep(
            lambda done=step + 1: {
                "model": vae.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "generator": generator.get_state(),
                "step": done,
            }
        )


def _loss(vae: AutoencoderKLWan, pixels: Tensor, generator: torch.Generator) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        posterior = vae.encode(pixels).latent_dist
    mean, logvar = posterior.mean.float(), posterior.logvar.float()
    latents = mean + (0.5 * logvar).exp() * torch.randn(mean.shape, generator=generator)
    kl = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()
    with torch.autocast("cpu", torch.bfloat16):
        output = decode_unclamped(vae, latents)
    return reconstruction_loss(output, pixels) + KL_WEIGHT * kl


def decode_unclamped(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """The stock decode but for its last step, which clamps to [-1, 1].

    Most of a clip is black, and a codec that has gone below black everywhere gets no gradient through the clamp.
    """
    vae.clear_cache()
    x = vae.post_quant_conv(latents)
    frames = []
    for index, frame in enumerate(x.split(1, dim=2)):
        vae._conv_idx = [0]
        first = {"first_chunk": True} if index == 0 else {}
        frames.append(vae.decoder(frame, feat_cache=vae._feat_map, feat_idx=vae._conv_idx, **first))
    vae.clear_cache()
    return unpatchify(torch.cat(frames, dim=2), patch_size=vae.config.patch_size)


@torch.no_grad()
def psnr_db(vae: AutoencoderKLWan, clips: int, seed: int) -> Tensor:
    """Peak signal-to-noise of the stock encode and decode of whole chunks of held-out glyphs.

    Returns:
        `(clips,)` in dB, on grey pixels in [0, 1].
    """
    _, held_out = data.load_glyphs()
    generator = torch.Generator().manual_seed(seed)
    grey, _ = data.draw_clips(held_out, clips, chunks.FRAMES, generator)
    errors = []
    for clip in grey.split(1):
        latents = vae.encode(to_pixels(clip)).latent_dist.mode()
        errors.append((to_grey(vae.decode(latents).sample) - clip).square().mean())
    return -10.0 * torch.stack(errors).log10()
