from pathlib import Path

import pytest
import torch
from sojourn.inference.loading.folder import read_folder
from sojourn.inference.tiny import tiny_random


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_equal_arguments_give_equal_bytes(tiny_folder: Path, tmp_path: Path) -> None:
    assert content(tiny_random("minimax-h3", tmp_path / "again")) == content(tiny_folder)


def test_tiny_model_is_small(tiny_folder: Path) -> None:
    assert sum(len(data) for data in content(tiny_folder).values()) < 2_000_000


def test_seed_dtype_and_layers_have_an_effect(tiny_folder: Path, tmp_path: Path) -> None:
    changed = tiny_random("minimax-h3", tmp_path / "other", seed=1, dtype=torch.float32, layers=3)
    before, after = read_folder(tiny_folder).components, read_folder(changed).components
    assert {tensor.dtype for tensor in after["vae"].tensors} == {"F32"}
    assert (before["transformer"].config["num_layers"], after["transformer"].config["num_layers"]) == (2, 3)
    other_seed = tiny_random("minimax-h3", tmp_path / "seed", seed=1)
    weights = Path("vae/diffusion_pytorch_model.safetensors")
    assert (other_seed / weights).read_bytes() != (tiny_folder / weights).read_bytes()


def test_partitions_of_one_model_have_weights_of_their_own(tiny_folder: Path) -> None:
    weights = "diffusion_pytorch_model.safetensors"
    assert (tiny_folder / "transformer" / weights).read_bytes() != (
        tiny_folder / "transformer_ref" / weights
    ).read_bytes()


def test_unknown_family_is_refused_naming_the_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="minimax-h3"):
        tiny_random("other", tmp_path)
