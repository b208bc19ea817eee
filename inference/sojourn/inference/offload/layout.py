"""Where each weight of a layer lies in the layer's flat buffers. Pure arithmetic over what tensors say of themselves.

A layer is copied as few long runs instead of many small tensors: one flat buffer per dtype. What is copied is not the
weight but its *extent*: the run of memory that it spans, together with every weight that overlaps it. So strides,
transposes and overlapping views come out as they went in, and two names of the same memory stay the same memory,
whoever made the storages that the names go through.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

# Base addresses in a flat buffer. Fused kernels want 32; a cache line, which is also what allocators of the CPU give,
# keeps one weight's bytes out of another's line.
ALIGNMENT_BYTES = 64


def aligned(size_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """The next multiple of the alignment."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A tensor under a name, as a view of memory.

    Attributes:
        name: Dotted, unique in its component.
        layer: Index of the layer that uses it; `REST` outside the layers.
        dtype, shape, stride: Those of the tensor.
        address: Of its first element.
        span_bytes: From there to behind its last element; holes between elements count.
    """

    name: str
    layer: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    address: int
    span_bytes: int

    @property
    def end(self) -> int:
        """The address behind its last element."""
        return self.address + self.span_bytes


# The layer index of what no layer uses.
REST = -1


def describe(name: str, tensor: torch.Tensor, *, layer: int = REST) -> Weight:
    """The view that a tensor is."""
    elements = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return Weight(
        name=name,
        layer=layer,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        address=tensor.data_ptr(),
        span_bytes=elements * tensor.element_size() if tensor.numel() else 0,
    )


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A run of memory and the weights that view it.

    Attributes:
        address, size_bytes: The run.
        dtype: Which flat buffer it goes to: that of its first weight.
        weights: In order of address; at least one.
    """

    address: int
    size_bytes: int
    dtype: torch.dtype
    weights: tuple[Weight, ...]

    @property
    def layers(self) -> frozenset[int]:
        """The users; more than one if the memory is tied."""
        return frozenset(weight.layer for weight in self.weights)


def find_extents(weights: Iterable[Weight]) -> tuple[Extent, ...]:
    """Joins the weights that overlap. Empty weights belong nowhere and are left out."""
    runs: list[list[Weight]] = []
    end = 0
    for weight in sorted((w for w in weights if w.span_bytes), key=lambda w: (w.address, -w.span_bytes)):
        if not runs or weight.address >= end:
            runs.append([])
        runs[-1].append(weight)
        end = max(end, weight.end)
    return tuple(_extent(run) for run in runs)


def _extent(weights: Sequence[Weight]) -> Extent:
    start = weights[0].address
    return Extent(
        address=start,
        size_bytes=max(weight.end for weight in weights) - start,
        dtype=weights[0].dtype,
        weights=tuple(weights),
    )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Flat buffers that hold some extents.

    Attributes:
        extents: What is held, with the place of each in the flat buffer of its dtype.
        buffer_bytes: Size of the flat buffer of each dtype.
    """

    extents: tuple[tuple[Extent, int], ...]
    buffer_bytes: Mapping[torch.dtype, int]

    @property
    def total_bytes(self) -> int:
        """All flat buffers together, holes of the alignment included."""
        return sum(self.buffer_bytes.values())

    def views(self, buffers: Mapping[torch.dtype, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Every weight by name as it lies in the flat buffers, strides and all.

        Args:
            buffers: uint8, as long as `buffer_bytes` says.
        """
        return {
            weight.name: buffers[extent.dtype]
            .view(weight.dtype)
            .as_strided(
                weight.shape, weight.stride, (offset + weight.address - extent.address) // weight.dtype.itemsize
            )
            for extent, offset in self.extents
            for weight in extent.weights
        }


def lay_out(extents: Iterable[Extent]) -> Layout:
    """Places extents one behind the other, each aligned."""
    placed: list[tuple[Extent, int]] = []
    sizes: dict[torch.dtype, int] = {}
    for extent in extents:
        offset = sizes.get(extent.dtype, 0)
        placed.append((extent, offset))
        sizes[extent.dtype] = offset + aligned(extent.size_bytes)
    return Layout(extents=tuple(placed), buffer_bytes=sizes)
