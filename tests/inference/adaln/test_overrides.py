"""A family named by hand: for classes of one's own, refused where it is wrong, and with an effect where it is right."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from sojourn.inference.adaln.caches import PlanCaches
from sojourn.inference.adaln.component import CachedTransformer
from sojourn.inference.adaln.counters import Counters, Result
from sojourn.inference.adaln.families import FAMILIES
from sojourn.inference.adaln.family import Family
from sojourn.inference.adaln.overrides import parse_overrides
from sojourn.inference.adaln.refusals import ModelReason, ModelRefused, SettingRefused
from sojourn.inference.adaln.replace import stand_ins
from sojourn.inference.adaln.saving import saving_of
from sojourn.inference.adaln.settings import Mode, PlanCacheSettings
from sojourn.inference.families.projections import PROJECTIONS, TRANSFORMERS
from sojourn.inference.families.table import family_of
from sojourn.inference.loading.components import build_component
from sojourn.inference.loading.folder import ComponentFolder, read_folder
from sojourn.inference.loading.inspection import inspect_folder
from sojourn.inference.offload.memory_plan import Machine
from sojourn.inference.offload.options import OffloadOptions
from sojourn.inference.offload.planning import plan_model, with_plan_caches
from sojourn.inference.pipeline import DeviceChoice, load_pipeline
from sojourn.inference.pipeline.workflow import served_stages
from sojourn.inference.requests import OutputFormat
from torch import nn

from tests.inference.adaln.test_families import arguments, requests, run
from tests.inference.adaln.zoo import SPECIMENS, Draw, write_specimen

CPU = torch.device("cpu")


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Installs a class of one's own beside those of diffusers; returns its name."""

    def make(base: str, **members: Any) -> str:
        name = f"Studio{base}"
        monkeypatch.setattr(diffusers, name, type(name, (getattr(diffusers, base),), members), raising=False)
        return name

    return make


def opened(folder: ComponentFolder, family: str, mode: Mode = Mode.ON) -> tuple[nn.Module, CachedTransformer, Counters]:
    counters = Counters()
    settings = PlanCacheSettings(mode=mode, plans=16, host_bytes=0, families={"transformer": family})
    caches = PlanCaches(settings, CPU, counters)
    component = build_component(folder, dtype=torch.float32, device=CPU, leave_out=caches.leave_out(folder))
    caches.open({"transformer": component})
    return component.value, caches.transformers["transformer"], counters


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_class_of_ones_own_runs_on_the_rows_of_the_family_that_it_is_said_to_be_of(
    family: Family, renamed: Callable[..., str], tmp_path: Path
) -> None:
    specimen = SPECIMENS[family.name]
    folder = write_specimen(renamed(family.transformer), specimen, tmp_path / "model", torch.float32)
    plain = build_component(folder, dtype=torch.float32, device=CPU).value
    model, cached, counters = opened(folder, family.name)
    assert stand_ins(model)
    forwards = next(iter(requests(specimen, torch.float32)))
    for _ in range(2):
        with cached.prepare(forwards):
            assert all(map(torch.equal, run(model, forwards), run(plain, forwards)))
    assert counters.requests == {Result.BUILT: 1, Result.HIT: 1}


def test_rows_of_another_family_never_become_an_output(renamed: Callable[..., str], tmp_path: Path) -> None:
    """Flux and SD3 name their modules alike and scale their timesteps apart: names alone would let it pass."""
    specimen = SPECIMENS["flux"]
    config = {**specimen.config, "guidance_embeds": False}
    folder = write_specimen(renamed("FluxTransformer2DModel"), type(specimen)(config, specimen.arguments),
                            tmp_path / "model", torch.float32)  # fmt: skip
    given = arguments(specimen, Draw(1, torch.float32, torch.Generator().manual_seed(3)), 0.5)
    given.pop("guidance")
    model, cached, _ = opened(folder, "sd3")
    with (
        cached.prepare([given]),
        pytest.raises(ModelRefused, match=r"transformer=sd3: .* reads other values") as caught,
    ):
        run(model, [given])
    assert caught.value.reason is ModelReason.OTHER_FAMILY


def test_a_projection_that_reads_something_else_than_the_embedding_is_found(
    renamed: Callable[..., str], tmp_path: Path
) -> None:
    specimen = SPECIMENS["auraflow"]
    folder = write_specimen(renamed("AuraFlowTransformer2DModel"), specimen, tmp_path / "model", torch.float32)
    model, cached, _ = opened(folder, "auraflow")
    given = arguments(specimen, Draw(2, torch.float32, torch.Generator().manual_seed(3)), 0.5)
    last = stand_ins(model)[-1]
    last.register_forward_pre_hook(lambda module, args: (args[0].roll(1, dims=-1),))
    with cached.prepare([given]):
        with pytest.raises(ModelRefused, match=f"{last.name} reads other values"):
            run(model, [given])
        last._forward_pre_hooks.clear()
        run(model, [given])


