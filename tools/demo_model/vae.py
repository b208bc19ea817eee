"""Training the video VAE on short clips, chunked exactly as the stock encode and decode chunk.

22 frames (17 + 5) is the shortest clip with an overlap. The encoder is causal, so encoding 17 and
then 5 frames gives the same 5 + 2 latent frames as the stock encode, without the 12 frames of
padding that it would throw away. The decoder then turns 7 latent frames into 28 pixel frames, of
which 3 at the start of each chunk are padding.
"""

from __future__ import annotations

import torch
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3 import AutoencoderKLMiniMaxH3
from torch import Tensor

from tools.demo_model import data
from tools.demo_model.progress import Progress
from tools.demo_model.schedule import cosine_with_warmup

TRAIN_FRAMES = 22
CHUNK_FRAMES = 17
DECODED = (slice(3, 20), slice(23, 28))  # The frames of the decoded 28 that are shown.

JOINT_BATCH, JOINT_LR = 8, 2.5e-3
DECODER_BATCH, DECODER_LR = 16, 1.2e-3
WARMUP_STEPS = 100
GRADIENT_CLIP = 1.0
L1_WEIGHT = 0.1
KL_WEIGHT = 1e-3


def encode_moments(vae: AutoencoderKLMiniMaxH3, pixels: Tensor) -> Tensor:
    """`(b, 3, 17 * n + 5, h, w)` pixels to `(b, 32, 5 * n + 2, h / 16, w / 16)` moments.

    Equal to the stock encode's, chunk by chunk, without its padding.
    """
    b, frames = pixels.shape[0], pixels.shape[2]
    whole = frames // CHUNK_FRAMES
    chunks = pixels[:, :, : whole * CHUNK_FRAMES].unflatten(2, (whole, CHUNK_FRAMES))
    chunks = chunks.transpose(1, 2).flatten(0, 1)
    head = vae.quant_conv(vae.encoder(chunks)).unflatten(0, (b, whole))
    head = head.transpose(1, 2).flatten(2, 3)
    tail = vae.quant_conv(vae.encoder(pixels[:, :, whole * CHUNK_FRAMES :]))
    return torch.cat([head, tail], dim=2)


def decode_train_clip(vae: AutoencoderKLMiniMaxH3, latents: Tensor) -> Tensor:
    """`(b, 16, 7, 4, 4)` latents to the 22 frames they stand for."""
    frames = vae.decoder(vae.post_quant_conv(latents))
    return torch.cat([frames[:, :, shown] for shown in DECODED], dim=2)


def sample_posterior(moments: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw latents and return them with the mean KL divergence from a unit Gaussian, per value."""
    mean, logvar = moments.float().chunk(2, dim=1)
    logvar = logvar.clamp(-30.0, 20.0)
    noise = torch.randn(mean.shape, generator=generator)
    kl = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()
    return mean + (0.5 * logvar).exp() * noise, kl


def reconstruction_loss(output: Tensor, target: Tensor) -> Tensor:
    """MSE with a little L1, in normalised pixels."""
    error = output.float() - target
    return error.square().mean() + L1_WEIGHT * error.abs().mean()


def train_jointly(vae: AutoencoderKLMiniMaxH3, steps: int, generator: torch.Generator, progress: Progress) -> None:
    """Train encoder and decoder together."""
    _train(vae, steps, generator, progress, batch=JOINT_BATCH, lr=JOINT_LR, freeze_encoder=False)


def train_decoder(vae: AutoencoderKLMiniMaxH3, steps: int, generator: torch.Generator, progress: Progress) -> None:
    """Polish the decoder on bigger batches while the encoder, and so the latents, stay put."""
    _train(vae, steps, generator, progress, batch=DECODER_BATCH, lr=DECODER_LR, freeze_encoder=True)


def _train(
    vae: AutoencoderKLMiniMaxH3,
    steps: int,
    generator: torch.Generator,
    progress: Progress,
    *,
    batch: int,
    lr: float,
    freeze_encoder: bool,
) -> None:
    glyphs, _ = data.load_glyphs()
    trained = [*vae.decoder.parameters(), *vae.post_quant_conv.parameters()]
    if not freeze_encoder:
        trained += [*vae.encoder.parameters(), *vae.quant_conv.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    schedule = cosine_with_warmup(optimizer, steps, WARMUP_STEPS)
    for step in range(steps):
        grey, _ = data.draw_clips(glyphs, batch, TRAIN_FRAMES, generator)
        pixels = data.to_pixels(grey)
        with torch.set_grad_enabled(not freeze_encoder), _autocast():
            moments = encode_moments(vae, pixels)
        latents, kl = sample_posterior(moments, generator)
        with _autocast():
            output = decode_train_clip(vae, latents)
        loss = reconstruction_loss(output, pixels) + KL_WEIGHT * kl
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, GRADIENT_CLIP)
        optimizer.step()
        schedule.step()
        progress.tick(step, steps, loss=float(loss.detach()))


def _autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@torch.no_grad()
def psnr_db(vae: AutoencoderKLMiniMaxH3, clips: int, seed: int) -> Tensor:
    """Peak signal-to-noise of the stock encode and decode on held-out clips of 124 frames.

    Returns:
        `(clips,)` in dB, on grey pixels in [0, 1].
    """
    _, held_out = data.load_glyphs()
    generator = torch.Generator().manual_seed(seed)
    grey, _ = data.draw_clips(held_out, clips, data.CLIP_FRAMES, generator)
    errors = []
    for clip in grey.split(1):
        latents = vae.encode(data.to_pixels(clip)).latent_dist.mode()
        shown = data.to_grey(vae.decode(latents).sample)
        errors.append((shown - clip).square().mean())
    return -10.0 * torch.stack(errors).log10()
