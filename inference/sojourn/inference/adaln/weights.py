"""The projections' weights where they lie: in the files of the checkpoint.

They are read into a buffer that serves one layer after another. The mapping that the loader made would do as well, but
putting pages into the page tables and taking them out again costs more than the copy, which also leaves a layer where
the matrix products find it fastest, in the processor's cache: over 370 MB in the page cache the products of one plan
took 0.037 s so, 0.060 s from the mapping and 0.046 s on weights that lay in memory anyway (one thread).
"""

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from typing import Protocol

import torch
from sojourn.inference.adaln.refusals import WeightsChanged
from sojourn.inference.loading.mapping import TORCH_DTYPES
from sojourn.inference.loading.safetensors_file import FileIdentity, SafetensorsFile
from sojourn.residencyd.kernel import page_cache
from sojourn.residencyd.kernel.errors import NotOwner, NotSupported

# Single bytes to look for in the page cache before a read; a tensor is there as a whole or hardly at all.
_PROBES = 8


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
        """First byte within the file, and bytes."""
        rows = place.shape[0] if place.shape else 1
        row_bytes = place.nbytes // max(1, rows)
        last = rows if self.last is None else self.last
        return place.offset + self.first * row_bytes, (last - self.first) * row_bytes


class WeightSource(Protocol):
    """Reads tensors by name, from any thread."""

    @property
    def places(self) -> Mapping[str, Place]:
        """Every tensor that the source has."""

    def check(self) -> None:
        """Raises WeightsChanged if the source is no longer what it was."""

    def absent(self, parts: Iterable[Part]) -> list[Part]:
        """Those of the parts that are not wholly in memory: the storage would have to read them."""

    def read(self, part: Part, into: memoryview) -> None:
        """Reads rows of a tensor, as stored.

        Args:
            part: Which rows.
            into: As many bytes.
        """

    def read_cached(self, part: Part, into: memoryview) -> bool:
        """As `read` where all of it is in memory; False, at once, where the storage would have to read."""

    def forget(self, parts: Iterable[Part]) -> None:
        """Lets go of what the system keeps of rows that were read."""


class WeightFiles:
    """The checked files of one component, open for reading.

    Raises:
        WeightsChanged: A file is no longer the one that was checked.
    """

    def __init__(self, files: Sequence[SafetensorsFile]) -> None:
        self._files = tuple(files)
        self._opened = [_open(file) for file in self._files]
        self._tells = [_tells(opened.fileno()) for opened in self._opened]
        self._places = {
            name: Place(
                file=index,
                offset=file.data_offset + info.begin,
                nbytes=info.size_bytes,
                shape=info.shape,
                dtype=TORCH_DTYPES.get(info.dtype),
            )
            for index, file in enumerate(self._files)
            for name, info in file.tensors.items()
        }

    @property
    def identities(self) -> tuple[FileIdentity, ...]:
        """What each file was when it was checked."""
        return tuple(file.identity for file in self._files)

    @property
    def places(self) -> Mapping[str, Place]:
        """Every tensor of the files."""
        return self._places

    def check(self) -> None:
        """Raises WeightsChanged if a file was replaced or written to since it was checked."""
        for file in self._files:
            try:
                now = file.path.stat()
            except OSError as error:
                raise WeightsChanged(f"{file.path}: {error.strerror}; it was there at the start") from error
            _check_same(file, now)

    def absent(self, parts: Iterable[Part]) -> list[Part]:
        """Those of the parts that are not in the page cache; those, too, of which the file system cannot tell."""
        by_file: dict[int, list[Part]] = {}
        for part in parts:
            by_file.setdefault(self._places[part.name].file, []).append(part)
        return [part for file, asked in by_file.items() for part in self._absent_of(file, asked)]

    def _absent_of(self, file: int, parts: Sequence[Part]) -> list[Part]:
        handle = self._opened[file].fileno()
        spans = [part.span(self._places[part.name]) for part in parts]
        try:
            if self._tells[file]:
                found = [page_cache.cachestat(handle, offset=at, length=nbytes).cached_bytes for at, nbytes in spans]
            else:
                found = [estimate.cached_bytes for estimate in page_cache.sample_all(handle, spans, samples=_PROBES)]
        except (NotSupported, NotOwner):
            return list(parts)
        return [part for part, (_, nbytes), cached in zip(parts, spans, found, strict=True) if cached < nbytes]

    def will_need(self, parts: Iterable[Part]) -> None:
        """Has the storage begin to read rows into the page cache."""
        self._advise(parts, os.POSIX_FADV_WILLNEED)

    def forget(self, parts: Iterable[Part]) -> None:
        """Drops rows from the page cache, but for pages that somebody maps."""
        self._advise(parts, os.POSIX_FADV_DONTNEED)

    def read(self, part: Part, into: memoryview) -> None:
        """Reads rows of a tensor.

        Raises:
            WeightsChanged: The file has become shorter.
        """
        handle, offset, nbytes = self._range(part)
        done = 0
        while done < nbytes:
            count = os.preadv(handle, [into[done:nbytes]], offset + done)
            if count == 0:
                path = self._files[self._places[part.name].file].path
                raise WeightsChanged(f"{path}: ends within {part.name}; load the model again")
            done += count

    def read_cached(self, part: Part, into: memoryview) -> bool:
        """Reads rows of a tensor that the page cache holds; False for others, or where the file system cannot tell."""
        handle, offset, nbytes = self._range(part)
        try:
            return os.preadv(handle, [into[:nbytes]], offset, os.RWF_NOWAIT) == nbytes
        except OSError:
            return False

    def _advise(self, parts: Iterable[Part], advice: int) -> None:
        for part in parts:
            with contextlib.suppress(OSError):
                os.posix_fadvise(*self._range(part), advice)

    def _range(self, part: Part) -> tuple[int, int, int]:
        """Descriptor, first byte and bytes of rows."""
        place = self._places[part.name]
        return self._opened[place.file].fileno(), *part.span(place)


def _tells(handle: int) -> bool:
    """Whether the kernel knows what of a file is in the page cache. On overlayfs it says nothing, whatever is there."""
    os.pread(handle, 1, 0)
    try:
        return page_cache.cachestat(handle, length=1).cached_bytes > 0
    except (NotSupported, NotOwner):
        return False


def _open(file: SafetensorsFile) -> FileIO:
    opened = file.path.open("rb", buffering=0)
    _check_same(file, os.fstat(opened.fileno()))
    return opened


def _check_same(file: SafetensorsFile, now: os.stat_result) -> None:
    if FileIdentity.of(now) != file.identity:
        raise WeightsChanged(f"{file.path}: the file is not the one that was checked; load the model again")
