"""The transformer's stages, each handing its averaged weights to the next.

All stages learn the data-ward velocity `v = x0 - noise` of `x_t = t x0 + (1 - t) noise`:

- S0: whole clips, 16 of 414 audio rows. Coherent moving blobs.
- S1a: windows of 4 latent frames in big batches, more of them at low noise. Identity begins here.
- S1b: whole clips again.
- S2: guidance distillation against the frozen S1 model, as the released model is distilled.
- S3: all 414 audio rows, held to the S2 model's video velocity with 16, because a softmax trained
  over 16 audio rows is diluted by 414.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Transformer3DModel
from torch import Tensor, nn

from tools.demo_model import data, dit
from tools.demo_model.components import AUDIO_SHIFT, VIDEO_SHIFT
from tools.demo_model.latents import Pool
from tools.demo_model.progress import Progress
from tools.demo_model.schedule import cosine_with_warmup

WARMUP_STEPS = 50
LR_FLOOR = 0.2  # Of the stage's peak, at its end.
GRADIENT_CLIP = 1.0
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01
EMA_DECAY = 0.99  # About the last hundred steps.
FAVOURITE_TEMPLATE_SHARE = 0.5
AUDIO_TIMES = 8  # Audio rows per channel in the cheap layouts.
AUDIO_WEIGHT = 0.1
WINDOW_FRAMES = 4
GUIDANCE = 1.5
ROW_ADAPTION_AUDIO_WEIGHT = 0.05


@dataclass(frozen=True)
class Stage:
    """One stage's hyper-parameters.

    Attributes:
        name: Of its checkpoint and its log lines.
        kind: `velocity` (plain flow matching), `guidance` (S2) or `rows` (S3).
        steps: Optimiser steps at scale 1.
        batch: Clips per step.
        lr: Peak learning rate.
        windowed: Train on `WINDOW_FRAMES` latent frames at a random place instead of all 37.
        low_noise_share: Share of the batch whose video noise is drawn at shift 3 instead of 12.
    """

    name: str
    kind: str
    steps: int
    batch: int
    lr: float
    windowed: bool = False
    low_noise_share: float = 0.0


STAGES = (
    Stage("s0", "velocity", 650, 32, 2e-3),
    Stage("s1a", "velocity", 1030, 128, 1.6e-3, windowed=True, low_noise_share=0.6),
    Stage("s1b", "velocity", 750, 32, 1.6e-3, low_noise_share=0.3),
    Stage("s2", "guidance", 560, 32, 1.2e-3, low_noise_share=0.3),
    Stage("s3", "rows", 256, 12, 8e-4),
)


@dataclass(frozen=True)
class Conditioning:
    """What a digit sounds like and how it is asked for.

    Attributes:
        codes: `(10, 8)` audio latents.
        prompts: Per template `(2, 10, tokens, 32)`: words and numerals, by digit.
    """

    codes: Tensor
    prompts: tuple[Tensor, ...]


@dataclass(frozen=True)
class Batch:
    """One noisy batch, in rows.

    Attributes:
        digits: `(b,)`.
        template: Index into the prompts, shared by the batch so that it has one length.
        numerals: `(b,)` 0 for the word, 1 for the numeral.
        timesteps: `(2, b)`, video then audio.
        video, audio: Noisy rows.
        video_velocity, audio_velocity: What to predict.
        layout: The rows present.
    """

    digits: Tensor
    template: int
    numerals: Tensor
    timesteps: Tensor
    video: Tensor
    audio: Tensor
    video_velocity: Tensor
    audio_velocity: Tensor
    layout: dit.Layout


def shifted(u: Tensor, shift: float) -> Tensor:
    """The scheduler's noise level of a uniform position `u` in [0, 1]."""
    return shift * u / (1 + (shift - 1) * u)


def unshifted(sigma: Tensor, shift: float) -> Tensor:
    """The inverse of `shifted`."""
    return sigma / (shift - (shift - 1) * sigma)


