import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sojourn.inference.errors import ModelError
from sojourn.inference.loading.mapping import MappedFile
from sojourn.inference.loading.safetensors_file import read_safetensors
from sojourn.inference.pipeline import DeviceChoice, Pipeline, Precision, load_pipeline

MODELS = ("text_encoder", "transformer", "vae", "audio_vae")


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_buffers_are_bit_for_bit_those_of_stock_loading(
    digits: Pipeline, stock_digits: Any, name: str
) -> None:
    ours, stock = digits.components[name].value, getattr(stock_digits, name)
    for kind in ("named_parameters", "named_buffers"):
        expected, found = dict(getattr(stock, kind)()), dict(getattr(ours, kind)())
        assert list(found) == list(expected)
        for key, tensor in expected.items():
            assert found[key].dtype == tensor.dtype, key
            assert torch.equal(found[key], tensor), key
    assert not ours.training
    assert not any(parameter.requires_grad for parameter in ours.parameters())


def test_float32_is_float32_throughout(tiny_folder: Path, tiny: Pipeline) -> None:
    pipeline = load_pipeline(tiny_folder, device=DeviceChoice.CPU, precision=Precision.FLOAT32)
    assert pipeline.dtype_name == "float32"
    dtypes = {parameter.dtype for name in MODELS for parameter in pipeline.components[name].value.parameters()}
    assert dtypes == {torch.float32}
    assert tiny.dtype_name == "bfloat16"


def test_tied_embeddings_share_one_storage_and_count_once(digits: Pipeline) -> None:
    encoder = digits.components["text_encoder"]
    assert encoder.value.lm_head.weight is encoder.value.model.language_model.embed_tokens.weight
    in_file = sum(info.elements for file in encoder.files for info in file.file.tensors.values())
    assert encoder.parameters == in_file


@pytest.mark.parametrize("name", MODELS)
def test_tensors_of_the_wanted_dtype_are_views_of_the_mapping(digits: Pipeline, name: str) -> None:
    component = digits.components[name]
    state = component.value.state_dict()
    for file in component.files:
        for tensor_name, info in file.file.tensors.items():
            where, tensor = file.range_of(tensor_name), state[tensor_name]
            if info.dtype == "BF16" and tensor.dtype == torch.bfloat16:
                assert tensor.data_ptr() == where.address, tensor_name
            else:
                assert tensor.dtype == torch.float32, tensor_name


def rss_anon_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_reading_mapped_weights_takes_no_anonymous_memory(tmp_path: Path) -> None:
    elements, path = 32 * 2**20, tmp_path / "model.safetensors"
    header = json.dumps({"w": {"dtype": "BF16", "shape": [elements], "data_offsets": [0, 2 * elements]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + 2 * elements)
    file = MappedFile(read_safetensors(path))
    before = rss_anon_bytes()
    parameter = torch.nn.Parameter(file.tensor("w"), requires_grad=False)
    assert parameter.max() == 0
    assert rss_anon_bytes() - before < elements // 2


def replace_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return apply


def edit_config(component: str, **changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / component / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return apply


def unknown_class(folder: Path) -> None:
    path = folder / "modular_model_index.json"
    path.write_text(path.read_text().replace("AutoencoderKLMiniMaxH3Audio", "AutoencoderKLMiniMaxH4Audio"))


def foreign_library(folder: Path) -> None:
    path = folder / "modular_model_index.json"
    index = json.loads(path.read_text())
    index["vae"][2]["type_hint"] = ["os", "path"]
    path.write_text(json.dumps(index))


def foreign_pipeline(folder: Path) -> None:
    path = folder / "modular_model_index.json"
    path.write_text(path.read_text().replace("MiniMaxH3ModularPipeline", "WanModularPipeline"))


def without(*components: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        for component in components:
            shutil.rmtree(folder / component)

    return apply


BROKEN: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "tensor missing": (
        replace_tensors(lambda t: t.pop("proj_in.weight")),
        "TensorMissing",
        "tensor 'proj_in.weight': expected shape [32, 16], found no such tensor",
    ),
    "tensor unexpected": (
        replace_tensors(lambda t: t.update(extra=torch.zeros(2), more=torch.zeros(2))),
        "TensorUnexpected",
        "tensor 'extra' and 1 more: expected no such tensor in MiniMaxH3Transformer3DModel, found F32 [2]",
    ),
    "shape not as configured": (
        replace_tensors(lambda t: t.update({"proj_in.weight": torch.zeros(32, 17)})),
        "TensorShapeMismatch",
        "shape of tensor 'proj_in.weight': expected [32, 16], found [32, 17]",
    ),
    "config of another size": (edit_config("transformer", hidden_size=64), "TensorShapeMismatch", "expected [64"),
    "integers for floats": (
        replace_tensors(lambda t: t.update({"proj_in.weight": torch.zeros(32, 16, dtype=torch.int8)})),
        "TensorDtypeMismatch",
        "dtype of tensor 'proj_in.weight': expected BF16 or F16 or F32 or F64, found I8",
    ),
    "8-bit floats without scales": (
        replace_tensors(lambda t: t.update({"proj_in.weight": torch.zeros(32, 16).to(torch.float8_e4m3fn)})),
        "TensorDtypeMismatch",
        "found F8_E4M3",
    ),
    "impossible config": (edit_config("vae", norm_num_groups=3), "ConfigInvalid", "AutoencoderKLMiniMaxH3 cannot"),
    "class unknown": (unknown_class, "ClassUnknown", "diffusers.AutoencoderKLMiniMaxH4Audio"),
    "class of a foreign library": (foreign_library, "ClassUnknown", "os.path, which is not installed"),
    "family unknown": (foreign_pipeline, "FamilyUnknown", "WanModularPipeline are not served; served are MiniMaxH3"),
    "component of every workflow missing": (without("vae"), "ComponentMissing", "component vae is missing"),
    "no transformer at all": (without("transformer", "transformer_ref"), "ComponentMissing", "component transformer"),
}


@pytest.mark.parametrize(("break_it", "reason", "message"), BROKEN.values(), ids=BROKEN)
def test_folder_that_does_not_fit_together_is_refused_naming_what_was_expected_and_found(
    folder: Path, break_it: Callable[[Path], None], reason: str, message: str
) -> None:
    break_it(folder)
    with pytest.raises(ModelError) as caught:
        load_pipeline(folder, device=DeviceChoice.CPU)
    assert caught.value.reason == reason
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


def test_failed_loading_leaves_the_default_dtype_alone(folder: Path) -> None:
    edit_config("vae", norm_num_groups=3)(folder)
    with pytest.raises(ModelError):
        load_pipeline(folder, device=DeviceChoice.CPU)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_parameters_and_buffers_are_there(tiny_folder: Path) -> None:
    pipeline = load_pipeline(tiny_folder, device=DeviceChoice.AUTO)
    assert pipeline.device.type == "cuda"
    for name in MODELS:
        model = pipeline.components[name].value
        assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cuda"}
