"""MiniMax-H3's block and output norm, with norm and modulation as one operation."""

from typing import Any

import torch
from diffusers.models.modeling_utils import get_parameter_dtype
from sojourn.inference.quality.fusions.norm_modulate import NORM_MODULATE


def block(
    module: Any,
    hidden_states: torch.Tensor,
    temb: torch.Tensor,
    adaln_indices: torch.Tensor,
    rotary_emb: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """`MiniMaxH3TransformerBlock.forward`: two sites, before attention and before the feed-forward."""
    shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = module.adaln_proj(temb)

    residual = hidden_states
    norm_hidden_states = NORM_MODULATE(hidden_states, module.norm1, shift_msa, scale_msa, adaln_indices)
    attn_output = module.attn(norm_hidden_states, rotary_emb, attention_mask)
    hidden_states = residual + gate_msa.index_select(0, adaln_indices) * attn_output

    residual = hidden_states
    norm_hidden_states = NORM_MODULATE(hidden_states, module.norm2, shift_mlp, scale_mlp, adaln_indices)
    ff_output = module.ff(norm_hidden_states)
    return residual + gate_mlp.index_select(0, adaln_indices) * ff_output


def norm_out(
    module: Any, hidden_states: torch.Tensor, temb: torch.Tensor, timestep_indices: torch.Tensor
) -> torch.Tensor:
    """`MiniMaxH3AdaLayerNormOut.forward`: one site."""
    activated = torch.nn.functional.silu(temb).to(get_parameter_dtype(module.linear))
    shift, scale = module.linear(activated).chunk(2, dim=-1)
    return NORM_MODULATE(hidden_states, module.norm, shift, scale, timestep_indices)
