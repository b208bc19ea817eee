import contextlib
import json
import mmap
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from sojourn.inference.errors import ModelError
from sojourn.inference.loading.errors import WeightsError
from sojourn.inference.loading.safetensors_file import MAX_HEADER_BYTES, read_safetensors

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def pack(header: bytes | dict[str, Any], data: bytes = bytes(24), *, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def with_entry(**changes: Any) -> bytes:
    return pack({"w": ENTRY | changes})


def two(first: list[int], second: list[int]) -> bytes:
    entries = {
        "a": {"dtype": "U8", "shape": [first[1] - first[0]], "data_offsets": first},
        "b": {"dtype": "U8", "shape": [second[1] - second[0]], "data_offsets": second},
    }
    return pack(entries)


BAD: dict[str, tuple[bytes, str, str]] = {
    # name: content, reason, what the message has to say
    "empty file": (b"", "WeightsTruncated", "expected 8 bytes, found 0 bytes"),
    "seven bytes": (b"1234567", "WeightsTruncated", "expected 8 bytes, found 7 bytes"),
    "length 0": (pack(b"", b"x" * 32), "WeightsHeaderInvalid", "found 0 bytes"),
    "length 2^63": (pack({"w": ENTRY}, length=2**63), "WeightsHeaderTooLarge", f"found {2**63} bytes"),
    "length over the limit": (
        pack({"w": ENTRY}, length=MAX_HEADER_BYTES + 1),
        "WeightsHeaderTooLarge",
        f"expected at most {MAX_HEADER_BYTES} bytes, found {MAX_HEADER_BYTES + 1}",
    ),
    "length over the file": (pack(b"{}", b"", length=90_000_000), "WeightsTruncated", "expected 90000008 bytes"),
    "HTML": (b"\n<!DOCTYPE html><html><body>403</body></html>", "WeightsHtml", "HTML"),
    "XML": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "WeightsHtml", "HTML or XML page"),
    "git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n",
        "WeightsLfsPointer",
        "git lfs pull",
    ),
    "zip": (b"PK\x03\x04" + bytes(64), "WeightsNotSafetensors", "zip archive"),
    "pickle": (b"\x80\x02}q\x00X\x06\x00\x00\x00weight" + bytes(64), "WeightsNotSafetensors", "pickle"),
    "not JSON": (pack(b"{not json}", bytes(24)), "WeightsHeaderInvalid", "expected UTF-8 JSON"),
    "not UTF-8": (pack(b'{"\xff": 1}', bytes(24)), "WeightsHeaderInvalid", "expected UTF-8 JSON"),
    "nested too deep": (pack(b"[" * 100_000, b""), "WeightsHeaderInvalid", "expected UTF-8 JSON"),
    "a list": (pack(b"[1, 2]", b""), "WeightsHeaderInvalid", "expected a JSON object, found list"),
    "duplicate keys": (
        pack(b'{"w": 1, "w": 2}', b""),
        "WeightsHeaderInvalid",
        "expected each key once, found 'w' twice",
    ),
    "metadata not strings": (pack({"__metadata__": {"a": 1}}, b""), "WeightsHeaderInvalid", "an object of strings"),
    "unknown dtype": (with_entry(dtype="F33"), "WeightsHeaderInvalid", "found 'F33'"),
    "dtype not a string": (with_entry(dtype=["F32"]), "WeightsHeaderInvalid", "dtype of tensor 'w'"),
    "negative size": (with_entry(shape=[-2, -3]), "WeightsHeaderInvalid", "found [-2, -3]"),
    "boolean size": (with_entry(shape=[True, 6]), "WeightsHeaderInvalid", "found [True, 6]"),
    "field missing": (pack({"w": {"dtype": "F32"}}), "WeightsHeaderInvalid", "expected dtype, shape and data_offsets"),
    "one offset": (with_entry(data_offsets=[24]), "WeightsHeaderInvalid", "found [24]"),
    "offsets out of order": (with_entry(data_offsets=[24, 0]), "WeightsHeaderInvalid", "found [24, 0]"),
    "bytes not of the shape": (
        with_entry(shape=[2, 4]),
        "WeightsHeaderInvalid",
        "expected 32 for F32 [2, 4], found 24",
    ),
    "bytes not of the dtype": (
        with_entry(dtype="BF16"),
        "WeightsHeaderInvalid",
        "expected 12 for BF16 [2, 3], found 24",
    ),
    "overflowing shape": (with_entry(shape=[2**62, 2**62]), "WeightsHeaderInvalid", "bytes of tensor 'w'"),
    "overlap": (two([0, 14], [12, 24]), "WeightsHeaderInvalid", "expected 14, found 12, which is an overlap"),
    "hole": (two([0, 10], [12, 24]), "WeightsHeaderInvalid", "expected 10, found 12, which is a hole"),
    "hole at the begin": (two([2, 10], [10, 24]), "WeightsHeaderInvalid", "expected 0, found 2, which is a hole"),
    "trailing bytes": (pack({"w": ENTRY}, bytes(25)), "WeightsTrailingBytes", "expected 24 bytes, found 25 bytes"),
}


