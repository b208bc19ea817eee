"""Running a batch through the transformer for training.

The stock forward shares its timesteps over the batch, because serving packs one request per
sequence. Training wants one timestep per sample, so `forward` drives the same modules itself, and
`check_equals_stock` shows that both agree where they overlap (batch of one). Rows are in the stock
order `[text | audio | video]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep
from torch import Tensor
from torch.nn.functional import silu

VIDEO_TAG, TEXT_TAG, AUDIO_TAG = 0, 1, 2
LATENT_FRAMES = 37
LATENT_SIZE = 4
AUDIO_LATENTS = 207  # Per stereo channel: round(124 / 24 * 40).
AUDIO_ROWS = 2 * AUDIO_LATENTS
ROWS_PER_FRAME = 4
PATCH = (1, 2, 2)


@dataclass(frozen=True)
class Layout:
    """Which rows of a clip are in the sequence, and where they sit.

    Attributes:
        text_rows: Number of prompt tokens.
        audio: `(n,)` indices of the audio rows out of 414 (left channel, then right).
        frames: The latent frames present, as a slice of 37.
        position_ids: `(text + audio + video rows, 3)` rotary coordinates, as the stock layout's.
    """

    text_rows: int
    audio: Tensor
    frames: slice
    position_ids: Tensor

    @property
    def audio_rows(self) -> int:
        """Number of audio rows."""
        return len(self.audio)


def full_positions(text_rows: int) -> Tensor:
    """Rotary coordinates of a whole 124-frame clip, straight from the stock layout step."""
    tags = torch.full((text_rows,), TEXT_TAG)
    return MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        tags, LATENT_FRAMES, LATENT_SIZE, LATENT_SIZE, AUDIO_LATENTS, PATCH, 2, AUDIO_TAG, VIDEO_TAG
    )[0]


def make_layout(text_rows: int, audio: Tensor, frames: slice = slice(0, LATENT_FRAMES)) -> Layout:
    """Keep some audio rows and a run of latent frames of the full clip, at their true places."""
    positions = full_positions(text_rows)
    video_start = text_rows + AUDIO_ROWS
    video = positions[video_start:].view(LATENT_FRAMES, ROWS_PER_FRAME, 3)[frames]
    kept = [positions[:text_rows], positions[text_rows + audio], video.flatten(0, 1)]
    return Layout(text_rows, audio, frames, torch.cat(kept))


def patchify(latents: Tensor) -> Tensor:
    """`(b, c, f, 4, 4)` latents to `(b, f * 4, c * 4)` rows, frame-major as in the pipeline."""
    b, c, f, h, w = latents.shape
    rows = latents.view(b, c, f, h // 2, 2, w // 2, 2).permute(0, 2, 3, 5, 1, 4, 6)
    return rows.reshape(b, f * (h // 2) * (w // 2), c * 4)


def attention(block: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The block's self-attention with the softmax written out.

    On a CPU the fused kernel's backward is the slowest part of a step.
    """
    attn = block.attn
    q, k, v = (projection(x).unflatten(-1, (attn.heads, -1)) for projection in (attn.to_q, attn.to_k, attn.to_v))
    q, k = rotate(attn.norm_q(q), cos, sin), rotate(attn.norm_k(k), cos, sin)
    q, k, v = (rows.transpose(1, 2) for rows in (q / math.sqrt(attn.head_dim), k, v))
    weights = torch.softmax(q @ k.transpose(-1, -2), dim=-1)
    return attn.to_out[0]((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading channels of `(b, s, heads, d)` by `(s, rotated)` angles, half by half."""
    rotated = cos.shape[-1]
    head, rest = x[..., :rotated], x[..., rotated:]
    first, second = head.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    head = head * cos[:, None].to(x.dtype) + turned * sin[:, None].to(x.dtype)
    return torch.cat([head, rest], dim=-1)


def spread(text: Tensor, audio: Tensor, video: Tensor, rows: tuple[int, int, int]) -> Tensor:
    """Repeat one `(b, c)` vector per modality over its rows: `(b, text + audio + video, c)`."""
    parts = zip((text, audio, video), rows, strict=True)
    return torch.cat([vector[:, None].expand(-1, count, -1) for vector, count in parts], dim=1)


def block_forward(
    block: Any,
    x: Tensor,
    *,
    temb: Tensor,
    rows: tuple[int, int, int],
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """One transformer block with per-sample modulation.

    Args:
        block: A stock `MiniMaxH3TransformerBlock`.
        x: `(b, s, 160)`.
        temb: `(2, b, 32)`, activated: the video's and the audio's timestep embedding.
        rows: How many text, audio and video rows.
        cos: Of the rotary embedding, `(s, rotated)`.
        sin: The same.
    """
    table = block.adaln_proj.linear(temb).unflatten(-1, (3, 6, -1))
    text, audio, video = table[0, :, TEXT_TAG], table[1, :, AUDIO_TAG], table[0, :, VIDEO_TAG]
    shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = (
        spread(text[:, i], audio[:, i], video[:, i], rows) for i in range(6)
    )
    # The residual stream stays float32; what enters a matrix product is cast once, not per product.
    h = block.norm1(x).to(shift_a.dtype) * (1 + scale_a) + shift_a
    x = x + gate_a * attention(block, h, cos, sin)
    h = block.norm2(x).to(shift_f.dtype) * (1 + scale_f) + shift_f
    return x + gate_f * block.ff(h)


def forward(
    model: MiniMaxH3Transformer3DModel,
    video: Tensor,
    audio: Tensor,
    text: Tensor,
    timesteps: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor]:
    """Predict both velocities, every sample at its own timestep.

    Args:
        model: The transformer.
        video: `(b, video rows, 64)` noisy patches.
        audio: `(b, audio rows, 8)` noisy audio latents.
        text: `(b, text rows, 32)` conditioning.
        timesteps: `(2, b)`: the video's and the audio's t in [0, 1], 1 being clean.
        layout: The rows present.

    Returns:
        `(b, video rows, 64)` and `(b, audio rows, 8)` velocities towards the data.
    """
    cos, sin = model.rope(layout.position_ids)
    refined = model.token_refiner(model.context_embedder(text))
    x = torch.cat([refined, model.audio_proj_in(audio), model.proj_in(video)], dim=1).float()
    rows = (layout.text_rows, layout.audio_rows, video.shape[1])
    temb = silu(model.time_embedder(model.time_proj(timesteps.flatten())).unflatten(0, (2, -1)))
    for block in model.transformer_blocks:
        x = block_forward(block, x, temb=temb, rows=rows, cos=cos, sin=sin)
    shift, scale = model.norm_out.linear(temb).chunk(2, dim=-1)
    x = model.norm_out.norm(x)
    x = x * (1 + spread(scale[0], scale[1], scale[0], rows))
    x = x + spread(shift[0], shift[1], shift[0], rows)
    media = x[:, layout.text_rows :]
    heard, seen = media[:, : layout.audio_rows], media[:, layout.audio_rows :]
    return model.proj_out(seen), model.audio_proj_out(heard)


@torch.no_grad()
def check_equals_stock(model: MiniMaxH3Transformer3DModel, tolerance: float = 1e-5) -> float:
    """Compare `forward` with the stock forward at a batch of one, in float32, on random input.

    Returns:
        The largest absolute difference over both outputs.

    Raises:
        AssertionError: If it exceeds `tolerance`.
    """
    generator = torch.Generator().manual_seed(0)
    layout = make_layout(3, torch.arange(0, AUDIO_ROWS, 26))
    video = torch.randn(1, LATENT_FRAMES * ROWS_PER_FRAME, 64, generator=generator)
    audio = torch.randn(1, layout.audio_rows, 8, generator=generator)
    text = torch.randn(1, 3, 32, generator=generator)
    ours = forward(model, video, audio, text, torch.tensor([[0.3], [0.7]]), layout)
    stock = stock_forward(model, video, audio, text, (0.3, 0.7), layout)
    pairs = zip(ours, stock, strict=True)
    difference = max(float((mine - theirs).abs().max()) for mine, theirs in pairs)
    assert difference <= tolerance, f"the training forward differs from stock by {difference}"
    return difference


def stock_forward(
    model: MiniMaxH3Transformer3DModel,
    video: Tensor,
    audio: Tensor,
    text: Tensor,
    timesteps: tuple[float, float],
    layout: Layout,
) -> tuple[Tensor, Tensor]:
    """Run the same rows through the stock forward; all samples share the two timesteps."""
    counts = torch.tensor([layout.text_rows, layout.audio_rows, video.shape[1]])
    starts = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]).tolist()
    return model(
        hidden_states=video,
        audio_hidden_states=audio,
        encoder_hidden_states=text,
        timestep=torch.tensor(timesteps),
        timestep_indices=torch.repeat_interleave(torch.tensor([0, 1, 0]), counts),
        token_tags=torch.repeat_interleave(torch.tensor([TEXT_TAG, AUDIO_TAG, VIDEO_TAG]), counts),
        position_ids=layout.position_ids,
        text_indices=torch.arange(starts[0], starts[1]),
        audio_indices=torch.arange(starts[1], starts[2]),
        video_indices=torch.arange(starts[2], starts[3]),
        return_dict=False,
    )
