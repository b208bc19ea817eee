"""Running a batch through the stock transformer for training.

The stock forward already takes one timestep per sample. What differs are the attentions: the softmax is written out,
because on a CPU the fused kernel's backward is the slowest part of a step, and the hundreds of zeros that the stock
text step appends to a prompt count as a few with a weight. `check_equals_stock` shows that both agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import HeliosTransformer3DModel
from diffusers.models.transformers.transformer_helios import HeliosAttnProcessor, apply_rotary_emb_transposed
from torch import Tensor

from tools.demo_model.helios import chunks
from tools.demo_model.helios.components import TEXT_TOKENS


@dataclass(frozen=True)
class Text:
    """Prompts of a batch.

    Attributes:
        embeddings: `(b, n, 32)`; zeros after each prompt's end.
        log_weights: `(b, 1, 1, n)`: the logarithm of how many of the 512 stock tokens each of them stands for.
    """

    embeddings: Tensor
    log_weights: Tensor


def pack(prompts: list[Tensor]) -> Text:
    """Stack prompts of `(tokens, 32)`; at least one zero stands for the padding of each."""
    n = max(len(prompt) for prompt in prompts) + 1
    embeddings = torch.stack([torch.cat([p, p.new_zeros(n - len(p), p.shape[1])]) for p in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])[:, None]
    is_padding = torch.arange(n) >= lengths
    weights = torch.where(is_padding, (TEXT_TOKENS - lengths) / (n - lengths), torch.ones(()))
    return Text(embeddings, weights.log()[:, None, None])


def pick(text: Text, rows: Tensor) -> Text:
    """The prompts at `rows`."""
    return Text(text.embeddings[rows], text.log_weights[rows])


class _Attention:
    """Self-attention with rotary embeddings, or attention to the text with its weights."""

    _attention_backend = None
    _parallel_config = None

    def __init__(self) -> None:
        self.log_weights: Tensor | None = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Tensor | None = None,
        original_context_length: int | None = None,
    ) -> Tensor:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(source)), attn.to_v(source)
        q, k, v = (rows.unflatten(2, (attn.heads, -1)) for rows in (q, k, v))
        if rotary_emb is not None:
            q, k = apply_rotary_emb_transposed(q, rotary_emb), apply_rotary_emb_transposed(k, rotary_emb)
        q, k, v = (rows.transpose(1, 2) for rows in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if encoder_hidden_states is not None and self.log_weights is not None:
            scores = scores + self.log_weights
        weights = torch.softmax(scores, dim=-1).to(v.dtype)
        return attn.to_out[0]((weights @ v).transpose(1, 2).flatten(2))


def prepare(model: HeliosTransformer3DModel) -> HeliosTransformer3DModel:
    """Give the model the attentions that train quickly, and return it."""
    attention = _Attention()
    for block in model.blocks:
        block.attn1.set_processor(attention)
        block.attn2.set_processor(attention)
    return model


def restore(model: HeliosTransformer3DModel) -> HeliosTransformer3DModel:
    """Give the model the stock attentions, and return it."""
    for block in model.blocks:
        block.attn1.set_processor(HeliosAttnProcessor())
        block.attn2.set_processor(HeliosAttnProcessor())
    return model


def stock_indices() -> dict[str, Tensor]:
    """Positions of history and chunk, as the stock history step numbers them."""
    sizes = [1, *chunks.HISTORY_SIZES, chunks.LATENT_FRAMES]
    first, long, mid, one, now = torch.arange(sum(sizes)).split(sizes)
    return {
        "indices_hidden_states": now[None],
        "indices_latents_history_short": torch.cat([first, one])[None],
        "indices_latents_history_mid": mid[None],
        "indices_latents_history_long": long[None],
    }


def forward(
    model: HeliosTransformer3DModel, latents: Tensor, sigmas: Tensor, text: Text, history: chunks.History
) -> Tensor:
    """Predict the velocity `noise - data` of a prepared model, every sample at its own noise level.

    Args:
        model: The transformer.
        latents: `(b, 16, 9, 4, 4)` noisy.
        sigmas: `(b,)` in [0, 1].
        text: The prompts.
        history: Of each sample.
    """
    model.blocks[0].attn2.processor.log_weights = text.log_weights
    indices = {name: index.expand(len(latents), -1) for name, index in stock_indices().items()}
    return model(
        hidden_states=latents,
        timestep=(sigmas * 1000).long(),
        encoder_hidden_states=text.embeddings,
        latents_history_short=history.short,
        latents_history_mid=history.mid,
        latents_history_long=history.long,
        return_dict=False,
        **indices,
    )[0]


@torch.no_grad()
def check_equals_stock(model: HeliosTransformer3DModel, tolerance: float = 1e-4) -> float:
    """Compare with the stock attentions over all 512 text tokens, in float32, on random input.

    Leaves the model prepared for training.

    Returns:
        The largest absolute difference.

    Raises:
        AssertionError: If it exceeds `tolerance`.
    """
    generator = torch.Generator().manual_seed(0)
    clips = torch.randn(2, 16, chunks.CHUNKS * chunks.LATENT_FRAMES, 4, 4, generator=generator)
    chunk, sigmas = torch.tensor([0, 2]), torch.tensor([0.3, 0.7])
    prompts = [torch.randn(tokens, 32, generator=generator) for tokens in (3, 1)]
    past, now = chunks.history(clips, chunk), chunks.current(clips, chunk)
    ours = forward(prepare(model), now, sigmas, pack(prompts), past)
    padded = torch.stack([torch.cat([p, p.new_zeros(TEXT_TOKENS - len(p), 32)]) for p in prompts])
    stock = restore(model)(
        hidden_states=now,
        timestep=(sigmas * 1000).long(),
        encoder_hidden_states=padded,
        latents_history_short=past.short,
        latents_history_mid=past.mid,
        latents_history_long=past.long,
        return_dict=False,
        **{name: index.expand(2, -1) for name, index in stock_indices().items()},
    )[0]
    prepare(model)
    difference = float((ours - stock).abs().max())
    assert difference <= tolerance, f"the training forward differs from stock by {difference}"
    return difference
