"""The CUDA kernels, run by Triton's interpreter where there is no device: addressing, masks, strides, modes, order.

The interpreter truncates where hardware rounds to bfloat16, so that dtype is left to the admission tests on a device.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from sojourn.inference.quality.fusions import gated_residual, norm_modulate

pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None, reason="needs triton; pip install triton (its interpreter needs no device)"
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the device itself, in test_admission.py"),
]
DTYPES = [torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 48, 1024, 1500])
@pytest.mark.parametrize("mode", ["full", "one row", "strided", "columns first"])
def test_gated_residual_gives_the_bits_of_the_working_dtype(dtype: torch.dtype, width: int, mode: str) -> None:
    draw = torch.Generator().manual_seed(0)
    residual, update = (torch.randn(2, 5, width, generator=draw).to(dtype) for _ in range(2))
    gate = {
        "full": torch.randn(2, 5, width, generator=draw),
        "one row": torch.randn(2, 1, width, generator=draw),
        "strided": torch.randn(2, 5, 6, width, generator=draw)[:, :, 4],
        "columns first": torch.randn(2, width, 5, generator=draw).transpose(1, 2),
    }[mode]
    expected = residual + update * gate.to(dtype)
    found = gated_residual.on_cuda(residual, update, gate)
    assert found is update
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 48, 320, 1500])
@pytest.mark.parametrize("batch", [1, 2])
def test_norm_modulate_is_the_cpu_operation_to_the_last_place(dtype: torch.dtype, width: int, batch: int) -> None:
    x, norm, shift, scale, index = norm_modulate._operands(torch.device("cpu"), dtype, 12, width)
    operands: Any = (x.repeat(batch, 1, 1), norm, shift, scale, index)
    found, expected = norm_modulate.on_cuda(*operands), norm_modulate.on_cpu(*operands)
    places = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=places, atol=places)


@pytest.mark.parametrize("place", [6, -1])
def test_norm_modulate_marks_a_row_that_is_not_there(place: int) -> None:
    x, norm, shift, scale, index = norm_modulate._operands(torch.device("cpu"), torch.float32, 12, 48)
    index[5] = place
    found = norm_modulate.on_cuda(x, norm, shift, scale, index)
    assert torch.isnan(found[0, 5]).all()
    assert torch.isfinite(found[0, torch.arange(12) != 5]).all()


def test_nothing_is_launched_for_nothing() -> None:
    empty = torch.empty(1, 0, 48)
    assert gated_residual.on_cuda(empty, empty.clone(), empty.clone()).shape == (1, 0, 48)
    _, norm, shift, scale, _ = norm_modulate._operands(torch.device("cpu"), torch.float32, 12, 48)
    assert norm_modulate.on_cuda(empty, norm, shift, scale, torch.empty(0, dtype=torch.int64)).shape == (1, 0, 48)