@pytest.mark.parametrize(("content", "reason", "message"), BAD.values(), ids=BAD)
def test_bad_file_is_refused_with_file_reason_expected_and_found(
    tmp_path: Path, content: bytes, reason: str, message: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        read_safetensors(path)
    assert isinstance(caught.value, ModelError)
    assert caught.value.reason == reason
    assert caught.value.path == path
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("cut", [1, mmap.PAGESIZE, "half"])
def test_file_shorter_than_its_header_says_is_refused_with_both_sizes(tmp_path: Path, cut: int | str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(3 * mmap.PAGESIZE, dtype=torch.uint8)}, path)
    whole = path.stat().st_size
    missing = 3 * mmap.PAGESIZE // 2 if cut == "half" else int(cut)
    with path.open("r+b") as file:
        file.truncate(whole - missing)
    with pytest.raises(WeightsError) as caught:
        read_safetensors(path)
    assert caught.value.reason == "WeightsTruncated"
    assert caught.value.expected == f"{3 * mmap.PAGESIZE} bytes"
    assert caught.value.found == f"{3 * mmap.PAGESIZE - missing} bytes"


def test_lying_length_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(pack(b"{}", b"", length=MAX_HEADER_BYTES))
    tracemalloc.start()
    with pytest.raises(WeightsError):
        read_safetensors(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.symlink_to("nowhere")])
def test_unreadable_path_is_a_typed_error(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "model.safetensors")
    with pytest.raises(WeightsError) as caught:
        read_safetensors(tmp_path / "model.safetensors")
    assert caught.value.reason == "WeightsUnreadable"


def test_file_with_metadata_only_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(pack({"__metadata__": {"format": "pt"}}, b""))
    file = read_safetensors(path)
    assert dict(file.tensors) == {}
    assert file.metadata == {"format": "pt"}


def test_odd_names_and_empty_tensors_and_scalars_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"ünï.权重 \n\"'": torch.ones(2), "": torch.tensor(3.0), "none": torch.zeros(0, 5, dtype=torch.int8)}
    save_file(tensors, path)
    found = read_safetensors(path).tensors
    assert {name: info.shape for name, info in found.items()} == {n: tuple(t.shape) for n, t in tensors.items()}


def test_padded_header_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(pack(json.dumps({"w": ENTRY}).encode() + b" " * 17))
    assert read_safetensors(path).tensors["w"].size_bytes == 24


@given(st.binary(max_size=300))
def test_arbitrary_bytes_end_in_a_typed_error_or_a_file(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "arbitrary.safetensors"
    for candidate in (content, struct.pack("<Q", len(content)) + content):
        path.write_bytes(candidate)
        with contextlib.suppress(WeightsError):
            read_safetensors(path)
