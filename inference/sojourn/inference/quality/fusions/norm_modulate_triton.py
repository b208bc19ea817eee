"""norm(x) · (1 + scale[i]) + shift[i] as one Triton kernel; imported only where triton is.

A row of x stays in registers between its two uses. A row whose index is outside of the table comes out as NaN, which
the pipeline's finite check finds: a kernel cannot raise.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _norm_modulate(
    x, gain, shift, scale, index, made, tokens, width, table_rows, shift_stride, scale_stride, epsilon,
    BLOCK: tl.constexpr,
):  # fmt: skip  # pragma: no cover - runs on the device
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    within = columns < width
    place = tl.load(index + row % tokens)
    known = (place >= 0) & (place < table_rows)
    held = tl.where(known, place, 0)
    wide = tl.load(x + row * width + columns, mask=within, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + epsilon)
    weight = tl.load(gain + columns, mask=within, other=0.0).to(tl.float32)
    factor = 1.0 + tl.load(scale + held * scale_stride + columns, mask=within, other=0.0).to(tl.float32)
    term = tl.load(shift + held * shift_stride + columns, mask=within, other=0.0).to(tl.float32)
    total = tl.where(known, wide * root * weight * factor + term, float("nan"))
    tl.store(made + row * width + columns, total.to(made.dtype.element_ty), mask=within)


def launch(
    x: torch.Tensor,
    gain: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    index: torch.Tensor,
    *,
    epsilon: float,
) -> torch.Tensor:
    """X [B, S, D], gain [D], shift and scale [R, D], index [S]; returns [B, S, D]."""
    batch, tokens, width = x.shape
    made = torch.empty_like(x)
    shift, scale = (table if table.stride(-1) == 1 else table.contiguous() for table in (shift, scale))
    if x.numel():
        block = triton.next_power_of_2(width)
        _norm_modulate[(batch * tokens,)](
            x, gain, shift, scale, index, made, tokens, width, shift.shape[0], shift.stride(0), scale.stride(0),
            epsilon, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return made
