"""The projections' weights where they lie: in the mapped checkpoint.

Nothing is copied and nothing stays: a tensor is a view of the mapping, its pages come in when they are prefetched or
touched, and go out again when it is released.
"""

import ctypes
import json
import mmap
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from sojourn.inference.adaln.refusals import WeightsChanged
from sojourn.inference.errors import ModelError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format itself."""

# Advice values of Linux (include/uapi/asm-generic/mman-common.h); mmap exports only some of them.
_MADV_DONTNEED = 4
_MADV_PAGEOUT = 21
_MADV_POPULATE_READ = 22

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int

FileIdentity = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Place:
    """Where a tensor lies.

    Attributes:
        file: Index of its file.
        start: First byte within the file.
        nbytes: Its bytes.
        shape, dtype: As stored.
    """

    file: int
    start: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


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
        return place.start + self.first * row_bytes, (last - self.first) * row_bytes


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
    """The safetensors files of one component's folder, mapped read-only.

    Raises:
        ModelError: A file is missing, truncated or not what its header says.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = tuple(files)
        self._places: dict[str, Place] = {}
        self._maps: list[mmap.mmap] = []
        self._addresses: list[int] = []
        self._identities: list[FileIdentity] = []
        for index, path in enumerate(self._files):
            self._open(index, path)

    @classmethod
    def of_folder(cls, folder: Path) -> "MappedWeights":
        """The weights of a diffusers component folder."""
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError("WeightsMissing", folder, "holds no safetensors file")
        return cls(files)

    def _open(self, index: int, path: Path) -> None:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            header, data_start = _read_header(path, file.read(8), file, stat.st_size)
            mapped = mmap.mmap(file.fileno(), stat.st_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        self._identities.append(identity(stat))
        self._maps.append(mapped)
        self._addresses.append(_tensor(mapped, 0, stat.st_size, torch.uint8).data_ptr())
        self._places.update(_places(path, index, header, data_start, stat.st_size))

    @property
    def files(self) -> tuple[Path, ...]:
        """The mapped files."""
        return self._files

    @property
    def identities(self) -> tuple[FileIdentity, ...]:
        """Device, inode, size, mtime and ctime of each file when it was mapped."""
        return tuple(self._identities)

    @property
    def places(self) -> Mapping[str, Place]:
        """Every tensor of the files."""
        return self._places

    def check(self) -> None:
        """Raises WeightsChanged if a file was replaced or written to since it was mapped."""
        for path, known in zip(self._files, self._identities, strict=True):
            try:
                now = identity(path.stat())
            except OSError as error:
                raise WeightsChanged(f"{path}: {error.strerror}; it was there when the model was loaded") from error
            if now != known:
                raise WeightsChanged(f"{path}: the file is not the one that was mapped; load the model again")

    def tensor(self, part: Part) -> torch.Tensor:
        """A view of the mapping."""
        place = self._places[part.name]
        start, nbytes = part.span(place)
        return _tensor(self._maps[place.file], start, nbytes, place.dtype).view(-1, *place.shape[1:])

    def prefetch(self, parts: Iterable[Part]) -> None:
        """Reads pages in and maps them."""
        for part in parts:
            self._advise(part, _MADV_POPULATE_READ)

    def release(self, parts: Iterable[Part]) -> None:
        """Lets pages go, from this process and, where the kernel allows it, from the page cache."""
        for part in parts:
            self._advise(part, _MADV_PAGEOUT)
            self._advise(part, _MADV_DONTNEED)

    def _advise(self, part: Part, advice: int) -> None:
        """Advice is a hint: where the kernel does not take it, pages come in by touch and go out under pressure."""
        place = self._places[part.name]
        start, nbytes = part.span(place)
        first = (self._addresses[place.file] + start) // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(first, self._addresses[place.file] + start + nbytes - first, advice)


def identity(stat: os.stat_result) -> FileIdentity:
    """What tells a file from another one and from a later state of itself."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _read_header(path: Path, size: bytes, file: object, file_bytes: int) -> tuple[dict[str, object], int]:
    length = int.from_bytes(size, "little")
    if len(size) < 8 or length > min(_MAX_HEADER_BYTES, file_bytes - 8):
        raise ModelError("WeightsTruncated", path, f"{file_bytes} bytes do not hold the header they announce")
    try:
        header = json.loads(file.read(length))  # type: ignore[attr-defined]
    except ValueError as error:
        raise ModelError("WeightsCorrupt", path, f"the header is not JSON: {error}") from error
    return header, 8 + length


def _places(path: Path, index: int, header: Mapping[str, object], data_start: int, file_bytes: int) -> dict[str, Place]:
    places = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        begin, end = info["data_offsets"]  # type: ignore[index]
        dtype = _DTYPES.get(info["dtype"])  # type: ignore[index]
        if dtype is None:
            continue
        if data_start + end > file_bytes:
            raise ModelError("WeightsTruncated", path, f"{name} ends at byte {data_start + end} of {file_bytes}")
        places[name] = Place(index, data_start + begin, end - begin, tuple(info["shape"]), dtype)  # type: ignore[index]
    return places


def _tensor(mapped: mmap.mmap, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    with warnings.catch_warnings():
        # torch warns that the memory cannot be written to, which is what a read-only mapping is for.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(mapped, dtype=dtype, count=nbytes // dtype.itemsize, offset=start)
