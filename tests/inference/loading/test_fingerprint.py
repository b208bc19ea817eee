import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sojourn.inference.loading.fingerprint import BackgroundFingerprint, checkpoint_fingerprint
from sojourn.inference.loading.mapping import MappedFile
from sojourn.inference.loading.safetensors_file import read_safetensors

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(0)}


def mapped(*paths: Path) -> dict[str, list[MappedFile]]:
    return {"transformer": [MappedFile(read_safetensors(path)) for path in paths]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def test_fingerprint_does_not_depend_on_how_tensors_are_cut_into_files(path: Path) -> None:
    shards = [path.with_name(f"{name}.safetensors") for name in TENSORS]
    for shard, (name, tensor) in zip(shards, TENSORS.items(), strict=True):
        save_file({name: tensor}, shard)
    whole = checkpoint_fingerprint(mapped(path))
    assert checkpoint_fingerprint(mapped(*shards)) == checkpoint_fingerprint(mapped(*reversed(shards))) == whole
    assert len(whole) == 64


@pytest.mark.parametrize("change", ["bit", "name", "dtype", "shape", "component"])
def test_fingerprint_changes_with(path: Path, change: str) -> None:
    tensors = load_file(path)
    component = "transformer"
    match change:
        case "bit":
            tensors["a"].view(torch.int32)[0, 0] ^= 1
        case "name":
            tensors["d"] = tensors.pop("a")
        case "dtype":
            tensors["b"] = tensors["b"].view(torch.float16)
        case "shape":
            tensors["a"] = tensors["a"].view(3, 2)
        case "component":
            component = "transformer_ref"
    other = path.with_name("other.safetensors")
    save_file(tensors, other)
    assert checkpoint_fingerprint({component: mapped(other)["transformer"]}) != checkpoint_fingerprint(mapped(path))


def test_kept_digests_are_used_while_the_file_is_the_same_and_not_after(path: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = checkpoint_fingerprint(mapped(path), cache=cache)
    (kept,) = cache.iterdir()
    kept.write_text(kept.read_text().replace(kept.read_text()[-20:-4], "f" * 16))
    assert checkpoint_fingerprint(mapped(path), cache=cache) != first  # it does come from what was kept
    path.touch()
    assert checkpoint_fingerprint(mapped(path), cache=cache) == first


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"a": 1, "b": 2, "c": 3}'])
def test_spoiled_kept_digests_are_ignored(path: Path, tmp_path: Path, content: str) -> None:
    cache = tmp_path / "cache"
    first = checkpoint_fingerprint(mapped(path), cache=cache)
    next(cache.iterdir()).write_text(content)
    assert checkpoint_fingerprint(mapped(path), cache=cache) == first


def test_cache_that_cannot_be_written_costs_nothing_but_time(path: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert checkpoint_fingerprint(mapped(path), cache=blocked / "cache") == checkpoint_fingerprint(mapped(path))
    shutil.rmtree(tmp_path)


def test_background_fingerprint_is_unknown_until_it_is_asked_for_and_then_computed_once() -> None:
    calls: list[int] = []

    def compute() -> str:
        calls.append(1)
        return "f"

    background = BackgroundFingerprint(compute)
    assert background.known is None
    assert background.result() == background.result() == "f"
    assert background.known == "f"
    assert len(calls) == 1


def test_background_failure_reaches_who_asks() -> None:
    def fail() -> str:
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        BackgroundFingerprint(fail).result()
