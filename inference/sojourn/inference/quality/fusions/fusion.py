"""What a fusion is: a reference, the same in one pass on each kind of device, and when the latter may be taken.

Admission (tests/inference/quality/test_admission.py): against fp64, root mean square and largest error at most 1.5
times the reference's own, mean signed error at most a quarter of the root mean square; exact where the reference is;
NaN, infinities, shapes and exceptions as the reference has them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from sojourn.inference.quality.observer import Part

Kernel = Callable[..., torch.Tensor]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Fusion:
    """One operation, plain and fused.

    Attributes:
        part: Its name.
        reference: The operation as the stock model computes it.
        kernels: The fused operation, by type of device.
        is_eligible: Whether the fused operation may be taken for these operands; the reference is, where not.
        operands: Makes operands as a model has them, for measuring: device, dtype, rows, width → arguments.
    """

    part: Part
    reference: Kernel
    kernels: Mapping[str, Kernel]
    is_eligible: Callable[..., bool]
    operands: Callable[[torch.device, torch.dtype, int, int], tuple[Any, ...]]

    def __call__(self, *operands: Any) -> torch.Tensor:
        """The fused operation where it may be taken, else the reference."""
        kernel = self.kernels.get(operands[0].device.type)
        if kernel is None or torch.is_grad_enabled() or not self.is_eligible(*operands):
            return self.reference(*operands)
        return kernel(*operands)

    def obstacle(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Says why there is no fused operation for a device and dtype; None where there is one."""
        if dtype not in DTYPES:
            return f"it is not written for {dtype}"
        if device.type not in self.kernels:
            return f"it is not written for {device.type} devices"
        if device.type == "cuda" and torch.version.hip is not None:
            return "it is not written for ROCm"
        if device.type == "cuda" and find_spec("triton") is None:
            return "triton is not installed; pip install triton"
        return None
