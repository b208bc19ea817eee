"""The transformer's stages, each handing its averaged weights to the next.

All stages learn the velocity `noise - data` of `x = (1 - sigma) data + sigma noise`, which is what the stock scheduler
takes. A chunk sees the true chunks before it, blurred by a little noise, so that it will bear its own mistakes later. A
tenth of the prompts is empty, for classifier-free guidance.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import HeliosTransformer3DModel
from torch import Tensor, nn

from tools.demo_model.helios import chunks, forward
from tools.demo_model.latents import Pool
from tools.demo_model.progress import Progress
from tools.demo_model.run import Snapshots
from tools.demo_model.schedule import cosine_with_warmup
from tools.demo_model.train import shifted

WARMUP_STEPS = 50
LR_FLOOR = 0.1  # Of the stage's peak, at its end.
GRADIENT_CLIP = 1.0
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01
EMA_DECAY = 0.99  # About the last hundred steps.
EMPTY_PROMPT_SHARE = 0.1
FAVOURITE_TEMPLATE_SHARE = 0.5
FIRST_CHUNK_SHARE = 0.4
# Noise levels: the shift that the stock scheduler gives 36 tokens, exp(0.46), and a stronger one for the layout.
STOCK_SHIFT, HIGH_NOISE_SHIFT = 1.6, 5.0
# What a history is blurred by, at most, and how often it is.
HISTORY_SIGMA, BLURRED_SHARE = 0.3, 0.7


@dataclass(frozen=True)
class Stage:
    """One stage's hyper-parameters.

    Attributes:
        name: Of its checkpoint and its log lines.
        steps: Optimiser steps at scale 1.
        batch: Chunks per step.
        lr: Peak learning rate.
        high_noise_share: Share of the batch at the stronger shift.
    """

    name: str
    steps: int
    batch: int
    lr: float
    high_noise_share: float


STAGES = (
    Stage("s0", 600, 64, 2e-3, 0.6),
    Stage("s1", 1200, 64, 1.6e-3, 0.4),
    Stage("s2", 700, 64, 1.0e-3, 0.4),
)


@dataclass(frozen=True)
class Prompts:
    """Every prompt, encoded.

    Attributes:
        text: `(templates * 2 * 10 + 1, ...)`: by template, then words before numerals, then digit; the last is empty.
        templates: How many templates.
    """

    text: forward.Text
    templates: int

    def draw(self, digits: Tensor, generator: torch.Generator) -> forward.Text:
        """A prompt for each digit: the first template half of the time, and now and then none."""
        count = len(digits)
        favourite = torch.rand(count, generator=generator) < FAVOURITE_TEMPLATE_SHARE
        other = torch.randint(1, self.templates, (count,), generator=generator)
        template = torch.where(favourite, 0, other)
        numeral = torch.randint(2, (count,), generator=generator)
        rows = (template * 2 + numeral) * 10 + digits
        empty = torch.rand(count, generator=generator) < EMPTY_PROMPT_SHARE
        return forward.pick(self.text, torch.where(empty, self.templates * 20, rows))


@dataclass(frozen=True)
class Batch:
    """One noisy batch.

    Attributes:
        latents: `(b, 16, 9, 4, 4)` noisy chunks.
        velocity: What to predict of them.
        sigmas: `(b,)` noise levels.
        text: Prompts.
        history: Blurred.
    """

    latents: Tensor
    velocity: Tensor
    sigmas: Tensor
    text: forward.Text
    history: chunks.History


def draw_batch(stage: Stage, pool: Pool, prompts: Prompts, generator: torch.Generator) -> Batch:
    """Draw chunks of clips, noise levels, prompts and blurred histories."""
    picks = torch.randint(len(pool.digits), (stage.batch,), generator=generator)
    clips = pool.latents[picks].float()
    later = torch.randint(1, chunks.CHUNKS, (stage.batch,), generator=generator)
    chunk = torch.where(torch.rand(stage.batch, generator=generator) < FIRST_CHUNK_SHARE, 0, later)
    sigmas = draw_sigmas(stage, generator)
    clean = chunks.current(clips, chunk)
    noise = torch.randn(clean.shape, generator=generator)
    return Batch(
        latents=torch.lerp(clean, noise, sigmas.view(-1, 1, 1, 1, 1)),
        velocity=noise - clean,
        sigmas=sigmas,
        text=prompts.draw(pool.digits[picks], generator),
        history=chunks.history(blurred(clips, generator), chunk),
    )


def draw_sigmas(stage: Stage, generator: torch.Generator) -> Tensor:
    """Noise levels in (0, 1), some of them at the stronger shift."""
    u = torch.rand(stage.batch, generator=generator)
    strong = torch.rand(stage.batch, generator=generator) < stage.high_noise_share
    return torch.where(strong, shifted(u, HIGH_NOISE_SHIFT), shifted(u, STOCK_SHIFT))


def blurred(clips: Tensor, generator: torch.Generator) -> Tensor:
    """Most of the clips `(b, 16, 36, 4, 4)` with a little noise, one level a clip."""
    level = torch.rand(len(clips), generator=generator) * HISTORY_SIGMA
    level = level * (torch.rand(len(clips), generator=generator) < BLURRED_SHARE)
    return torch.lerp(clips, torch.randn(clips.shape, generator=generator), level.view(-1, 1, 1, 1, 1))


class Trainer:
    """One stage in progress: the model, its optimiser and its running average."""

    def __init__(self, model: HeliosTransformer3DModel, stage: Stage, steps: int) -> None:
        self.model = model
        self.average = copy.deepcopy(model).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=stage.lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
        self.schedule = cosine_with_warmup(self.optimizer, steps, WARMUP_STEPS, LR_FLOOR)

    def step(self, number: int, batch: Batch) -> float:
        """Take one optimiser step; return the loss."""
        with torch.autocast("cpu", torch.bfloat16):
            velocity = forward.forward(self.model, batch.latents, batch.sigmas, batch.text, batch.history)
        loss = (velocity.float() - batch.velocity).square().mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_CLIP)
        self.optimizer.step()
        self.schedule.step()
        self._update_average(number)
        return float(loss.detach())

    @torch.no_grad()
    def _update_average(self, number: int) -> None:
        """Follow the weights, quickly at first so that the stage's start is soon forgotten."""
        decay = min(EMA_DECAY, (1 + number) / (10 + number))
        mine: list[Tensor] = [*self.average.parameters()]
        theirs: list[Tensor] = [*self.model.parameters()]
        torch._foreach_lerp_(mine, theirs, 1.0 - decay)

    def state(self) -> dict[str, Any]:
        """All that a snapshot needs."""
        parts = ("model", "average", "optimizer", "schedule")
        return {name: getattr(self, name).state_dict() for name in parts}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a snapshot."""
        for name in ("model", "average", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(state[name])


def run_stage(
    model: HeliosTransformer3DModel,
    stage: Stage,
    *,
    steps: int,
    pool: Pool,
    prompts: Prompts,
    generator: torch.Generator,
    progress: Progress,
    snapshots: Snapshots,
) -> HeliosTransformer3DModel:
    """Train one stage from its last snapshot on, changing `model`; return its running average for the next stage."""
    trainer = Trainer(model, stage, steps)
    first = 0
    if (kept := snapshots.load()) is not None:
        trainer.load(kept)
        generator.set_state(kept["generator"])
        first = progress.resumed_at = kept["step"]
    for number in range(first, steps):
        loss = trainer.step(number, draw_batch(stage, pool, prompts, generator))
        progress.tick(number, steps, loss=loss)
        snapshots.keep(lambda done=number + 1: trainer.state() | {"generator": generator.get_state(), "step": done})
    return trainer.average.requires_grad_(True)
