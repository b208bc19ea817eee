"""The projections' weights where they lie: in the mapped checkpoint.

Nothing is copied and nothing stays: a tensor is a view of the mapping, its pages come in when they are prefetched or
touched, and go out again when it is released.
"""

import contextlib
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from sojourn.inference.adaln.refusals import WeightsChanged
from sojourn.inference.loading.mapping import TORCH_DTYPES, MappedFile
from sojourn.inference.loading.safetensors_file import FileIdentity
from sojourn.residencyd.kernel import advice, syscalls


@dataclass(frozen=True)
class Place:
    """Where a tensor lies.

    Attributes:
        file: Index of its file.
        offset: First byte within the file.
        nbytes: Its bytes.
        shape, dtype: As stored; None for a dtype that torch does not have.
    """

    file: int
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Part:
    """Rows of a stored tensor.

    Attributes:
        name: The tensor.
        first, last: From the first row to before the last one; None for the end.
    """

    name: str
    first: int = 0
    last: int | None = None

    def span(self, place: Place) -> tuple[int, int]:
        """First byte within the tensor, and bytes."""
        rows = place.shape[0] if place.shape else 1
        row_bytes = place.nbytes // max(1, rows)
        last = rows if self.last is None else self.last
        return self.first * row_bytes, (last - self.first) * row_bytes


class WeightSource(Protocol):
    """Reads tensors by name; what it hands out is valid until it is released."""

    @property
    def places(self) -> Mapping[str, Place]:
        """Every tensor that the source has."""

    def check(self) -> None:
        """Raises WeightsChanged if the source is no longer what it was."""

    def tensor(self, part: Part) -> torch.Tensor:
        """Rows of a tensor on the host, not to be written to."""

    def prefetch(self, parts: Iterable[Part]) -> None:
        """Brings rows into memory; returns when they are there or cannot be brought."""

    def release(self, parts: Iterable[Part]) -> None:
        """Lets the memory of rows go."""


class MappedWeights:
    """The mapped files of one component."""

    def __init__(self, files: Sequence[MappedFile]) -> None:
        self._files = tuple(files)
        self._places = {
            name: Place(
                file=index,
                offset=mapped.file.data_offset + info.begin,
                nbytes=info.size_bytes,
                shape=info.shape,
                dtype=TORCH_DTYPES.get(info.dtype),
            )
            for index, mapped in enumerate(self._files)
            for name, info in mapped.file.tensors.items()
        }

    @property
    def identities(self) -> tuple[FileIdentity, ...]:
        """What each file was when it was mapped."""
        return tuple(mapped.file.identity for mapped in self._files)

    @property
    def places(self) -> Mapping[str, Place]:
        """Every tensor of the files."""
        return self._places

    def check(self) -> None:
        """Raises WeightsChanged if a file was replaced or written to since it was mapped."""
        for mapped in self._files:
            path = mapped.file.path
            try:
                now = FileIdentity.of(path.stat())
            except OSError as error:
                raise WeightsChanged(f"{path}: {error.strerror}; it was there when the model was loaded") from error
            if now != mapped.file.identity:
                raise WeightsChanged(f"{path}: the file is not the one that was mapped; load the model again")

    def tensor(self, part: Part) -> torch.Tensor:
        """A view of the mapping."""
        return self._files[self._places[part.name].file].tensor(part.name)[part.first : part.last]

    def prefetch(self, parts: Iterable[Part]) -> None:
        """Reads pages in and maps them."""
        for part in parts:
            advice.populate_read(*self._range(part))

    def release(self, parts: Iterable[Part]) -> None:
        """Lets pages go, from this process and, where the kernel allows it, from the page cache.

        Whole pages only: the first and the last one may hold a neighbour that is in use.
        """
        for part in parts:
            advice.page_out(*self._range(part))
            start, length = advice.inner_pages(*self._range(part))
            # Pages that page-out may not touch (another process maps them too) leave this process all the same.
            with contextlib.suppress(OSError):
                syscalls.madvise(start, length, mmap.MADV_DONTNEED)

    def _range(self, part: Part) -> tuple[int, int]:
        """First address of rows, and their bytes. Advice on them is a hint, so a refusal is no error."""
        place = self._places[part.name]
        first, nbytes = part.span(place)
        return self._files[place.file].range_of(part.name).address + first, nbytes
