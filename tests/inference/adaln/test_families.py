"""Every family on the real class at a tiny size: bits, what is never loaded, what is in the key, what is refused."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from sojourn.inference.adaln.caches import PlanCaches
from sojourn.inference.adaln.component import CachedTransformer
from sojourn.inference.adaln.counters import Counters, Result
from sojourn.inference.adaln.families import FAMILIES, WITHOUT_PROJECTION, family_of
from sojourn.inference.adaln.family import Family
from sojourn.inference.adaln.refusals import ModelReason, ModelRefused, PlanMissing
from sojourn.inference.adaln.replace import projections_of, stand_ins
from sojourn.inference.adaln.settings import Mode, PlanCacheSettings
from sojourn.inference.loading.components import build_component
from sojourn.inference.loading.folder import ComponentFolder
from torch import nn

from tests.inference.adaln.zoo import SPECIMENS, Arguments, Draw, Specimen, recorded_reads, write_specimen

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
LEVELS = (0.9, 0.5)

families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Twin:
    """A transformer twice: as it is, and on stored rows."""

    def __init__(self, folder: ComponentFolder, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plain = build_component(folder, dtype=dtype, device=CPU).value
        self.counters = Counters()
        caches = PlanCaches(PlanCacheSettings(mode=Mode.ON, plans=16, host_bytes=0), CPU, self.counters)
        with recorded_reads(monkeypatch) as self.read:
            component = build_component(folder, dtype=dtype, device=CPU, leave_out=caches.leave_out(folder))
        caches.open({"transformer": component})
        self.model: nn.Module = component.value
        self.cached: CachedTransformer = caches.transformers["transformer"]


def arguments(specimen: Specimen, draw: Draw, level: float) -> Arguments:
    return {**specimen.arguments(draw), "timestep": specimen.timestep(draw, level)}


def requests(specimen: Specimen, dtype: torch.dtype) -> Iterator[list[Arguments]]:
    """Schedules of two steps: batch 1 and 2, the sides of the guidance in a call each and in one call."""
    generator = torch.Generator().manual_seed(1)
    for batch in (1, 2):
        for rows, calls in ((batch, 2), (2 * batch, 1)):
            draw = Draw(rows, dtype, generator)
            yield [arguments(specimen, draw, level) for level in LEVELS for _ in range(calls)]


@torch.no_grad()
def run(model: nn.Module, forwards: Sequence[Arguments]) -> list[torch.Tensor]:
    outputs = [model(**given, return_dict=False) for given in forwards]
    return [output if isinstance(output, torch.Tensor) else output[0] for output in outputs]


def variants() -> Iterator[Any]:
    """Each family at its specimen's configuration, and at each other one by which it differs."""
    for family in FAMILIES:
        yield pytest.param(family, SPECIMENS[family.name], id=family.name)
        for name, value in family.variants:
            other = replace(SPECIMENS[family.name], config={**SPECIMENS[family.name].config, name: value})
            yield pytest.param(family.of_config(other.config), other, id=f"{family.name}, {value}")


