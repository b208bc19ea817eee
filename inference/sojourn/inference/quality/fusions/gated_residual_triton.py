"""residual + update · gate as one Triton kernel; imported only where triton is.

Products and sums are rounded one by one to the working dtype: the launch forbids the contraction to a fused
multiply-add, whose missing rounding would differ from the same operation in eager mode.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _gated_residual(
    residual, update, gate, tokens, width, gate_batch_stride, gate_token_stride, BLOCK: tl.constexpr
):  # pragma: no cover - runs on the device
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = columns < width
    gate_row = gate + (row // tokens) * gate_batch_stride + (row % tokens) * gate_token_stride
    held = tl.load(residual + row * width + columns, mask=within)
    made = tl.load(update + row * width + columns, mask=within)
    factor = tl.load(gate_row + columns, mask=within).to(held.dtype)
    product = (made.to(tl.float32) * factor.to(tl.float32)).to(held.dtype)
    total = (held.to(tl.float32) + product.to(tl.float32)).to(held.dtype)
    tl.store(update + row * width + columns, total, mask=within)


def launch(residual: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """[B, S, D] three times, the gate also [B, 1, D]; returns `update`, which holds the result."""
    batch, tokens, width = residual.shape
    gates = gate.expand_as(residual)
    if gates.stride(-1) != 1:
        gates = gates.contiguous()
    if residual.numel():
        _gated_residual[(batch * tokens, triton.cdiv(width, _BLOCK))](
            residual, update, gates, tokens, width, gates.stride(0), gates.stride(1), BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip
    return update