@pytest.mark.parametrize("mode", [Mode.ON, Mode.AUTO])
@pytest.mark.parametrize(
    ("base", "family", "message"),
    [
        ("FluxTransformer2DModel", "minimax-h3", "has no module named as an embedder of MiniMaxH3Transformer3DModel"),
        ("PRXTransformer2DModel", "flux", "has no module named as a projection of FluxTransformer2DModel"),
        ("SD3Transformer2DModel", "flux", "has a forward without guidance, which the rows depend on"),
    ],
)
def test_a_family_whose_modules_are_not_there_is_refused_before_weights_are_read(
    mode: Mode, base: str, family: str, message: str, renamed: Callable[..., str], tmp_path: Path
) -> None:
    """Also by auto: what somebody has asked for by name is not dropped in silence."""
    specimen = next(SPECIMENS[one.name] for one in FAMILIES if one.transformer == base)
    folder = write_specimen(renamed(base), specimen, tmp_path / "model", torch.float32)
    with pytest.raises(SettingRefused, match=f"--adaln-family is 'transformer={family}': Studio{base} {message}"):
        opened(folder, family, mode)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["minimax-h3"], "write COMPONENT=FAMILY, such as transformer=minimax-h3"),
        (["=minimax-h3"], "write COMPONENT=FAMILY"),
        (["transformer="], "write COMPONENT=FAMILY"),
        (["transformer=flux", "transformer=sd3"], "transformer is said to be flux already"),
    ],
)
def test_what_names_no_family_is_refused_with_how_to_write_it(texts: list[str], message: str) -> None:
    with pytest.raises(SettingRefused, match=message):
        parse_overrides(texts)


def test_an_unknown_family_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(SettingRefused, match="transformer=h4") as caught:
        PlanCacheSettings(families={"transformer": "h4"})
    assert all(name in str(caught.value) for name in TRANSFORMERS)


def test_every_family_has_a_class_and_every_class_its_projections() -> None:
    assert [family.name for family in FAMILIES] == list(TRANSFORMERS)
    assert set(TRANSFORMERS.values()) == set(PROJECTIONS)


@pytest.fixture
def studio(renamed: Callable[..., str], tiny_folder: Path, tmp_path: Path) -> Path:
    """A MiniMax-H3 model whose transformers are of a class of somebody's own."""
    name = renamed("MiniMaxH3Transformer3DModel")
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "studio"))
    index = folder / "modular_model_index.json"
    index.write_text(index.read_text().replace("MiniMaxH3Transformer3DModel", name))
    assert json.loads(index.read_text())["transformer"][1] == name
    return folder


NAMED = {"transformer": "minimax-h3", "transformer_ref": "minimax-h3"}
SMALL = PlanCacheSettings(plans=4, width=2, host_bytes=0)


def test_a_whole_model_of_such_a_class_is_served_from_rows(
    studio: Path, tiny_folder: Path, make_request: Callable[..., Any], make_watch: Callable[..., Any],
    digest: Callable[[Any], dict[str, str]],
) -> None:  # fmt: skip
    def clip(folder: Path, settings: PlanCacheSettings) -> tuple[Any, dict[str, str]]:
        pipeline = load_pipeline(folder, device=DeviceChoice.CPU, plan_settings=settings)
        clip = pipeline.run_clip(make_request(outputs=(OutputFormat.LATENTS,)), 0, make_watch())
        return pipeline, digest(clip)

    without, plain = clip(studio, SMALL)
    assert not without.plans.transformers, "the class alone says nothing"
    named, cached = clip(studio, PlanCacheSettings(plans=4, width=2, host_bytes=0, families=NAMED))
    assert set(named.plans.transformers) == set(NAMED)
    assert plain == cached == clip(tiny_folder, SMALL)[1]


def test_a_component_that_the_model_lacks_is_refused_before_anything_is_loaded(studio: Path) -> None:
    settings = PlanCacheSettings(families={"tranformer": "minimax-h3"})
    with pytest.raises(SettingRefused, match=r"the model has no component tranformer; it has .*transformer, "):
        load_pipeline(studio, device=DeviceChoice.CPU, plan_settings=settings)


def test_headers_are_read_by_the_family_that_was_named(studio: Path, tiny_folder: Path) -> None:
    """What is inspected and planned is what is then loaded."""
    folder, stock = read_folder(studio), read_folder(tiny_folder)
    named = PlanCacheSettings(mode=Mode.ON, plans=4, width=2, families=NAMED)
    part = folder.components["transformer"]
    assert saving_of(part, SMALL) is None
    assert saving_of(part, named) == saving_of(stock.components["transformer"], SMALL)
    told = inspect_folder(studio, transformers={"transformer": named.projected_as("transformer", part.class_name)})
    wanted = {part.name: part.adaln_bytes for part in inspect_folder(tiny_folder).components}
    found = {part.name: part.adaln_bytes for part in told.components}
    assert found == {**wanted, "transformer_ref": 0}
    stages = served_stages(family_of(stock), stock.components)
    machine = Machine(device_bytes=None, host_bytes=8 << 30)
    plans = [
        plan_model(one, stages, machine, with_plan_caches(OffloadOptions(), one, settings), dtype=torch.bfloat16)
        for one, settings in ((folder, named), (stock, PlanCacheSettings(mode=Mode.ON, plans=4, width=2)))
    ]
    assert plans[0] == plans[1]
    assert all(part.cached for part in plans[0].components if part.name.startswith("transformer"))
