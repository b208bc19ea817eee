"""Weights in the files of the checkpoint: whole tensors, parts of them, and the page cache left as it was."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sojourn.inference.adaln.refusals import WeightsChanged
from sojourn.inference.adaln.weights import Part, WeightFiles
from sojourn.inference.loading.safetensors_file import read_safetensors
from sojourn.residencyd.kernel.errors import NotOwner, NotSupported
from sojourn.residencyd.kernel.page_cache import CacheCounts

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


def read(weights: WeightFiles, part: Part) -> torch.Tensor:
    """Rows as the stored tensor has them."""
    place = weights.places[part.name]
    stored = bytearray(part.span(place)[1])
    weights.read(part, memoryview(stored))
    assert place.dtype is not None
    return torch.frombuffer(stored, dtype=place.dtype).view(-1, *place.shape[1:])


def test_a_tensor_is_what_the_file_holds(weights: WeightFiles, path: Path) -> None:
    for name, expected in load_file(path).items():
        stored = read(weights, Part(name))
        assert stored.dtype == expected.dtype
        assert torch.equal(stored, expected)


def test_a_part_is_some_rows(weights: WeightFiles, path: Path) -> None:
    whole = load_file(path)
    assert torch.equal(read(weights, Part("b.weight", 100, 300)), whole["b.weight"][100:300])
    assert torch.equal(read(weights, Part("a.bias", 5, 9)), whole["a.bias"][5:9])


def test_what_is_not_in_the_page_cache_is_asked_for_and_dropped(weights: WeightFiles) -> None:
    there, asked = Part("a.weight"), Part("b.weight", 1024, 2048)
    for part in (there, asked):
        read(weights, part)
    assert weights.absent([there, asked]) == []
    weights.forget([asked])
    assert weights.absent([there, asked]) == [asked]
    weights.will_need([asked])
    read(weights, asked)
    assert weights.absent([there, asked]) == []


def test_where_the_exact_answer_is_withheld_bytes_are_sampled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlay file systems answer 0 whatever is there, and some kernels and owners refuse."""
    for answer in (
        CacheCounts(0, 0, 0),
        NotOwner("cachestat", why="told so"),
        NotSupported("cachestat", why="told so"),
    ):

        def exact(*_: object, answer: object = answer, **__: object) -> object:
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr("sojourn.inference.adaln.weights.page_cache.cachestat", exact)
        weights = WeightFiles([read_safetensors(path)])
        read(weights, Part("a.weight"))
        assert weights.absent([Part("a.weight")]) == []
        weights.forget([Part("a.weight")])
        assert weights.absent([Part("a.weight")]) == [Part("a.weight")]


def test_a_file_system_that_cannot_tell_costs_nothing(weights: WeightFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotSupported("RWF_NOWAIT", why="this file system does not know it")

    for name in ("cachestat", "sample_all"):
        monkeypatch.setattr(f"sojourn.inference.adaln.weights.page_cache.{name}", refuse)
    assert weights.absent([Part("a.bias")]) == [Part("a.bias")]
    weights.will_need([Part("a.bias")])
    assert read(weights, Part("a.bias")).shape == (ROWS,)
    weights.forget([Part("a.bias")])


def test_a_file_that_has_become_shorter_is_no_tensor_of_zeros(weights: WeightFiles, path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)
    last = max(weights.places, key=lambda name: weights.places[name].offset)
    with pytest.raises(WeightsChanged, match="ends within"):
        read(weights, Part(last))


def test_a_file_that_is_not_the_one_that_was_checked_is_not_opened(path: Path) -> None:
    checked = read_safetensors(path)
    save_file({"a.weight": torch.zeros(3)}, path)
    with pytest.raises(WeightsChanged, match="not the one that was checked"):
        WeightFiles([checked])


def test_what_is_not_in_the_page_cache_is_not_waited_for(weights: WeightFiles, path: Path) -> None:
    part = Part("b.weight")
    stored = memoryview(bytearray(part.span(weights.places[part.name])[1]))
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert not weights.read_cached(part, stored)
    expected = read(weights, part)
    assert weights.read_cached(part, stored)
    assert torch.equal(torch.frombuffer(stored, dtype=torch.float32).view(ROWS, COLUMNS), expected)
