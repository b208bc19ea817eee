"""Weights in the files of the checkpoint: whole tensors, parts of them, and a page cache that forgets."""

import ctypes
import mmap
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sojourn.inference.adaln.refusals import WeightsChanged
from sojourn.inference.adaln.weights import Part, WeightFiles
from sojourn.inference.loading.safetensors_file import read_safetensors

ROWS, COLUMNS = 2048, 1024


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {name: torch.randn(ROWS, COLUMNS) for name in ("a.weight", "b.weight", "c.weight")}
    save_file({**tensors, "a.bias": torch.randn(ROWS)}, tmp_path / "model.safetensors")
    with (tmp_path / "model.safetensors").open("rb") as file:
        os.fsync(file.fileno())
    return tmp_path / "model.safetensors"


@pytest.fixture
def weights(path: Path) -> WeightFiles:
    return WeightFiles([read_safetensors(path)])


def buffer() -> torch.Tensor:
    return torch.empty(ROWS * COLUMNS * 4 + 64, dtype=torch.uint8)


def in_page_cache(path: Path) -> int:
    """Bytes of a file in the page cache."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    pages = -(-len(mapped) // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), vector) == 0
    return sum(page & 1 for page in vector) * mmap.PAGESIZE


def test_a_tensor_is_what_the_file_holds(weights: WeightFiles, path: Path) -> None:
    for name, expected in load_file(path).items():
        read = weights.read(Part(name), buffer())
        assert read.dtype == expected.dtype
        assert torch.equal(read, expected)


def test_a_part_is_some_rows(weights: WeightFiles, path: Path) -> None:
    whole = load_file(path)
    assert torch.equal(weights.read(Part("b.weight", 100, 300), buffer()), whole["b.weight"][100:300])
    assert torch.equal(weights.read(Part("a.bias", 5, 9), buffer()), whole["a.bias"][5:9])


def test_the_buffer_is_what_is_handed_out(weights: WeightFiles) -> None:
    one = buffer()
    assert weights.read(Part("b.weight"), one).data_ptr() == one.data_ptr()


def test_the_page_cache_is_left_as_it_was_found(weights: WeightFiles, path: Path) -> None:
    size = ROWS * COLUMNS * 4
    weights.read(Part("a.weight"), buffer())
    weights.forget([Part("a.weight")])
    there = in_page_cache(path)
    assert there >= 3 * size
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    weights.read(Part("b.weight"), buffer())
    before = in_page_cache(path)  # with what the kernel has read ahead
    assert before >= size
    weights.forget([Part("b.weight")])
    assert before - in_page_cache(path) >= 0.9 * size


def test_a_file_that_has_become_shorter_is_no_tensor_of_zeros(weights: WeightFiles, path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)
    last = max(weights.places, key=lambda name: weights.places[name].offset)
    with pytest.raises(WeightsChanged, match="ends within"):
        weights.read(Part(last), buffer())


def test_a_file_that_is_not_the_one_that_was_checked_is_not_opened(path: Path) -> None:
    checked = read_safetensors(path)
    save_file({"a.weight": torch.zeros(3)}, path)
    with pytest.raises(WeightsChanged, match="not the one that was checked"):
        WeightFiles([checked])
