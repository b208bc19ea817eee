"""Admission of the fused operations against fp64, on every device and in every dtype that they are written for.

A fused operation is admitted where its root mean square and its largest error are at most 1.5 times the reference's
own, its mean signed error is at most a quarter of its root mean square, it is exact where the reference is exact, and
NaN, infinities, shapes and exceptions are the reference's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sojourn.inference.quality.fusions.gated_residual import GATED_RESIDUAL
from sojourn.inference.quality.fusions.norm_modulate import NORM_MODULATE, epsilon
from torch import nn

WIDTH = 320
TOKENS = 64

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.device,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@dataclass(frozen=True)
class Errors:
    rms: float
    largest: float
    mean: float

    @classmethod
    def of(cls, found: torch.Tensor, exact: torch.Tensor) -> "Errors":
        off = found.double() - exact
        return cls(float(off.pow(2).mean().sqrt()), float(off.abs().max()), float(off.mean()))


def admit(fused: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor) -> None:
    assert (fused.shape, fused.dtype, fused.device) == (reference.shape, reference.dtype, reference.device)
    ours, own = Errors.of(fused, exact), Errors.of(reference, exact)
    assert ours.rms <= 1.5 * own.rms
    assert ours.largest <= 1.5 * own.largest
    assert abs(ours.mean) <= 0.25 * ours.rms


class Draw:
    """Random operands on a device."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=self.generator)).to(self.device, dtype)

    def magnitudes(self, *shape: int, low: float, high: float, dtype: torch.dtype) -> torch.Tensor:
        """Both signs, orders of magnitude evenly."""
        powers = low + (high - low) * torch.rand(*shape, generator=self.generator)
        signs = torch.randn(*shape, generator=self.generator).sign()
        return (signs * 10**powers).to(self.device, dtype)


# Gated residual.

# Root mean square of gate · update against the residual's. With products as large as the residual, rounding the product
# adds 1.5 times the reference's error, and 1.7 times at the largest: the tier's promise is kept below that.
SHARES = [0.01, 0.1, 0.3]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("batch", [1, 2])
def test_gated_residual_is_admitted(device: torch.device, dtype: torch.dtype, share: float, batch: int) -> None:
    draw = Draw(device)
    residual, update = (draw.normal(batch, TOKENS, WIDTH, dtype=dtype) for _ in range(2))
    gate = draw.normal(batch, TOKENS, WIDTH, scale=share)
    exact = residual.double() + update.double() * gate.double()
    admit(GATED_RESIDUAL(residual, update.clone(), gate), GATED_RESIDUAL.reference(residual, update, gate), exact)


def gates(draw: Draw, batch: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    six = draw.normal(batch, TOKENS, 6, WIDTH)
    return {
        "one of six rows of a token": six.chunk(6, dim=2)[2].squeeze(2),
        "contiguous": draw.normal(batch, TOKENS, WIDTH),
        "one row for all tokens": draw.normal(batch, 1, WIDTH),
        "one of six rows for all tokens": draw.normal(batch, 6, WIDTH).chunk(6, dim=1)[5],
        "in the working dtype": draw.normal(batch, TOKENS, WIDTH, dtype=dtype),
        "columns first": draw.normal(batch, WIDTH, TOKENS).transpose(1, 2),
    }


@pytest.mark.parametrize("mode", list(gates(Draw(torch.device("cpu")), 1, torch.float32)))
@pytest.mark.parametrize("batch", [1, 2])
def test_gated_residual_is_the_operation_of_the_working_dtype_bit_for_bit(
    device: torch.device, dtype: torch.dtype, mode: str, batch: int
) -> None:
    draw = Draw(device)
    residual, update = (draw.magnitudes(batch, TOKENS, WIDTH, low=-4, high=1, dtype=dtype) for _ in range(2))
    gate = gates(draw, batch, dtype)[mode]
    held = residual.clone()
    expected = residual + update * gate.to(dtype)
    found = GATED_RESIDUAL(residual, update, gate)
    assert found.data_ptr() == update.data_ptr(), "the reference ran"
    assert torch.equal(found, expected)
    assert torch.equal(residual, held), "the residual is only read"


def test_gated_residual_is_exact_where_the_reference_is(device: torch.device, dtype: torch.dtype) -> None:
    draw = Draw(device)
    residual, gate = draw.normal(1, TOKENS, WIDTH, dtype=dtype), draw.normal(1, TOKENS, WIDTH)
    zero = torch.zeros_like(residual)
    halves = (4 * draw.normal(1, TOKENS, WIDTH)).round() / 2
    for operands in (
        (residual, zero.clone(), gate),
        (residual, residual.clone(), torch.zeros_like(gate)),
        (halves.to(dtype), halves.to(dtype), torch.full_like(gate, 0.5)),
    ):
        exact = operands[0].double() + operands[1].double() * operands[2].double()
        assert torch.equal(GATED_RESIDUAL.reference(*operands).double(), exact), "the case is not an exact one"
        assert torch.equal(GATED_RESIDUAL(*operands).double(), exact)


@pytest.mark.parametrize("where", ["residual", "update", "gate"])
def test_gated_residual_keeps_special_values(device: torch.device, dtype: torch.dtype, where: str) -> None:
    draw = Draw(device)
    operands = {
        "residual": draw.normal(1, TOKENS, WIDTH, dtype=dtype),
        "update": draw.normal(1, TOKENS, WIDTH, dtype=dtype),
        "gate": draw.normal(1, TOKENS, WIDTH),
    }
    operands[where][0, :3, 0] = torch.tensor([float("nan"), float("inf"), float("-inf")], device=device)
    operands["gate"][0, 3], operands["update"][0, 3] = 0.0, float("inf")
    same_specials(GATED_RESIDUAL.reference(*operands.values()), GATED_RESIDUAL(*operands.values()))


def same_specials(reference: torch.Tensor, fused: torch.Tensor) -> None:
    assert not torch.isfinite(reference).all(), "the case holds no special value"
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(reference), kind(fused))