@pytest.mark.parametrize(("family", "specimen"), variants())
@dtypes
def test_outputs_are_those_of_resident_projections_which_are_never_loaded(
    family: Family, specimen: Specimen, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = Twin(write_specimen(family.transformer, specimen, tmp_path / "model", dtype), dtype, monkeypatch)
    everything = set(twin.plain.state_dict())
    projections = {name for name in everything if family.is_projection_tensor(name)}
    assert set(twin.read) == everything - projections
    assert not projections & set(twin.model.state_dict())
    assert len(stand_ins(twin.model)) == len(projections_of(twin.plain, family))
    for forwards in requests(specimen, dtype):
        expected = run(twin.plain, forwards)
        with twin.cached.prepare(forwards):
            found = run(twin.model, forwards)
        assert all(bool(output.isfinite().all()) for output in expected)
        assert not torch.equal(expected[0], expected[-1])
        assert all(map(torch.equal, found, expected))
        before = twin.counters.read_bytes
        with twin.cached.prepare(forwards):
            assert all(map(torch.equal, run(twin.model, forwards), expected))
        assert twin.counters.read_bytes == before
    schedules = [
        {plan.key for given in forwards for plan in family.plans(given)} for forwards in requests(specimen, dtype)
    ]
    known = [set().union(*schedules[:index]) for index in range(len(schedules))]
    built = sum(not schedule <= before for schedule, before in zip(schedules, known, strict=True))
    assert twin.counters.requests == {Result.BUILT: built, Result.HIT: 2 * len(schedules) - built}


@families
def test_every_conditioning_input_is_in_the_key(family: Family) -> None:
    draw = Draw(2, torch.float32, torch.Generator().manual_seed(2))
    given = arguments(SPECIMENS[family.name], draw, 0.5)
    keys = {plan.key for plan in family.plans(given)}
    assert set(family.given(given)) >= {"timestep"}
    for name, value in family.given(given).items():
        changed = ~value if value.dtype == torch.bool else value + 1
        (other,) = family.plans({**given, name: changed})
        assert other.key not in keys, name
    others = {name: value for name, value in given.items() if name not in family.inputs}
    changed_others = {
        name: value + 1 if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in others.items()
    }
    assert {plan.key for plan in family.plans({**given, **changed_others})} == keys


@families
def test_the_fingerprint_covers_every_weight_that_the_embedding_reads(family: Family) -> None:
    torch.manual_seed(0)
    specimen = SPECIMENS[family.name]
    model = getattr(diffusers, family.transformer)(**specimen.config)
    draw = Draw(2, torch.float32, torch.Generator().manual_seed(2))
    read = family.embed(model, family.given(arguments(specimen, draw, 0.5)))
    vectors = [read] if isinstance(read, torch.Tensor) else list(read.values())
    torch.stack([vector.sum() for vector in vectors]).sum().backward()
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert reached
    assert {name for name in reached if not family.is_embedder_tensor(name)} == set()


@pytest.mark.parametrize("family", [family for family in FAMILIES if not family.reusable], ids=lambda one: one.name)
def test_auto_is_off_by_name_where_each_prompt_has_rows_of_its_own(family: Family, tmp_path: Path) -> None:
    folder = write_specimen(family.transformer, SPECIMENS[family.name], tmp_path / "model", torch.float32)
    caches = PlanCaches(PlanCacheSettings(plans=1, width=1), CPU)
    component = build_component(folder, dtype=torch.float32, device=CPU, leave_out=caches.leave_out(folder))
    caches.open({"transformer": component})
    assert caches.off_reason is ModelReason.ROWS_NOT_REUSED
    assert not stand_ins(component.value)


def test_rows_that_follow_the_prompt_are_exactly_those_of_the_families_with_text_in_them() -> None:
    text = {"pooled_projections", "encoder_hidden_states"}
    assert {family.name for family in FAMILIES if not family.reusable} == {
        family.name for family in FAMILIES if text & set(family.inputs)
    }


UNSUPPORTED = [(family, name) for family in FAMILIES for name in family.unsupported]


@pytest.mark.parametrize(("family", "name"), UNSUPPORTED, ids=lambda one: getattr(one, "name", one))
def test_a_variant_that_projects_otherwise_is_refused(family: Family, name: str, tmp_path: Path) -> None:
    specimen = SPECIMENS[family.name]
    other = Specimen({**specimen.config, name: family.unsupported[name]}, specimen.arguments)
    folder = write_specimen(family.transformer, other, tmp_path / "model", torch.float32)
    caches = PlanCaches(PlanCacheSettings(mode=Mode.ON), CPU)
    with pytest.raises(ModelRefused, match=f"{family.transformer} with {name}=") as caught:
        build_component(folder, dtype=torch.float32, device=CPU, leave_out=caches.leave_out(folder))
    assert caught.value.reason is ModelReason.VARIANT


def test_other_guidance_finds_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specimen = SPECIMENS["flux"]
    folder = write_specimen("FluxTransformer2DModel", specimen, tmp_path / "model", torch.float32)
    twin = Twin(folder, torch.float32, monkeypatch)
    given = arguments(specimen, Draw(1, torch.float32, torch.Generator().manual_seed(3)), 0.5)
    with twin.cached.prepare([given]), pytest.raises(PlanMissing):
        run(twin.model, [{**given, "guidance": given["guidance"] + 1}])


@pytest.mark.parametrize(
    ("changes", "message"), [({"ofs": 2.0}, "ofs is 2.0; .* a tensor"), ({"timestep": None}, "no timestep")]
)
def test_an_argument_that_is_no_tensor_is_refused_and_not_passed_over(changes: Arguments, message: str) -> None:
    given = arguments(SPECIMENS["cogvideox"], Draw(1, torch.float32, torch.Generator().manual_seed(3)), 0.5)
    with pytest.raises(PlanMissing, match=message):
        family_of("CogVideoXTransformer3DModel").plans({**given, **changes})


def test_every_family_has_a_specimen_and_a_name_of_its_own() -> None:
    assert set(SPECIMENS) == {family.name for family in FAMILIES}
    assert len({family.transformer for family in FAMILIES}) == len(FAMILIES) >= 19


@pytest.mark.parametrize("beginning", WITHOUT_PROJECTION)
def test_families_without_a_projection_per_block_are_refused_by_name(beginning: str) -> None:
    classes = [name for name in dir(diffusers) if name.startswith(beginning) and "Pipeline" not in name]
    transformers: list[Any] = [name for name in classes if "Transformer" in name] or [f"{beginning}Transformer"]
    for name in transformers:
        with pytest.raises(ModelRefused, match=f"{name} has no modulation projection per block") as caught:
            family_of(name)
        assert caught.value.reason is ModelReason.NO_PROJECTION
