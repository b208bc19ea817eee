"""residual + update · gate: the end of attention and of the feed-forward in a modulated block.

Shapes: residual and update [B, S, D] in the working dtype, gate [B, S, D] or [B, 1, D] in any floating dtype.

The reference (diffusers' HeliosTransformerBlock) widens all three to float32 and rounds once at the end: up to 26
bytes of memory traffic for each bfloat16 element. Fused, update and gate are rounded to the working dtype, the product
is rounded, then the sum: bit for bit what `residual + update * gate` is in the working dtype, in one pass. In float32
both are the same operation.

The result lies where `update` was. Whoever calls this gives `update` up; `residual` and `gate` are only read.
"""

from typing import Any

import torch
from sojourn.inference.quality.fusions.blocking import row_blocks
from sojourn.inference.quality.fusions.fusion import DTYPES, Fusion
from sojourn.inference.quality.observer import Part


def reference(residual: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """As the stock block has it."""
    return (residual.float() + update.float() * gate).type_as(residual)


def is_eligible(residual: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> bool:
    """Whether the fused operation may be taken; nothing of the tensors' values is read."""
    batch, rows, width = residual.shape if residual.ndim == 3 else (0, 0, 0)
    return (
        residual.ndim == 3
        and residual.dtype in DTYPES
        and update.dtype == residual.dtype
        and gate.is_floating_point()
        and update.shape == residual.shape
        and tuple(gate.shape) in {(batch, rows, width), (batch, 1, width)}
        and residual.device == update.device == gate.device
        and residual.is_contiguous()
        and update.is_contiguous()
        and update.untyped_storage().data_ptr() != residual.untyped_storage().data_ptr()
    )


def on_cpu(residual: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """In place of `update`, a few rows at a time, so that what one operation leaves is in the cache for the next."""
    narrow = torch.empty(0, dtype=residual.dtype)
    for held, made, factor in zip(residual, update, gate.expand_as(residual), strict=True):
        for rows in row_blocks(*held.shape):
            torch.mul(made[rows], _rounded(factor[rows], narrow), out=made[rows])
            torch.add(held[rows], made[rows], out=made[rows])
    return update


def _rounded(gate: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
    """The gate in the working dtype, in memory that the next rows use again."""
    if gate.dtype == narrow.dtype:
        return gate
    return narrow.resize_(gate.shape).copy_(gate)


def on_cuda(residual: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """One Triton kernel, in place of `update`."""
    from sojourn.inference.quality.fusions import gated_residual_triton

    return gated_residual_triton.launch(residual, update, gate)


def _operands(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> tuple[Any, ...]:
    """Unit residual and update; the gate is one of six float32 modulation rows of a token, as Helios' is."""
    draw = torch.Generator(device).manual_seed(0)
    residual, update = (torch.randn(1, rows, width, device=device, generator=draw).to(dtype) for _ in range(2))
    modulation = 0.1 * torch.randn(1, rows, 6, width, device=device, generator=draw)
    return residual, update, modulation.chunk(6, dim=2)[2].squeeze(2)


GATED_RESIDUAL = Fusion(
    part=Part.GATED_RESIDUAL,
    reference=reference,
    kernels={"cpu": on_cpu, "cuda": on_cuda},
    is_eligible=is_eligible,
    operands=_operands,
)