@pytest.mark.parametrize(
    "shapes",
    [((1, 4, 8), (1, 4, 7), (1, 4, 8)), ((1, 4, 8), (1, 4, 8), (1, 4, 7)), ((1, 4, 8), (1, 3, 8), (1, 4, 8))],
)
def test_gated_residual_raises_as_the_reference(device: torch.device, dtype: torch.dtype, shapes: Any) -> None:
    residual, update, gate = (torch.ones(shape, device=device, dtype=dtype) for shape in shapes)
    same_exception(GATED_RESIDUAL.reference, GATED_RESIDUAL, residual, update, gate)


def same_exception(reference: Callable[..., Any], fused: Callable[..., Any], *operands: Any) -> None:
    with pytest.raises((RuntimeError, IndexError)) as expected:
        reference(*operands)
    with pytest.raises((RuntimeError, IndexError)) as found:
        fused(*operands)
    assert type(found.value) is type(expected.value)


@pytest.mark.parametrize("shape", [(1, 0, 8), (0, 4, 8), (1, 4, 1), (2, 3, 5)])
def test_gated_residual_of_any_shape(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    draw = Draw(device)
    residual, update = (draw.normal(*shape, dtype=dtype) for _ in range(2))
    gate = draw.normal(*shape)
    expected = residual + update * gate.to(dtype)
    assert torch.equal(GATED_RESIDUAL(residual, update, gate), expected)


def test_gated_residual_leaves_what_it_may_not_write_alone(device: torch.device) -> None:
    draw = Draw(device)
    residual, gate = draw.normal(1, TOKENS, WIDTH), draw.normal(1, TOKENS, WIDTH)
    expected = residual + residual * gate
    assert torch.equal(GATED_RESIDUAL(residual, residual, gate), expected)
    shared = draw.normal(2, 1, TOKENS, WIDTH)
    held = shared.clone()
    GATED_RESIDUAL(shared[0], shared[1], gate)
    assert torch.equal(shared, held)


# Norm and modulation.


def h3_operands(draw: Draw, dtype: torch.dtype, x: torch.Tensor, *, index: torch.Tensor | None = None) -> Any:
    norm = nn.RMSNorm(WIDTH, eps=1e-5, device=draw.device, dtype=dtype)
    norm.weight.copy_(draw.normal(WIDTH, scale=0.2) + 1)
    shift, scale = draw.normal(6, 6 * WIDTH, scale=0.3, dtype=dtype).chunk(6, dim=-1)[:2]
    if index is None:
        index = torch.cat([torch.full((9,), 1), torch.full((6,), 5), torch.zeros(TOKENS - 15)]).long()
    return x, norm, shift, scale, index.to(draw.device)


def exactly(x: torch.Tensor, norm: nn.RMSNorm, shift: torch.Tensor, scale: torch.Tensor, index: torch.Tensor) -> Any:
    wide = x.double()
    root = (wide.pow(2).mean(-1, keepdim=True) + epsilon(x, norm)).rsqrt()
    return wide * root * norm.weight.double() * (1 + scale.double()[index]) + shift.double()[index]


INDICES = {
    "runs": None,
    "one": torch.full((TOKENS,), 3),
    "each token its own": torch.arange(TOKENS) % 6,
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("index", list(INDICES))
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 100.0])
def test_norm_modulate_is_admitted(
    device: torch.device, dtype: torch.dtype, magnitude: float, index: str, batch: int
) -> None:
    draw = Draw(device)
    x = draw.normal(batch, TOKENS, WIDTH, scale=magnitude, dtype=dtype)
    operands = h3_operands(draw, dtype, x, index=INDICES[index])
    held = x.clone()
    admit(NORM_MODULATE(*operands), NORM_MODULATE.reference(*operands), exactly(*operands))
    assert torch.equal(x, held), "its input is only read"


