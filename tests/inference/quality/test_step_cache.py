"""The step cache forgets between clips and trajectories, keeps contexts apart, and leaves no trace."""

from typing import Any

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig
from sojourn.inference.quality.fusion_mount import MountRefused, UnmountFailed
from sojourn.inference.quality.sites import SITES
from sojourn.inference.quality.step_cache import MountedStepCache

from tests.inference.quality import toys

ALWAYS = 1e9  # a threshold under which everything after the first step is skipped


def mount(model: Any, threshold: float = ALWAYS) -> tuple[MountedStepCache, list[bool]]:
    observer = toys.Remembering()
    place = SITES[type(model).__name__]
    return MountedStepCache.on(model, place, threshold=threshold, observer=observer), observer.evaluations


MODELS = [(toys.helios, toys.helios_inputs), (toys.minimax_h3, toys.h3_inputs)]


@pytest.mark.parametrize(("make", "inputs"), MODELS)
def test_first_step_is_whole_and_near_ones_are_skipped(make: Any, inputs: Any) -> None:
    model = make()
    stock = toys.bits(toys.run(model, inputs()))
    _, skipped = mount(model)
    assert toys.bits(toys.run(model, inputs())) == stock
    toys.run(model, inputs(shift=0.01))
    assert skipped == [False, True]


@pytest.mark.parametrize(
    ("make", "inputs", "threshold"),
    [(toys.helios, toys.helios_inputs, 0.05), (toys.minimax_h3, toys.h3_inputs, 0.25)],
)
def test_threshold_bounds_the_change_since_the_last_whole_step(make: Any, inputs: Any, threshold: float) -> None:
    """Steps that each change little must not add up unseen."""
    model = make()
    _, skipped = mount(model, threshold=threshold)
    for index in range(12):
        toys.run(model, inputs(shift=0.1 * index))
    assert skipped[0] is False
    assert any(skipped)
    assert not all(skipped[1:])


def test_nothing_is_skipped_at_threshold_zero() -> None:
    model = toys.helios()
    _, skipped = mount(model, threshold=0.0)
    for index in range(3):
        toys.run(model, toys.helios_inputs(shift=0.1 * index))
    assert skipped == [False] * 3


@pytest.mark.parametrize(("make", "inputs"), MODELS)
def test_clip_after_another_starts_afresh(make: Any, inputs: Any) -> None:
    model = make()
    mounted, skipped = mount(model)
    for _ in range(2):
        mounted.fresh()
        toys.run(model, inputs())
        toys.run(model, inputs())
    assert skipped == [False, True, False, True]


def test_helios_levels_and_chunks_start_afresh() -> None:
    model = toys.helios()
    _, skipped = mount(model)
    for step in ({"timestep": 900, "edge": 4}, {"timestep": 600, "edge": 4}, {"timestep": 600}, {"timestep": 300},
                 {"timestep": 900, "edge": 4}, {"timestep": 600, "edge": 4}, {"timestep": 900, "edge": 4}):  # fmt: skip
        toys.run(model, toys.helios_inputs(**step))
    assert skipped == [False, True, False, True, False, True, False]


def test_contexts_of_a_pipeline_are_kept_apart() -> None:
    model = toys.helios()
    _, skipped = mount(model)
    for timestep in (900, 600, 300):
        for context in ("cond", "uncond"):
            with model.cache_context(context):
                toys.run(model, toys.helios_inputs(timestep=timestep))
    assert skipped == [False, False, True, True, True, True]


@pytest.mark.parametrize(("make", "inputs"), MODELS)
def test_no_trace_after_unmounting(make: Any, inputs: Any) -> None:
    model = make()
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    stock = toys.bits(toys.run(model, inputs()))
    mounted, _ = mount(model)
    for shift in (0.0, 0.01):
        toys.run(model, inputs(shift=shift))
    mounted.undo()
    mounted.undo()
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    for shift in (0.01, 0.0):
        found = toys.bits(toys.run(model, inputs(shift=shift)))
    assert found == stock


def test_exception_in_a_step_leaves_the_next_one_whole() -> None:
    model = toys.helios()
    stock = toys.bits(toys.run(model, toys.helios_inputs()))
    mounted, skipped = mount(model)
    toys.run(model, toys.helios_inputs())

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.blocks[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        toys.run(model, toys.helios_inputs())
    handle.remove()
    mounted.fresh()
    assert toys.bits(toys.run(model, toys.helios_inputs())) == stock
    assert skipped[-1] is False


def test_refused_on_a_transformer_with_a_cache_of_its_own_or_nothing_to_skip() -> None:
    with pytest.raises(MountRefused, match="1 block, and there is nothing to skip"):
        mount(toys.helios(layers=1))
    model = toys.helios()
    mounted, _ = mount(model)
    with pytest.raises(MountRefused, match="runs with FirstBlockCacheConfig already"):
        mount(model)
    mounted.undo()


def test_failed_mount_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toys.helios()
    before = {name: set(module.__dict__) for name, module in model.named_modules()}

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no hooks today")

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "register_forward_hook", fail)
        with pytest.raises(RuntimeError, match="no hooks today"):
            mount(model)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    assert not model.is_cache_enabled


def test_cache_that_cannot_be_taken_off_is_an_error() -> None:
    model = toys.helios()
    mounted, _ = mount(model)
    model._cache_config = object()
    with pytest.raises(UnmountFailed, match="start the process anew"):
        mounted.undo()


def test_diffusers_own_way_still_works_beside_it() -> None:
    model = toys.helios()
    mount(model)[0].undo()
    model.enable_cache(FirstBlockCacheConfig(threshold=ALWAYS))
    with model.cache_context("cond"), torch.no_grad():
        model(**toys.cast(toys.helios_inputs(), torch.bfloat16))
    model.disable_cache()
