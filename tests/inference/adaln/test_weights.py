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


def buffer() -> torch.Tensor:
    return torch.empty(ROWS * COLUMNS * 4 + 64, dtype=torch.uint8)


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


def test_what_is_not_in_the_page_cache_is_asked_for_and_dropped(weights: WeightFiles) -> None:
    there, asked = Part("a.weight"), Part("b.weight", 1024, 2048)
    for part in (there, asked):
        weights.read(part, buffer())
    assert weights.absent([there, asked]) == []
    weights.forget([asked])
    assert weights.absent([there, asked]) == [asked]
    weights.will_need([asked])
    weights.read(asked, buffer())
    assert weights.absent([there, asked]) == []


def test_where_the_exact_answer_is_withheld_bytes_are_sampled(
    weights: WeightFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        weights.read(Part("a.weight"), buffer())
        assert weights.absent([Part("a.weight")]) == []
        weights.forget([Part("a.weight")])
        assert weights.absent([Part("a.weight")]) == [Part("a.weight")]


def test_a_file_system_that_cannot_tell_costs_nothing(weights: WeightFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotSupported("RWF_NOWAIT", why="this file system does not know it")

    for name in ("cachestat", "sample"):
        monkeypatch.setattr(f"sojourn.inference.adaln.weights.page_cache.{name}", refuse)
    assert weights.absent([Part("a.bias")]) == [Part("a.bias")]
    weights.will_need([Part("a.bias")])
    assert weights.read(Part("a.bias"), buffer()).shape == (ROWS,)
    weights.forget([Part("a.bias")])


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
