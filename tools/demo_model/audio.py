"""Training the audio VAE: ten pure tones, one fixed latent each.

A tone is a whole number of periods per hop, so its latent is constant in time. The ten latents are
fixed random codes; the encoder learns to regress them and the decoder to sound them.
"""

from __future__ import annotations

import torch
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3_audio import (
    AutoencoderKLMiniMaxH3Audio,
)
from torch import Tensor

from tools.demo_model import data
from tools.demo_model.components import AUDIO_CHANNELS
from tools.demo_model.progress import Progress
from tools.demo_model.schedule import cosine_with_warmup

BATCH = 10
HOPS = 8
LR = 2e-3
WARMUP_STEPS = 30
GRADIENT_CLIP = 1.0
# The sampler's latents are never exact, so the decoder hears the codes with this much noise.
CODE_NOISE = 0.1
ENCODER_WEIGHT = 0.1


def draw_codes(seed: int) -> Tensor:
    """The ten digits' latents: `(10, 8)` random directions, each value of about unit size."""
    codes = torch.randn(10, AUDIO_CHANNELS, generator=torch.Generator().manual_seed(seed))
    return codes / codes.square().mean(dim=1, keepdim=True).sqrt()


def train(
    vae: AutoencoderKLMiniMaxH3Audio,
    codes: Tensor,
    steps: int,
    generator: torch.Generator,
    progress: Progress,
) -> None:
    """Fit the encoder to the codes and the decoder to the tones, in float32."""
    digits = torch.arange(10).repeat(BATCH // 10)
    wave = data.tones(digits, HOPS)
    target = codes[digits][:, :, None].expand(-1, -1, HOPS)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=LR)
    schedule = cosine_with_warmup(optimizer, steps, WARMUP_STEPS)
    for step in range(steps):
        noise = torch.randn(*target.shape[:2], 1, generator=generator) * CODE_NOISE
        heard = vae.encode(wave).latent_dist.mode()
        sound = vae.decode(target + noise).sample
        sound_loss = (sound - wave).square().mean() / data.TONE_AMPLITUDE**2
        loss = sound_loss + ENCODER_WEIGHT * (heard - target).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), GRADIENT_CLIP)
        optimizer.step()
        schedule.step()
        progress.tick(step, steps, loss=float(loss.detach()), sound=float(sound_loss.detach()))