def test_norm_modulate_over_several_blocks_of_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sojourn.inference.quality.fusions.blocking.BLOCK_ELEMENTS", 7 * WIDTH)
    draw = Draw(torch.device("cpu"))
    operands = h3_operands(draw, dtype, draw.normal(2, TOKENS, WIDTH, dtype=dtype))
    admit(NORM_MODULATE(*operands), NORM_MODULATE.reference(*operands), exactly(*operands))


def test_norm_modulate_is_exact_where_the_reference_is(device: torch.device, dtype: torch.dtype) -> None:
    draw = Draw(device)
    operands = h3_operands(draw, dtype, torch.zeros(1, TOKENS, WIDTH, device=device, dtype=dtype))
    assert torch.equal(NORM_MODULATE.reference(*operands).double(), exactly(*operands)), "the case is not an exact one"
    assert torch.equal(NORM_MODULATE(*operands).double(), exactly(*operands))


@pytest.mark.parametrize("where", ["x", "norm", "shift", "scale"])
def test_norm_modulate_keeps_special_values(device: torch.device, dtype: torch.dtype, where: str) -> None:
    draw = Draw(device)
    operands = h3_operands(draw, dtype, draw.normal(1, TOKENS, WIDTH, dtype=dtype))
    special = torch.tensor([float("nan"), float("inf"), float("-inf")], device=device)
    x, norm, shift, scale, _ = operands
    {"x": x[0, :3, 0], "norm": norm.weight[:3], "shift": shift[1, :3], "scale": scale[1, :3]}[where].copy_(special)
    same_specials(NORM_MODULATE.reference(*operands), NORM_MODULATE(*operands))


def test_norm_modulate_of_values_whose_squares_overflow(device: torch.device, dtype: torch.dtype) -> None:
    draw = Draw(device)
    large = torch.finfo(dtype).max / 4
    operands = h3_operands(draw, dtype, draw.normal(1, TOKENS, WIDTH).sign().to(dtype) * large)
    reference, fused = NORM_MODULATE.reference(*operands), NORM_MODULATE(*operands)
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(reference), kind(fused))


@pytest.mark.parametrize("place", [6, -1, 2**40])
def test_norm_modulate_raises_as_the_reference_for_a_row_that_is_not_there(dtype: torch.dtype, place: int) -> None:
    draw = Draw(torch.device("cpu"))
    for index in (torch.full((TOKENS,), place), torch.arange(TOKENS) % 6):
        index[-1] = place
        operands = h3_operands(draw, dtype, draw.normal(1, TOKENS, WIDTH, dtype=dtype), index=index)
        same_exception(NORM_MODULATE.reference, NORM_MODULATE, *operands)


@pytest.mark.parametrize("index", [torch.zeros(TOKENS - 1).long(), torch.zeros(TOKENS), torch.zeros(1, TOKENS).long()])
def test_norm_modulate_raises_as_the_reference_for_a_wrong_index(dtype: torch.dtype, index: torch.Tensor) -> None:
    draw = Draw(torch.device("cpu"))
    operands = h3_operands(draw, dtype, draw.normal(1, TOKENS, WIDTH, dtype=dtype), index=index)
    same_exception(NORM_MODULATE.reference, NORM_MODULATE, *operands)


@pytest.mark.parametrize("shape", [(1, 0), (0, TOKENS), (3, TOKENS)])
def test_norm_modulate_of_any_shape(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    draw = Draw(device)
    x = draw.normal(*shape, WIDTH, dtype=dtype)
    operands = h3_operands(draw, dtype, x, index=torch.zeros(shape[1]).long())
    assert NORM_MODULATE(*operands).shape == NORM_MODULATE.reference(*operands).shape == (*shape, WIDTH)


def test_norm_without_an_epsilon_of_its_own(device: torch.device, dtype: torch.dtype) -> None:
    draw = Draw(device)
    x, norm, *rest = h3_operands(draw, dtype, draw.normal(1, TOKENS, WIDTH, scale=1e-3, dtype=dtype))
    norm.eps = None
    admit(NORM_MODULATE(x, norm, *rest), NORM_MODULATE.reference(x, norm, *rest), exactly(x, norm, *rest))
