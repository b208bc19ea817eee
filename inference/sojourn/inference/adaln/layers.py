"""A projection as a build meets it: where its weights lie, in which pieces they are read, and how they are placed."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sojourn.inference.adaln.table import Entry
from sojourn.inference.adaln.weights import Part, Place, WeightSource

# Read, and multiplied while the processor's cache still holds it. Of 370 MB in the page cache, in layers of 7.4 MB on
# two cores, pieces of 8, 4, 3 and 2 MiB took 0.095, 0.086, 0.088 and 0.090 s with thirteen rows (each call costs too).
PIECE_BYTES = 4 << 20
# Outputs of a piece are a multiple of this, so that every piece is aligned as its layer is, and kernels, which work in
# blocks of up to 64 outputs, meet no edge that the whole layer does not have.
_OUTPUTS = 64
# Addresses are told apart up to a cache line, as torch aligns its own tensors.
LINE_BYTES = 64


@dataclass(frozen=True)
class Span:
    """Outputs of a projection, from `first` to before `last`."""

    first: int
    last: int

    @property
    def outputs(self) -> int:
        """How many."""
        return self.last - self.first


@dataclass(frozen=True)
class Form:
    """How rows of a stored tensor lie in the memory that they are read into.

    A mapped weight is aligned as it lies in its file, and on a CPU the bits of a float32 product of one row depend on
    that: with the weight 4, 8 or 24 bytes off a cache line most elements differ (torch 2.13, MKL; bfloat16 does not
    care).

    Attributes:
        at: Bytes beyond the start of a cache line.
        nbytes: Its bytes.
        shape, dtype: As stored.
    """

    at: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    @classmethod
    def of(cls, place: Place, part: Part) -> "Form":
        """Of a part of the tensor that lies in a place."""
        offset, nbytes = part.span(place)
        # The loader copies, and so aligns, what is not even aligned to its dtype.
        is_aligned = place.dtype is None or place.offset % place.dtype.itemsize == 0
        at = (offset if is_aligned else offset - place.offset) % LINE_BYTES
        return cls(at, nbytes, (nbytes // max(1, _row_bytes(place)), *place.shape[1:]), place.dtype)


@dataclass(frozen=True)
class Piece:
    """Some outputs of a layer, as their weights are read and computed at a time.

    Attributes:
        first_output: Which output of the projection they begin with.
        part: What is read.
        form: How that lies in memory.
    """

    first_output: int
    part: Part
    form: Form


@dataclass(frozen=True)
class Product:
    """What chooses the order in which a matrix product adds up, its rows apart: no value, only shapes and places.

    Attributes:
        outputs, inputs: Of the weight, [outputs, inputs].
        dtype: In which it is computed.
        weight_at, bias_at: Bytes beyond a cache line; None without a bias.
    """

    outputs: int
    inputs: int
    dtype: torch.dtype
    weight_at: int
    bias_at: int | None


@dataclass(frozen=True)
class Layer:
    """A projection, or this rank's outputs of it.

    Attributes:
        name: The module.
        span: The outputs that this rank computes.
        product: How it is computed as a whole, which is the stock way.
        spans: The pieces in which it may be computed, of about equal size; counted from the layer's first output.
        weight, bias: Where they lie.
    """

    name: str
    span: Span
    product: Product
    spans: tuple[Span, ...]
    weight: Place
    bias: Place | None

    @classmethod
    def of(cls, name: str, entry: Entry, span: Span, source: WeightSource, dtype: torch.dtype) -> "Layer":
        """The layer whose outputs are computed in `dtype`."""
        weight = source.places[f"{name}.weight"]
        bias = source.places[f"{name}.bias"] if entry.bias else None
        product = Product(
            outputs=span.outputs,
            inputs=entry.inputs,
            dtype=dtype,
            weight_at=_placed_at(weight, span, dtype),
            bias_at=None if bias is None else _placed_at(bias, span, dtype),
        )
        return cls(name, span, product, tuple(_spans(span.outputs, _row_bytes(weight))), weight, bias)

    @property
    def whole(self) -> Span:
        """All outputs as one piece."""
        return Span(0, self.span.outputs)

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The weights of the spans, as they are read."""
        return tuple(self._piece("weight", self.weight, span) for span in self.spans)

    @functools.cached_property
    def undivided(self) -> tuple[Piece, ...]:
        """All weights, as they are read at a time."""
        return (self._piece("weight", self.weight, self.whole),)

    @functools.cached_property
    def biases(self) -> Piece | None:
        """The biases of all outputs; they are read at a time."""
        return None if self.bias is None else self._piece("bias", self.bias, self.whole)

    def _piece(self, leaf: str, place: Place, span: Span) -> Piece:
        first = self.span.first + span.first
        part = Part(f"{self.name}.{leaf}", first, first + span.outputs)
        return Piece(first, part, Form.of(place, part))


def aligned(buffer: torch.Tensor, at: int) -> torch.Tensor:
    """The bytes of a uint8 buffer from the first address on that lies `at` bytes beyond a cache line."""
    return buffer[(at - buffer.data_ptr()) % LINE_BYTES :]


def _spans(outputs: int, row_bytes: int) -> Iterator[Span]:
    count = max(1, -(-outputs * row_bytes // PIECE_BYTES))
    step = -(-outputs // (count * _OUTPUTS)) * _OUTPUTS
    for first in range(0, outputs, step):
        yield Span(first, min(first + step, outputs))


def _placed_at(place: Place, span: Span, dtype: torch.dtype) -> int:
    """What the loader converts is a tensor of torch's own, and so aligned."""
    return Form.of(place, Part("", span.first, span.last)).at if place.dtype == dtype else 0


def _row_bytes(place: Place) -> int:
    return place.nbytes // max(1, place.shape[0])
