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

    def will_need(self, parts: Iterable[Part]) -> None:
        """Has the storage begin to read rows."""

    def read(self, part: Part, buffer: torch.Tensor) -> torch.Tensor:
        """Reads rows of a tensor into the first bytes of a buffer.

        Args:
            part: Which rows.
            buffer: uint8 on the host, of at least as many bytes.

        Returns:
            The rows: a view of the buffer in their stored dtype.
        """

    def read_cached(self, part: Part, buffer: torch.Tensor) -> torch.Tensor | None:
        """As `read` where all of it is in memory; None, at once, where the storage would have to read."""

    def forget(self, parts: Iterable[Part]) -> None:
        """Lets go of what the system keeps of rows that were read."""


class WeightFiles:
    """The checked files of one component, open for reading.

    Raises:
        WeightsChanged: A file is no longer the one that was checked.
    """

    def __init__(self, files: Sequence[SafetensorsFile]) -> None:
        self._files = tuple(files)
        self._opened = [file.path.open("rb", buffering=0) for file in self._files]
        for file, opened in zip(self._files, self._opened, strict=True):
            _check_same(file, os.fstat(opened.fileno()))
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
        """Those of the parts that are not in the page cache."""
        return [part for part in parts if not _is_cached(*self._range(part))]

    def will_need(self, parts: Iterable[Part]) -> None:
        """Has the storage begin to read rows into the page cache."""
        self._advise(parts, os.POSIX_FADV_WILLNEED)

    def forget(self, parts: Iterable[Part]) -> None:
        """Drops rows from the page cache, but for pages that somebody maps."""
        self._advise(parts, os.POSIX_FADV_DONTNEED)

    def read(self, part: Part, buffer: torch.Tensor) -> torch.Tensor:
        """Reads rows of a tensor.

        Raises:
            WeightsChanged: The file has become shorter.
        """
        handle, offset, nbytes = self._range(part)
        target = memoryview(buffer.numpy())[:nbytes]
        done = 0
        while done < nbytes:
            count = os.preadv(handle, [target[done:]], offset + done)
            if count == 0:
                path = self._files[self._places[part.name].file].path
                raise WeightsChanged(f"{path}: ends within {part.name}; load the model again")
            done += count
        return self._rows(part, buffer[:nbytes])

    def read_cached(self, part: Part, buffer: torch.Tensor) -> torch.Tensor | None:
        """Reads rows of a tensor that the page cache holds; None for others, or where the file system cannot tell."""
        handle, offset, nbytes = self._range(part)
        target = memoryview(buffer.numpy())[:nbytes]
        try:
            count = os.preadv(handle, [target], offset, os.RWF_NOWAIT)
        except OSError:
            return None
        return self._rows(part, buffer[:nbytes]) if count == nbytes else None

    def _rows(self, part: Part, stored: torch.Tensor) -> torch.Tensor:
        place = self._places[part.name]
        return stored.view(place.dtype).view(-1, *place.shape[1:])

    def _advise(self, parts: Iterable[Part], advice: int) -> None:
        for part in parts:
            with contextlib.suppress(OSError):
                os.posix_fadvise(*self._range(part), advice)

    def _range(self, part: Part) -> tuple[int, int, int]:
        """Descriptor, first byte and bytes of rows."""
        place = self._places[part.name]
        return self._opened[place.file].fileno(), *part.span(place)


def _is_cached(handle: int, offset: int, nbytes: int) -> bool:
    """Whether a range is in the page cache; taken not to be where the file system cannot tell."""
    with contextlib.suppress(NotSupported, NotOwner):
        if page_cache.cachestat(handle, offset=offset, length=nbytes).cached_bytes >= nbytes:
            return True
    # On overlayfs the exact answer is 0, whatever is there.
    try:
        return page_cache.sample(handle, offset=offset, length=nbytes, samples=_PROBES).cached_bytes == nbytes
    except NotSupported:
        return False


def _check_same(file: SafetensorsFile, now: os.stat_result) -> None:
    if FileIdentity.of(now) != file.identity:
        raise WeightsChanged(f"{file.path}: the file is not the one that was checked; load the model again")
