"""An adapter on a projection is refused wherever it comes from, and before any of it is written."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sojourn.inference.adaln.adapters import check_adapter
from sojourn.inference.adaln.families import MINIMAX_H3
from sojourn.inference.adaln.refusals import ModelReason, ModelRefused
from sojourn.inference.adaln.replace import replace_projections, stand_ins
from sojourn.inference.adaln.settings import Mode, PlanCacheSettings
from sojourn.inference.pipeline import DeviceChoice, Pipeline, load_pipeline
from sojourn.inference.tiny import tiny_random
from torch import nn

from tests.inference.adaln.toys import TOY, toy

ON_PROJECTION = "transformer.transformer_blocks.0.adaln_proj.linear.lora_A.weight"
ON_ATTENTION = "transformer.transformer_blocks.0.attn.to_q.lora_A.weight"


@dataclass
class Targets:
    """What an adapter's configuration says of where it goes."""

    target_modules: Any


class LoraLinear(nn.Module):
    """A layer around another one, as peft puts it."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def load(folder: Path, mode: Mode = Mode.ON) -> Pipeline:
    settings = PlanCacheSettings(mode=mode, plans=2, width=2)
    return load_pipeline(folder, device=DeviceChoice.CPU, plan_settings=settings)


@pytest.fixture(scope="module")
def transformer(tiny_folder: Path) -> nn.Module:
    return load(tiny_folder).components["transformer"].value


def refused(match: str = "modulation projections") -> Any:
    return pytest.raises(ModelRefused, match=match)


def test_names_decide() -> None:
    check_adapter(MINIMAX_H3, [ON_ATTENTION])
    with refused(r"1 tensors of modulation projections, transformer\.transformer_blocks\.0") as caught:
        check_adapter(MINIMAX_H3, [ON_PROJECTION, ON_ATTENTION])
    assert caught.value.reason is ModelReason.ADAPTER


@pytest.mark.parametrize("as_file", [False, True])
def test_an_adapter_that_is_loaded_into_the_transformer(transformer: nn.Module, tmp_path: Path, as_file: bool) -> None:
    before = list(transformer.state_dict())
    source: Any = {ON_PROJECTION: torch.zeros(1, 1)}
    if as_file:
        save_file(source, tmp_path / "pytorch_lora_weights.safetensors")
        source = tmp_path
    with refused():
        transformer.load_lora_adapter(source)
    assert list(transformer.state_dict()) == before


@pytest.mark.parametrize("targets", ["all-linear", r".*adaln_proj\.linear", ["to_q", "adaln_proj.linear"]])
def test_an_adapter_that_is_added_by_its_configuration(transformer: nn.Module, targets: Any) -> None:
    with refused():
        transformer.add_adapter(Targets(targets))


def test_an_adapter_beside_the_projections_is_left_to_diffusers(transformer: nn.Module) -> None:
    """Which then wants a library that only training needs, or a whole configuration."""
    with pytest.raises((ImportError, ValueError)):
        transformer.load_lora_adapter({ON_ATTENTION: torch.zeros(1, 1)})
    with pytest.raises((ImportError, ValueError)):
        transformer.add_adapter(Targets(["to_q"]))


def test_an_adapter_in_the_folder_of_the_model(tmp_path: Path) -> None:
    folder = tiny_random("minimax-h3", tmp_path / "model")
    save_file({ON_ATTENTION: torch.zeros(1, 1)}, folder / "transformer" / "pytorch_lora_weights.safetensors")
    assert load(folder).plans.transformers
    save_file({ON_PROJECTION: torch.zeros(1, 1)}, folder / "transformer" / "adapter_model.safetensors")
    with refused():
        load(folder)
    automatic = load(folder, Mode.AUTO)
    assert list(automatic.plans.transformers) == ["transformer_ref"]
    assert not stand_ins(automatic.components["transformer"].value)


def test_an_adapter_that_was_put_around_a_stand_in_by_hand(tiny_folder: Path) -> None:
    pipeline = load(tiny_folder)
    cached = pipeline.plans.transformers["transformer"]
    projection = pipeline.components["transformer"].value.norm_out
    projection.linear = LoraLinear(projection.linear)
    with refused(r"norm_out\.linear carries an adapter"):
        cached.prepare([{"timestep": torch.tensor([0.5])}])


def test_an_adapter_that_is_there_before_projections_are_replaced() -> None:
    transformer = toy()
    transformer.norm_out.modulation = LoraLinear(transformer.norm_out.modulation)
    with refused("carries an adapter") as caught:
        replace_projections(transformer, TOY)
    assert caught.value.reason is ModelReason.ADAPTER
    assert not stand_ins(transformer)
