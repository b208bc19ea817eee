"""The fingerprint: content decides, not size and time; remembered, and checked by samples."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sojourn.inference.adaln.fingerprint import arithmetic_of, rows_fingerprint
from sojourn.inference.adaln.refusals import WeightsChanged
from sojourn.inference.adaln.weights import WeightFiles
from sojourn.inference.loading.safetensors_file import read_safetensors

from tests.inference.adaln.toys import TOY, toy


def write(path: Path, seed: int = 0, **changes: torch.Tensor) -> Path:
    tensors = {name: tensor.contiguous() for name, tensor in toy(seed).state_dict().items()}
    save_file({**tensors, "head.weight": torch.zeros(3), **changes}, path)
    return path


def opened(*paths: Path) -> WeightFiles:
    return WeightFiles([read_safetensors(path) for path in paths])


def fingerprint(path: Path, memory: Path | None = None, **changes: object) -> str:
    arithmetic = {"precision": "match", **changes}
    return rows_fingerprint(opened(path), TOY, config={"depth": 3}, arithmetic=arithmetic, memory=memory)


def changed(path: Path, name: str) -> None:
    """Another value of the same size with the same times."""
    before = path.stat()
    tensors = {key: tensor.contiguous() for key, tensor in toy().state_dict().items()}
    tensors["head.weight"] = torch.zeros(3)
    tensors[name] = tensors[name] + 1
    save_file(tensors, path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_equal_content_has_equal_fingerprints_wherever_it_lies(tmp_path: Path) -> None:
    assert fingerprint(write(tmp_path / "a.safetensors")) == fingerprint(write(tmp_path / "b.safetensors"))


@pytest.mark.parametrize("name", ["blocks.0.modulation.weight", "norm_out.modulation.bias", "time_embedder.weight"])
def test_a_fine_tune_of_equal_size_and_time_has_another_fingerprint(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "a.safetensors")
    before = fingerprint(path)
    changed(path, name)
    assert fingerprint(path) != before


def test_weights_that_the_rows_do_not_depend_on_do_not_count(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors")
    before = fingerprint(path)
    changed(path, "head.weight")
    assert fingerprint(path) == before


def test_where_float32_lies_in_a_cache_line_counts(tmp_path: Path) -> None:
    """Mapped weights lie as they do in the file, and so do their products' last bits."""
    path, shifted = write(tmp_path / "a.safetensors"), tmp_path / "b.safetensors"
    save_file(load_file(path), shifted, {"note": "x" * 8})
    offsets = [{place.offset % 64 for place in opened(one).places.values()} for one in (path, shifted)]
    assert offsets[0] != offsets[1]
    assert fingerprint(path) != fingerprint(shifted)


def test_the_arithmetic_and_the_config_count(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors")
    assert fingerprint(path) != fingerprint(path, precision="fp32")
    other = rows_fingerprint(opened(path), TOY, config={"depth": 4}, arithmetic={"precision": "match"})
    assert other != fingerprint(path)
    same = rows_fingerprint(opened(path), TOY, config={"depth": 3, "_class": "x"}, arithmetic={"precision": "match"})
    assert same == fingerprint(path)


def arithmetic(**changes: object) -> dict[str, object]:
    given = {"dtypes": [torch.bfloat16], "precision": "match", "sharing": "layers", "ranks": 1, **changes}
    return arithmetic_of(torch.device("cpu"), **given)


def test_the_arithmetic_names_what_may_decide_the_last_bits() -> None:
    assert arithmetic()["torch"] == torch.__version__
    assert {"device", "chip", "dtypes", "precision", "matmul", "sharing"} <= arithmetic().keys()
    assert arithmetic() == arithmetic(ranks=2)  # layers are projected whole, by whichever rank
    assert arithmetic() != arithmetic(ranks=2, sharing="outputs")
    assert arithmetic() != arithmetic(precision="fp32")


def test_content_is_read_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, memory = write(tmp_path / "a.safetensors"), tmp_path / "memory"
    first = fingerprint(path, memory)

    def fail(*_: object) -> str:
        raise AssertionError("read again")

    monkeypatch.setattr("sojourn.inference.adaln.fingerprint._tensor_digest", fail)
    assert fingerprint(path, memory) == first


def test_samples_that_differ_from_the_remembered_ones_are_read_again(tmp_path: Path) -> None:
    path, memory = write(tmp_path / "a.safetensors"), tmp_path / "memory"
    first = fingerprint(path, memory)
    (record,) = memory.glob("*.json")
    record.write_text(record.read_text().replace(record.read_text()[-20:-4], "0" * 16))
    assert fingerprint(path, memory) == first


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", '{"content": 1}'])
def test_a_broken_memory_is_ignored(tmp_path: Path, content: str) -> None:
    path, memory = write(tmp_path / "a.safetensors"), tmp_path / "memory"
    first = fingerprint(path, memory)
    (record,) = memory.glob("*.json")
    record.write_text(content)
    assert fingerprint(path, memory) == first


def test_a_memory_that_cannot_be_written_costs_a_read_and_no_more(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors")
    (tmp_path / "file").write_text("")
    assert fingerprint(path, tmp_path / "file" / "memory") == fingerprint(path)


def test_a_file_that_was_replaced_or_written_to_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors")
    weights = opened(path)
    weights.check()
    write(tmp_path / "b.safetensors", seed=1).replace(path)
    with pytest.raises(WeightsChanged, match="not the one that was checked"):
        weights.check()
    path.unlink()
    with pytest.raises(WeightsChanged, match="No such file"):
        weights.check()