def draw_sigmas(count: int, low_noise_share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw video and audio noise levels that occur together while sampling.

    A share of the videos is drawn at the audio's gentler shift; their audio level is then the one
    that the sampler has when its video is at that level.
    """
    u = torch.rand(count, generator=generator)
    low = torch.rand(count, generator=generator) < low_noise_share
    sigma = torch.where(low, shifted(u, AUDIO_SHIFT), shifted(u, VIDEO_SHIFT))
    return sigma, shifted(unshifted(sigma, VIDEO_SHIFT), AUDIO_SHIFT)


def draw_template(generator: torch.Generator) -> int:
    """The first template half of the time, any other else."""
    if float(torch.rand(1, generator=generator)) < FAVOURITE_TEMPLATE_SHARE:
        return 0
    return int(torch.randint(1, len(data.TEMPLATES), (1,), generator=generator))


def draw_audio_rows(generator: torch.Generator) -> Tensor:
    """Eight random times, in both channels: `(16,)` indices out of 414, in order."""
    times = torch.randperm(dit.AUDIO_LATENTS, generator=generator)[:AUDIO_TIMES].sort().values
    return torch.cat([times, times + dit.AUDIO_LATENTS])


def draw_frames(stage: Stage, generator: torch.Generator) -> slice:
    """All latent frames, or a window of them."""
    if not stage.windowed:
        return slice(0, dit.LATENT_FRAMES)
    last = dit.LATENT_FRAMES - WINDOW_FRAMES
    start = int(torch.randint(0, last + 1, (1,), generator=generator))
    return slice(start, start + WINDOW_FRAMES)


def draw_batch(stage: Stage, pool: Pool, conditioning: Conditioning, generator: torch.Generator) -> Batch:
    """Draw clips, noise levels, prompts and the rows that are present."""
    picks = torch.randint(len(pool.digits), (stage.batch,), generator=generator)
    digits = pool.digits[picks]
    frames = draw_frames(stage, generator)
    template = draw_template(generator)
    rows = torch.arange(dit.AUDIO_ROWS) if stage.kind == "rows" else draw_audio_rows(generator)
    layout = dit.make_layout(conditioning.prompts[template].shape[2], rows, frames)
    clean_video = dit.patchify(pool.latents[picks, :, frames].float())
    clean_audio = conditioning.codes[digits][:, None].expand(-1, len(rows), -1)
    sigma_video, sigma_audio = draw_sigmas(stage.batch, stage.low_noise_share, generator)
    video, video_velocity = add_noise(clean_video, sigma_video, generator)
    audio, audio_velocity = add_noise(clean_audio, sigma_audio, generator)
    return Batch(
        digits=digits,
        template=template,
        numerals=torch.randint(2, (stage.batch,), generator=generator),
        timesteps=1.0 - torch.stack([sigma_video, sigma_audio]),
        video=video,
        audio=audio,
        video_velocity=video_velocity,
        audio_velocity=audio_velocity,
        layout=layout,
    )


def add_noise(clean: Tensor, sigma: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mix `(b, rows, c)` data with noise; return the mixture and its data-ward velocity."""
    noise = torch.randn(clean.shape, generator=generator)
    level = sigma[:, None, None]
    return (1 - level) * clean + level * noise, clean - noise


class Trainer:
    """One stage in progress: the model, its optimiser and its running average."""

    def __init__(
        self,
        model: MiniMaxH3Transformer3DModel,
        stage: Stage,
        steps: int,
        conditioning: Conditioning,
    ) -> None:
        self.model = model
        self.average = copy.deepcopy(model).requires_grad_(False)
        self.teacher = copy.deepcopy(model).requires_grad_(False)
        self.stage = stage
        self.conditioning = conditioning
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=stage.lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
        self.schedule = cosine_with_warmup(self.optimizer, steps, WARMUP_STEPS, LR_FLOOR)

    def step(self, number: int, batch: Batch, generator: torch.Generator) -> dict[str, float]:
        """Take one optimiser step; return the losses by name."""
        video_loss, audio_loss, audio_weight = self._losses(batch, generator)
        self.optimizer.zero_grad(set_to_none=True)
        (video_loss + audio_weight * audio_loss).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_CLIP)
        self.optimizer.step()
        self.schedule.step()
        self._update_average(number)
        return {"video": float(video_loss.detach()), "audio": float(audio_loss.detach())}

    def _losses(self, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor, float]:
        if self.stage.kind == "rows":
            target, weight = self._fewer_rows_velocity(batch, generator), ROW_ADAPTION_AUDIO_WEIGHT
        elif self.stage.kind == "guidance":
            target, weight = self._guided_velocity(batch, generator), AUDIO_WEIGHT
        else:
            target, weight = batch.video_velocity, AUDIO_WEIGHT
        video, audio = self._predict(self.model, batch, batch.digits)
        video_loss = (video - target).square().mean()
        return video_loss, (audio - batch.audio_velocity).square().mean(), weight

    def _predict(self, model: MiniMaxH3Transformer3DModel, batch: Batch, digits: Tensor) -> tuple[Tensor, Tensor]:
        text = self.conditioning.prompts[batch.template][batch.numerals, digits]
        with torch.autocast("cpu", torch.bfloat16):
            video, audio = dit.forward(model, batch.video, batch.audio, text, batch.timesteps, batch.layout)
        return video.float(), audio.float()

    @torch.no_grad()
    def _guided_velocity(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Push the true velocity away from what the teacher would do for another digit."""
        offset = torch.randint(1, 10, batch.digits.shape, generator=generator)
        right, _ = self._predict(self.teacher, batch, batch.digits)
        wrong, _ = self._predict(self.teacher, batch, (batch.digits + offset) % 10)
        return batch.video_velocity + GUIDANCE * (right - wrong)

    @torch.no_grad()
    def _fewer_rows_velocity(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """The teacher's video velocity when it sees 16 of the batch's 414 audio rows."""
        rows = draw_audio_rows(generator)
        layout = dit.make_layout(batch.layout.text_rows, rows, batch.layout.frames)
        fewer = replace(batch, layout=layout, audio=batch.audio[:, rows])
        return self._predict(self.teacher, fewer, batch.digits)[0]

    @torch.no_grad()
    def _update_average(self, number: int) -> None:
        """Follow the weights, quickly at first so that the stage's start is soon forgotten."""
        decay = min(EMA_DECAY, (1 + number) / (10 + number))
        mine: list[Tensor] = [*self.average.parameters()]
        theirs: list[Tensor] = [*self.model.parameters()]
        torch._foreach_lerp_(mine, theirs, 1.0 - decay)


def run_stage(
    model: MiniMaxH3Transformer3DModel,
    stage: Stage,
    *,
    steps: int,
    pool: Pool,
    conditioning: Conditioning,
    generator: torch.Generator,
    progress: Progress,
) -> MiniMaxH3Transformer3DModel:
    """Train one stage, changing `model`, and return its running average for the next stage."""
    trainer = Trainer(model, stage, steps, conditioning)
    for number in range(steps):
        batch = draw_batch(stage, pool, conditioning, generator)
        progress.tick(number, steps, **trainer.step(number, batch, generator))
    return trainer.average.requires_grad_(True)
