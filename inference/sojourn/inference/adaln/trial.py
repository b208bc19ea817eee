"""Which products a build may take in other ways than stock without changing a bit, found by trial.

The stock forward multiplies a whole weight with the rows of one step. A build is faster when one product takes the rows
of many steps, on a piece of the weight, with one thread of torch. Kernels choose the order of their additions by
shapes, places and threads, never by values, so that one trial of a shape settles all its layers, if the trial's numbers
show every other order. They do: each output is a sum of pairs that cancel exactly, and what is left is nothing but
the rounding errors, of which another order changes most (where orders did differ, of bfloat16 outputs 94 to 99 %, of
float16 ones 79 to 91 %, of float32 ones 94 to 100 %; with ordinary numbers one bfloat16 output in a thousand or less).

Measured on one CPU (torch 2.13, AVX-512): bfloat16 and float16 may be batched, but in bfloat16 single rows of 1536 or
more inputs; in float32 products of one, two and three rows have orders of their own; pieces and threads never mattered.
"""

import mmap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from sojourn.inference.adaln.lanes import Lanes
from sojourn.inference.adaln.layers import LINE_BYTES, Product, Span, aligned
from torch.nn import functional

# Rows of the weight that are drawn; the rest repeats them.
_DRAWN = 256
# Magnitudes of weights and of inputs span so many powers of two around 1: enough that sums of few terms round too, and
# within what float16 holds.
_WEIGHT_EXPONENTS = 16
_INPUT_EXPONENTS = 8
# With fewer terms than this, some sums are exact in any order and show nothing; there is nothing to gain either.
_FEWEST_INPUTS = 64
# About as large as the rounding errors that it is added to.
_BIAS = 2.0**-11


@dataclass(frozen=True)
class Verdict:
    """What gives the stock bits.

    Attributes:
        in_pieces: Whether a layer may be computed piece by piece on the lanes.
        together: Row counts whose plans may share a product.
    """

    in_pieces: bool
    together: frozenset[int] = frozenset()


class Trials:
    """Tries each shape and set of row counts once."""

    def __init__(self) -> None:
        self._verdicts: dict[object, Verdict] = {}

    def verdict(
        self, product: Product, pieces: tuple[Span, ...], rows: Sequence[int], lanes: Lanes, device: torch.device
    ) -> Verdict:
        """How a layer's products may be taken.

        Args:
            product: The layer as a whole.
            pieces: Those in which it is to be computed.
            rows: Rows of each plan.
            lanes: Where the pieces are to be computed.
            device: That which computes.
        """
        if lanes.count == 0 and len(pieces) == 1 and len(rows) == 1:
            return Verdict(in_pieces=True)
        if product.inputs < _FEWEST_INPUTS:
            return Verdict(in_pieces=False)
        counts = dict(sorted(Counter(rows).items()))
        key = product, pieces, tuple(counts.items()), lanes.count > 0, torch.get_num_threads(), device, _modes()
        if key not in self._verdicts:
            self._verdicts[key] = _Trial(product, pieces, lanes, device, max(counts)).of(counts)
        return self._verdicts[key]


class _Trial:
    """One shape, on numbers of its own: a weight as large as the layer's is held meanwhile."""

    def __init__(
        self, product: Product, pieces: Sequence[Span], lanes: Lanes, device: torch.device, most_rows: int
    ) -> None:
        self._pieces = pieces
        self._lanes = lanes
        self._rows, self._weight, self._bias = _numbers(product, most_rows, device)

    def of(self, counts: Mapping[int, int]) -> Verdict:
        """The verdict on so many plans by row count."""
        stock = {rows: functional.linear(self._rows[:rows], self._weight, self._bias) for rows in counts}
        if not all(_same(self._piecewise([rows]), made) for rows, made in stock.items()):
            return Verdict(in_pieces=False)
        together = dict(counts)
        while sum(together.values()) > 1:
            plans = [rows for rows, count in together.items() for _ in range(count)]
            made = self._piecewise(plans).split(plans)
            differing = {rows for rows, own in zip(plans, made, strict=True) if not _same(own, stock[rows])}
            if not differing:
                return Verdict(in_pieces=True, together=frozenset(together))
            together = {rows: count for rows, count in together.items() if rows not in differing}
        return Verdict(in_pieces=True)

    def _piecewise(self, plans: Sequence[int]) -> torch.Tensor:
        """The rows of plans, which are all alike, as a build would make them."""
        batch = torch.cat([self._rows[:rows] for rows in plans])

        def work() -> torch.Tensor:
            return torch.cat([self._of_piece(batch, piece) for piece in self._pieces], dim=1)

        return self._lanes.run(work)

    def _of_piece(self, batch: torch.Tensor, piece: Span) -> torch.Tensor:
        outputs = slice(piece.first, piece.last)
        return functional.linear(batch, self._weight[outputs], None if self._bias is None else self._bias[outputs])


def _numbers(
    product: Product, rows: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows [rows, in], weight [out, in] and bias [out], placed as the layer's are, whose exact products are 0.

    The inputs go in pairs, at random places: in every row the two are equal, in every output their weights opposite.
    """
    draw = torch.Generator().manual_seed(0)
    half = product.inputs // 2
    order = torch.randperm(product.inputs, generator=draw)
    ones, others = order[:half], order[half : 2 * half]
    inputs = torch.zeros(rows, product.inputs)
    inputs[:, ones] = inputs[:, others] = _spread((rows, half), _INPUT_EXPONENTS, draw)
    drawn = min(product.outputs, _DRAWN)
    weights = torch.zeros(drawn, product.inputs)
    weights[:, ones] = _spread((drawn, half), _WEIGHT_EXPONENTS, draw)
    weights[:, others] = -weights[:, ones]
    weight = _empty((product.outputs, product.inputs), product.dtype, product.weight_at, device)
    _repeat(weights, weight)
    if product.bias_at is None:
        return inputs.to(device, product.dtype), weight, None
    bias = _empty((product.outputs,), product.dtype, product.bias_at, device)
    _repeat(torch.randn(drawn, generator=draw) * _BIAS, bias)
    return inputs.to(device, product.dtype), weight, bias


def _spread(shape: tuple[int, int], exponents: int, draw: torch.Generator) -> torch.Tensor:
    """Numbers of any sign whose magnitudes span so many powers of two around 1."""
    powers = torch.randint(-exponents // 2, exponents // 2, shape, generator=draw)
    return torch.randn(shape, generator=draw) * torch.exp2(powers)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, at: int, device: torch.device) -> torch.Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if device.type == "cpu":
        # Goes back to the system with the trial; the allocator would keep up to 32 MB of it.
        buffer = torch.frombuffer(mmap.mmap(-1, nbytes + LINE_BYTES), dtype=torch.uint8)
    else:
        buffer = torch.empty(nbytes + LINE_BYTES, dtype=torch.uint8, device=device)
    return aligned(buffer, at)[:nbytes].view(dtype).view(shape)


def _repeat(drawn: torch.Tensor, whole: torch.Tensor) -> None:
    for part in whole.split(len(drawn)):
        part.copy_(drawn[: len(part)])


def _same(made: torch.Tensor, stock: torch.Tensor) -> bool:
    """Bit by bit: NaN equals itself, and 0 is not -0."""
    return made.dtype == stock.dtype and torch.equal(made.view(torch.uint8), stock.contiguous().view(torch.uint8))


def _modes() -> tuple[object, ...]:
    """What else of the process chooses kernels."""
    return torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
