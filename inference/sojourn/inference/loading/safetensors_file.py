"""One safetensors file, known from its header alone and checked against the size of the file.

The format: 8 bytes little-endian length N, N bytes of JSON, then the tensors' bytes without holes. Nothing of it is
trusted: the length is compared with the limit and the file before anything is read or allocated, and every byte range
with its dtype and shape. What passes can be mapped without a page missing behind any tensor: a shard shorter than its
header says would otherwise be read as zeros, or kill the process with SIGBUS.
"""

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.inference.loading import errors
from sojourn.inference.loading.errors import WeightsError

LENGTH_BYTES = 8
# The limit of the reference implementation; a header of 61 GB of weights in 1 000 tensors is about 0.1 MB.
MAX_HEADER_BYTES = 100_000_000
_METADATA_KEY = "__metadata__"
_FETCH_AGAIN = "fetch the file again"

# Bits of one element; the names are those of the format.
DTYPE_BITS: Mapping[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """One tensor of a file.

    Attributes:
        name: Its key in the header.
        dtype: Its dtype as the format spells it, such as "BF16".
        shape: Its shape.
        begin, end: Its bytes, counted from the file's data offset.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Number of bytes."""
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class FileIdentity:
    """What tells one state of a file from another; times in nanoseconds."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> "FileIdentity":
        """Takes it from the result of stat or fstat."""
        return cls(
            device=stat.st_dev,
            inode=stat.st_ino,
            size=stat.st_size,
            mtime_ns=stat.st_mtime_ns,
            ctime_ns=stat.st_ctime_ns,
        )


@dataclass(frozen=True, kw_only=True)
class SafetensorsFile:
    """One checked file.

    Attributes:
        path: Where it is.
        identity: What it was when it was checked.
        data_offset: Where the tensors' bytes begin.
        tensors: By name, in the order of their bytes.
        metadata: The header's free-form entries.
    """

    path: Path
    identity: FileIdentity
    data_offset: int
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]


def read_safetensors(path: Path) -> SafetensorsFile:
    """Reads and checks the header of `path`.

    Raises:
        WeightsError: The file is not a whole safetensors file; the reason says why.
    """
    try:
        with path.open("rb") as file:
            identity = FileIdentity.of(os.fstat(file.fileno()))
            head = file.read(512)
            header_bytes = _checked_header_bytes(path, head, identity.size)
            file.seek(LENGTH_BYTES)
            raw = file.read(header_bytes)
    except OSError as error:
        raise WeightsError(
            errors.WEIGHTS_UNREADABLE, path, "the weight file", expected="a readable file",
            found=error.strerror or str(error), remedy="check the path and its permissions",
        ) from error  # fmt: skip
    entries = _parse_header(path, raw)
    metadata = _checked_metadata(path, entries.pop(_METADATA_KEY, {}))
    tensors = sorted((_tensor(path, name, entry) for name, entry in entries.items()), key=lambda t: (t.begin, t.end))
    data_offset = LENGTH_BYTES + header_bytes
    _check_layout(path, tensors, data_bytes=identity.size - data_offset)
    return SafetensorsFile(
        path=path,
        identity=identity,
        data_offset=data_offset,
        tensors={tensor.name: tensor for tensor in tensors},
        metadata=metadata,
    )


def _checked_header_bytes(path: Path, head: bytes, file_bytes: int) -> int:
    """Returns the length of the header, having compared it with the limit and with the file."""
    _refuse_foreign_formats(path, head)
    if file_bytes < LENGTH_BYTES:
        raise _truncated(path, "the file", LENGTH_BYTES, file_bytes)
    (header_bytes,) = struct.unpack("<Q", head[:LENGTH_BYTES])
    if header_bytes == 0:
        raise _invalid(path, "the header's length", expected="at least 2 bytes", found="0 bytes")
    if header_bytes > MAX_HEADER_BYTES:
        raise WeightsError(
            errors.WEIGHTS_HEADER_TOO_LARGE, path, "the header's length", expected=f"at most {MAX_HEADER_BYTES} bytes",
            found=f"{header_bytes} bytes", remedy="this is hardly a safetensors file; fetch it again",
        )  # fmt: skip
    if LENGTH_BYTES + header_bytes > file_bytes:
        raise _truncated(path, "the file with its header", LENGTH_BYTES + header_bytes, file_bytes)
    return int(header_bytes)


def _refuse_foreign_formats(path: Path, head: bytes) -> None:
    """Names the files that are put in place of weights most often."""
    text = head.lstrip().lower()
    if head.startswith(b"version https://git-lfs"):
        raise _foreign(
            path, errors.WEIGHTS_LFS_POINTER, "a git-lfs pointer", "run `git lfs pull` where the folder was cloned"
        )
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise _foreign(
            path, errors.WEIGHTS_HTML, "an HTML or XML page", "the download answered with a page; log in, fetch again"
        )
    if head.startswith(b"PK\x03\x04"):
        raise _foreign(path, errors.WEIGHTS_NOT_SAFETENSORS, "a zip archive (a torch checkpoint?)", _CONVERT)
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and head[8:9] != b"{":
        raise _foreign(path, errors.WEIGHTS_NOT_SAFETENSORS, "a pickle (a torch checkpoint?)", _CONVERT)


_CONVERT = "convert it to safetensors; pickles are never loaded"


def _foreign(path: Path, reason: str, found: str, remedy: str) -> WeightsError:
    return WeightsError(reason, path, "the weight file", expected="a safetensors file", found=found, remedy=remedy)


def _truncated(path: Path, what: str, expected: int, found: int) -> WeightsError:
    return WeightsError(
        errors.WEIGHTS_TRUNCATED, path, what, expected=f"{expected} bytes", found=f"{found} bytes", remedy=_FETCH_AGAIN
    )


def _invalid(path: Path, what: str, *, expected: str, found: str) -> WeightsError:
    return WeightsError(errors.WEIGHTS_HEADER_INVALID, path, what, expected=expected, found=found, remedy=_FETCH_AGAIN)


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    """Parses the JSON, refusing duplicate keys, which a plain dict would lose."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise _invalid(path, "the header's keys", expected="each key once", found=f"{twice!r} twice")
        return dict(pairs)

    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise _invalid(path, "the header", expected="UTF-8 JSON", found=f"{raw[:24]!r}… ({error})") from error
    if not isinstance(entries, dict):
        raise _invalid(path, "the header", expected="a JSON object", found=type(entries).__name__)
    return entries


def _checked_metadata(path: Path, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _invalid(path, _METADATA_KEY, expected="an object of strings", found=repr(metadata)[:80])
    return metadata


def _tensor(path: Path, name: str, entry: Any) -> TensorInfo:
    """Checks one entry in itself: its fields, its dtype, and its bytes against its shape."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _invalid(path, f"tensor {name!r}", expected="dtype, shape and data_offsets", found=f"{str(entry)[:80]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _invalid(path, f"dtype of tensor {name!r}", expected="a dtype of the format", found=repr(dtype)[:80])
    if not _are_sizes(shape):
        raise _invalid(
            path, f"shape of tensor {name!r}", expected="a list of non-negative integers", found=f"{str(shape)[:80]}"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _invalid(
            path, f"data_offsets of tensor {name!r}", expected="[begin, end] in order", found=f"{str(offsets)[:80]}"
        )
    tensor = TensorInfo(name=name, dtype=dtype, shape=tuple(shape), begin=offsets[0], end=offsets[1])
    bits = tensor.elements * DTYPE_BITS[dtype]
    if bits % 8 or bits // 8 != tensor.size_bytes:
        raise _invalid(
            path,
            f"bytes of tensor {name!r}",
            expected=f"{bits / 8:.10g} for {dtype} {list(shape)}",
            found=f"{tensor.size_bytes}",
        )
    return tensor


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_layout(path: Path, tensors: list[TensorInfo], *, data_bytes: int) -> None:
    """Checks that the tensors tile the data: no overlap, no hole, nothing missing, nothing left over."""
    cursor = 0
    for tensor in tensors:
        if tensor.begin != cursor:
            fault = "a hole" if tensor.begin > cursor else "an overlap"
            raise _invalid(
                path,
                f"begin of tensor {tensor.name!r}",
                expected=f"{cursor}",
                found=f"{tensor.begin}, which is {fault}",
            )
        cursor = tensor.end
    if cursor > data_bytes:
        raise _truncated(path, "bytes of the tensors", cursor, data_bytes)
    if cursor < data_bytes:
        raise WeightsError(
            errors.WEIGHTS_TRAILING_BYTES, path, "bytes of the tensors", expected=f"{cursor} bytes",
            found=f"{data_bytes} bytes", remedy=_FETCH_AGAIN,
        )  # fmt: skip
