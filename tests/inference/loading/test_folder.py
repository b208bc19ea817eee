import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from sojourn.inference.errors import ModelError
from sojourn.inference.loading.folder import INDEX_NAME, read_folder


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def shard(folder: Path) -> Path:
    """Cuts the transformer's weights into two shards and returns their index."""
    whole = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    names = sorted(tensors)
    places = {name: f"diffusion_pytorch_model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, whole.with_name(file))
    index = whole.with_name("diffusion_pytorch_model.safetensors.index.json")
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


def test_folder_is_read_without_torch(tiny_folder: Path) -> None:
    code = (
        "import sys, pathlib; from sojourn.inference.loading.folder import read_folder; "
        f"read_folder(pathlib.Path({str(tiny_folder)!r})); "
        "assert not {'torch', 'diffusers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_components_and_values_are_those_of_the_index(digits_folder: Path) -> None:
    folder = read_folder(digits_folder)
    assert folder.pipeline_class == "MiniMaxH3ModularPipeline"
    assert folder.values["canvas_short_edge"] == 64
    assert list(folder.absent) == ["transformer_ref"]
    transformer = folder.components["transformer"]
    assert transformer.class_name == "MiniMaxH3Transformer3DModel"
    assert sum(tensor.elements for tensor in transformer.tensors) == 2_847_048


def test_shards_hold_together_what_one_file_did(folder: Path) -> None:
    before = {tensor.name for tensor in read_folder(folder).components["transformer"].tensors}
    shard(folder)
    component = read_folder(folder).components["transformer"]
    assert len(component.files) == 2
    assert {tensor.name for tensor in component.tensors} == before


def remove(*parts: str) -> Callable[[Path], None]:
    return lambda folder: folder.joinpath(*parts).unlink()


def write(text: str, *parts: str) -> Callable[[Path], None]:
    return lambda folder: folder.joinpath(*parts).write_text(text) and None


def escape(folder: Path) -> None:
    edit_index(folder, lambda index: index["vae"][2].update(subfolder="../elsewhere"))


def escape_absolutely(folder: Path) -> None:
    edit_index(folder, lambda index: index["vae"][2].update(subfolder="/elsewhere"))


def only_pickle(folder: Path) -> None:
    (folder / "vae" / "diffusion_pytorch_model.safetensors").rename(folder / "vae" / "diffusion_pytorch_model.bin")


def missing_shard(folder: Path) -> None:
    shard(folder).with_name("diffusion_pytorch_model-00002-of-00002.safetensors").unlink()


def shard_of_another_checkpoint(folder: Path) -> None:
    index = shard(folder)
    content = json.loads(index.read_text())
    content["weight_map"]["new.weight"] = "diffusion_pytorch_model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))


def shard_with_more(folder: Path) -> None:
    index = shard(folder)
    content = json.loads(index.read_text())
    del content["weight_map"]["proj_in.weight"]
    index.write_text(json.dumps(content))


def shard_elsewhere(folder: Path) -> None:
    index = shard(folder)
    content = json.loads(index.read_text())
    content["weight_map"]["proj_in.weight"] = "../vae/diffusion_pytorch_model.safetensors"
    index.write_text(json.dumps(content))


def variant_elsewhere(folder: Path) -> None:
    edit_index(folder, lambda index: index["vae"][2].update(variant="/../../other"))


BROKEN: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "no index": (remove(INDEX_NAME), "IndexMissing", INDEX_NAME),
    "index not JSON": (write("<html>", INDEX_NAME), "IndexInvalid", "JSON"),
    "index a list": (write("[]", INDEX_NAME), "IndexInvalid", "expected a JSON object, found list"),
    "no pipeline class": (
        lambda folder: edit_index(folder, lambda index: index.pop("_class_name")),
        "IndexInvalid",
        "_class_name is None",
    ),
    "no config": (remove("transformer", "config.json"), "ConfigMissing", "transformer/config.json"),
    "config not JSON": (write("{", "vae", "config.json"), "ConfigInvalid", "vae/config.json"),
    "no scheduler config": (remove("scheduler", "scheduler_config.json"), "ConfigMissing", "scheduler"),
    "no weights": (remove("vae", "diffusion_pytorch_model.safetensors"), "WeightsMissing", "found no weight file"),
    "pickle alone": (only_pickle, "WeightsNotSafetensors", "found diffusion_pytorch_model.bin"),
    "missing shard": (missing_shard, "WeightsShardMissing", "diffusion_pytorch_model-00002-of-00002.safetensors"),
    "tensor not in its shard": (shard_of_another_checkpoint, "TensorMissing", "new.weight"),
    "tensor not in the shards' index": (shard_with_more, "TensorDuplicate", "proj_in.weight"),
    "shard outside": (shard_elsewhere, "PathEscapes", "outside the folder"),
    "variant outside": (variant_elsewhere, "PathEscapes", "variant '/../../other' is a path"),
    "component outside": (escape, "PathEscapes", "elsewhere"),
    "component at an absolute path": (escape_absolutely, "PathEscapes", "/elsewhere"),
}


@pytest.mark.parametrize(("break_it", "reason", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_folder_is_refused_with_reason_and_path(
    folder: Path, break_it: Callable[[Path], None], reason: str, message: str
) -> None:
    break_it(folder)
    with pytest.raises(ModelError) as caught:
        read_folder(folder)
    assert caught.value.reason == reason
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


def test_variant_names_the_weight_file(folder: Path) -> None:
    whole = folder / "vae" / "diffusion_pytorch_model.safetensors"
    whole.rename(whole.with_name("diffusion_pytorch_model.fp16.safetensors"))
    edit_index(folder, lambda index: index["vae"][2].update(variant="fp16"))
    assert read_folder(folder).components["vae"].files[0].path.name == "diffusion_pytorch_model.fp16.safetensors"
