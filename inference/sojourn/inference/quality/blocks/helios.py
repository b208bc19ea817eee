"""Helios' block, with the gated residuals of attention and feed-forward as one operation each."""

from typing import Any

import torch
from sojourn.inference.quality.fusions.gated_residual import GATED_RESIDUAL


def block(
    module: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    rotary_emb: torch.Tensor,
    original_context_length: int | None = None,
) -> torch.Tensor:
    """`HeliosTransformerBlock.forward`: two sites; what attention and feed-forward return is given up to them."""
    shift_msa, scale_msa, gate_msa, c_shift_msa, c_scale_msa, c_gate_msa = _modulation(module, temb)

    normed = (module.norm1(hidden_states.float()) * (1 + scale_msa) + shift_msa).type_as(hidden_states)
    attn_output = module.attn1(normed, None, None, rotary_emb, original_context_length)
    hidden_states = GATED_RESIDUAL(hidden_states, attn_output, gate_msa)

    hidden_states = _cross_attention(module, hidden_states, encoder_hidden_states, original_context_length)

    normed = (module.norm3(hidden_states.float()) * (1 + c_scale_msa) + c_shift_msa).type_as(hidden_states)
    return GATED_RESIDUAL(hidden_states, module.ffn(normed), c_gate_msa)


def _modulation(module: Any, temb: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The six rows of each token, [B, S, D] or, without a history of its own, [B, 1, D]; float32."""
    if temb.ndim == 4:
        rows = (module.scale_shift_table.unsqueeze(0) + temb.float()).chunk(6, dim=2)
        return tuple(row.squeeze(2) for row in rows)
    return tuple((module.scale_shift_table + temb.float()).chunk(6, dim=1))


def _cross_attention(
    module: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, original_context_length: int | None
) -> torch.Tensor:
    """Of all tokens, or with guidance_cross_attn of those of the current chunk alone."""
    history: torch.Tensor | None = None
    if module.guidance_cross_attn:
        length = hidden_states.shape[1] - original_context_length
        history, hidden_states = torch.split(hidden_states, [length, original_context_length], dim=1)
    normed = module.norm2(hidden_states.float()).type_as(hidden_states)
    attended = module.attn2(normed, encoder_hidden_states, None, None, original_context_length)
    hidden_states = hidden_states + attended
    return hidden_states if history is None else torch.cat([history, hidden_states], dim=1)
