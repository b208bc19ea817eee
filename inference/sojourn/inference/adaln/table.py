"""Where each projection's outputs lie within one flat row."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Entry:
    """The place of one projection.

    Attributes:
        offset: First element within the flat row of its dtype.
        width: Outputs of the projection.
        inputs: Inputs of the projection, without bias.
        dtype: Dtype of the rows: that which the Linear would have had.
        bias: Whether the projection adds a bias.
    """

    offset: int
    width: int
    inputs: int
    dtype: torch.dtype
    bias: bool


@dataclass(frozen=True)
class Projection:
    """One projection as the model declares it, before it has a place."""

    width: int
    inputs: int
    dtype: torch.dtype
    bias: bool


@dataclass(frozen=True)
class Table:
    """Module name -> place. Families that keep some projections in fp32 have one flat row per dtype.

    Attributes:
        entries: In the order in which they were declared.
    """

    entries: Mapping[str, Entry]

    @classmethod
    def of(cls, projections: Mapping[str, Projection]) -> "Table":
        """Gives every projection its place, one after another within its dtype.

        Raises:
            ValueError: There is no projection.
        """
        if not projections:
            raise ValueError("a table needs at least one projection")
        ends: dict[torch.dtype, int] = {}
        entries = {}
        for name, projection in projections.items():
            offset = ends.get(projection.dtype, 0)
            entries[name] = Entry(offset, projection.width, projection.inputs, projection.dtype, projection.bias)
            ends[projection.dtype] = offset + projection.width
        return cls(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __getitem__(self, name: str) -> Entry:
        return self.entries[name]

    @cached_property
    def row_elements(self) -> dict[torch.dtype, int]:
        """Elements R of one flat row, by dtype."""
        elements: dict[torch.dtype, int] = {}
        for entry in self.entries.values():
            elements[entry.dtype] = elements.get(entry.dtype, 0) + entry.width
        return elements

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one (plan, row) over all projections; MiniMax-H3 in bf16: 9 698 304."""
        return sum(elements * dtype.itemsize for dtype, elements in self.row_elements.items())

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the projections that the rows replace, in the dtype they would have been loaded in."""
        return sum(entry.width * (entry.inputs + entry.bias) * entry.dtype.itemsize for entry in self.entries.values())
