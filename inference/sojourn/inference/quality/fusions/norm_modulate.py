"""norm(x) · (1 + scale[i]) + shift[i]: the begin of attention and of the feed-forward in a MiniMax-H3 block.

Shapes: x [B, S, D] in the working dtype; norm an RMSNorm over D; shift and scale [R, D], one row for each (timestep,
modality); index [S] int64, the row of each token.

The reference gathers one row of shift and scale for every token, [S, D] each, and rounds to the working dtype after
the norm, its weight, 1 + scale, the product and the sum. Fused, a token is read once and written once, everything in
between is float32 in the reference's order, and 1 + scale is taken once for each of the R rows. (Taking the weight
times 1 + scale once as well saves nothing that can be measured, and gives a whole column one rounding error: in float32
the largest error then came out at up to 1.52 times the reference's, in place of 1.22.)
"""

from typing import Any

import torch
from sojourn.inference.quality.fusions.blocking import row_blocks
from sojourn.inference.quality.fusions.fusion import DTYPES, Fusion
from sojourn.inference.quality.observer import Part
from torch import nn


def reference(
    x: torch.Tensor, norm: nn.RMSNorm, shift: torch.Tensor, scale: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """As the stock block has it."""
    return norm(x) * (1.0 + scale.index_select(0, index)) + shift.index_select(0, index)


def is_eligible(
    x: torch.Tensor, norm: nn.RMSNorm, shift: torch.Tensor, scale: torch.Tensor, index: torch.Tensor
) -> bool:
    """Whether the fused operation may be taken; nothing of the tensors' values is read."""
    width = x.shape[-1] if x.ndim == 3 else 0
    return (
        x.ndim == 3
        and x.dtype in DTYPES
        and norm.weight is not None
        and norm.weight.shape == (width,)
        and norm.weight.dtype == shift.dtype == scale.dtype == x.dtype
        and shift.ndim == 2
        and shift.shape == scale.shape
        and shift.shape[1] == width
        and index.dtype == torch.int64
        and index.shape == (x.shape[1],)
        and x.device == norm.weight.device == shift.device == scale.device == index.device
        and x.is_contiguous()
    )


def epsilon(x: torch.Tensor, norm: nn.RMSNorm) -> float:
    """What the norm adds to the mean of squares."""
    return torch.finfo(x.dtype).eps if norm.eps is None else float(norm.eps)


def on_cpu(
    x: torch.Tensor, norm: nn.RMSNorm, shift: torch.Tensor, scale: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """A few rows at a time through a float32 scratch that stays in the cache."""
    weight, gain, offset = norm.weight.float(), 1.0 + scale.float(), shift.float()
    added, made = epsilon(x, norm), torch.empty_like(x)
    wide, squares = torch.empty(0), torch.empty(0)
    for rows in row_blocks(x.shape[1], x.shape[2]):
        of_rows = _distinct(index[rows])
        factor, term = gain.index_select(0, of_rows), offset.index_select(0, of_rows)
        for held, into in zip(x, made, strict=True):
            block = wide.resize_(held[rows].shape).copy_(held[rows])
            mean = torch.mul(block, block, out=squares.resize_(block.shape)).mean(-1, keepdim=True)
            block.mul_(mean.add_(added).rsqrt_()).mul_(weight)
            into[rows] = torch.addcmul(term, block, factor, out=block)
    return made


def _distinct(index: torch.Tensor) -> torch.Tensor:
    """The one row that all tokens of a block share, as text, video and audio lie in runs; else that of each token."""
    return index[:1] if index.eq(index[:1]).all() else index


def on_cuda(
    x: torch.Tensor, norm: nn.RMSNorm, shift: torch.Tensor, scale: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """One Triton kernel."""
    from sojourn.inference.quality.fusions import norm_modulate_triton

    return norm_modulate_triton.launch(x, norm.weight, shift, scale, index, epsilon=epsilon(x, norm))


def _operands(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> tuple[Any, ...]:
    """Text, audio and video in runs, as a packed MiniMax-H3 sequence has them, with six modulation rows each."""
    draw = torch.Generator(device).manual_seed(0)
    x = torch.randn(1, rows, width, device=device, generator=draw).to(dtype)
    norm = nn.RMSNorm(width, eps=1e-5, device=device, dtype=dtype)
    modulation = 0.1 * torch.randn(6, 6 * width, device=device, generator=draw).to(dtype)
    shift, scale = modulation.chunk(6, dim=-1)[:2]
    index = torch.zeros(rows, dtype=torch.int64, device=device)
    index[: rows // 8], index[rows // 8 : rows // 6] = 1, 5
    return x, norm, shift, scale, index


NORM_MODULATE = Fusion(
    part=Part.NORM_MODULATE,
    reference=reference,
    kernels={"cpu": on_cpu, "cuda": on_cuda},
    is_eligible=is_eligible,
    operands=_operands,
)
