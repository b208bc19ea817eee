"""The projection: distinct rows alone, weights as they lie, and the two precisions."""

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from sojourn.inference.adaln.refusals import PlansRefused, RequestReason
from sojourn.inference.adaln.settings import Precision
from sojourn.inference.adaln.weights import Part
from torch.nn import functional

from tests.inference.adaln.toys import (
    PROJECTIONS,
    TOY,
    Injected,
    Inputs,
    MemorySource,
    embed,
    fresh_rows,
    make_rig,
    step,
)


def test_repeated_rows_are_stored_once_and_handed_out_as_often_as_asked() -> None:
    rig = make_rig(width=2)
    rig.build([0.5, 0.25, 0.5, 0.5, 0.5])
    (found,) = rig.cache.find(step(0.5, 0.25, 0.5, 0.5, 0.5))
    assert len(set(found.rows.tolist())) == 2
    for name, rows in fresh_rows(rig.transformer, 0.5, 0.25, 0.5, 0.5, 0.5).items():
        assert torch.equal(rig.cache.slab.look_up(name, found.rows), rows)


def test_rows_that_differ_by_their_place_are_never_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As some shapes do on some machines: the last of the rows is one bit off."""
    linear = functional.linear

    def placed(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        rows = linear(x, *rest)
        rows[-1, -1] = torch.nextafter(rows[-1, -1], rows.new_tensor(torch.inf))
        return rows

    rig = make_rig()
    monkeypatch.setattr("sojourn.inference.adaln.products.functional.linear", placed)
    with pytest.raises(PlansRefused, match="differ by their place among 5") as caught:
        rig.build([0.5] * 5)
    assert caught.value.reason is RequestReason.ROWS_DIFFER
    rig.check()
    rig.build([0.5] * 4)
    stored = rig.rows("norm_out.modulation", *[0.5] * 4)
    assert not torch.equal(stored[0], stored[-1])


@pytest.mark.parametrize("shift", [0, 4, 8, 16, 24])
def test_weights_are_aligned_as_they_lie_in_the_file(shift: int) -> None:
    """A float32 product of one row has other bits with a weight 4, 8 or 24 bytes off a cache line."""
    rig = make_rig()
    places = {name: replace(place, offset=place.offset + shift) for name, place in rig.source.places.items()}
    seen = {}

    class Shifted(type(rig.source)):  # type: ignore[misc]
        @property
        def places(self) -> Any:
            return places

        def read(self, part: Part, into: memoryview) -> None:
            seen[part.name] = torch.frombuffer(into, dtype=torch.uint8).data_ptr() % 64
            super().read(part, into)

    rig.cache.projector.retarget(Shifted(rig.source.tensors))
    rig.build([0.3])
    assert set(seen.values()) == {shift}
    assert len(seen) == 2 * len(rig.cache.slab.table.entries)


def test_float32_precision_is_nearer_to_the_truth_and_rounds_once() -> None:
    rig = make_rig(precision=Precision.FP32)
    rig.build([0.3, 0.7])
    for name, module in rig.transformer.named_modules():
        if TOY.is_projection(name):
            x = embed(rig.transformer, step(0.3, 0.7))
            bias = module.bias.float()
            expected = functional.linear(x.float(), module.weight.float(), bias).to(module.weight.dtype)
            assert torch.equal(rig.rows(name, 0.3, 0.7), expected)


def test_float32_precision_leaves_the_process_setting_as_it_was() -> None:
    rig = make_rig(precision=Precision.FP32)
    torch.set_float32_matmul_precision("high")
    try:
        rig.build([0.3])
        assert torch.get_float32_matmul_precision() == "high"
        rig.source.fail_at = "norm_out.modulation.weight"
        with pytest.raises(Exception, match="norm_out"):
            rig.build([0.4])
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_weights_stored_in_another_dtype_are_computed_in_that_of_the_model() -> None:
    rig = make_rig()
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in rig.source.tensors.items()}
    rig.source.tensors = {name: tensor.to(torch.float32) for name, tensor in rounded.items()}
    rig.transformer.load_state_dict(rounded)
    rig.cache.projector.retarget(rig.source)
    rig.build([0.3])
    for name, rows in fresh_rows(rig.transformer, 0.3).items():
        assert torch.equal(rig.rows(name, 0.3), rows)


def test_what_was_not_in_memory_is_read_once_and_leaves_it_at_once() -> None:
    class Recording(MemorySource):
        def read(self, part: Part, into: memoryview) -> None:
            done.append(f"read {part.name}")
            super().read(part, into)

        def forget(self, parts: Iterable[Part]) -> None:
            done.extend(f"forget {part.name}" for part in parts)
            super().forget(parts)

    done: list[str] = []
    rig = make_rig()
    source = Recording(rig.source.tensors)
    rig.cache.projector.retarget(source)
    rig.build([0.3], [0.4])
    assert source.forgotten == source.reads
    assert len(source.reads) == 2 * len(rig.cache.slab.table.entries)
    assert done == [f"{what} {name}" for name in source.reads for what in ("read", "forget")]


def test_what_is_in_memory_is_read_from_there_and_stays() -> None:
    rig = make_rig()
    rig.source.cached = True
    rig.build([0.3], [0.4])
    assert rig.source.forgotten == []
    assert len(rig.source.reads) == 2 * len(rig.cache.slab.table.entries)


@pytest.mark.parametrize("first", range(4))
def test_of_weights_that_are_there_in_part_those_that_were_stay(first: int) -> None:
    """What is there is known before the storage is read, which brings in more."""
    rig = make_rig()
    there = {f"{name}.{leaf}" for name in PROJECTIONS[first : first + 2] for leaf in ("weight", "bias")}

    class ReadAhead(MemorySource):
        def read_cached(self, part: Part, into: memoryview) -> bool:
            if part.name in there:
                self.read(part, into)
            return part.name in there

        def absent(self, parts: Iterable[Part]) -> list[Part]:
            return [part for part in parts if part.name not in there]

        def read(self, part: Part, into: memoryview) -> None:
            super().read(part, into)
            if part.name not in there:
                there.update(self.tensors)

    source = ReadAhead(rig.source.tensors)
    stays = set(there)
    rig.cache.projector.retarget(source)
    rig.build([0.3])
    assert set(source.forgotten) == set(source.reads) - stays
    assert len(source.reads) == 2 * len(PROJECTIONS)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor reads as it would if another device computed."""
    monkeypatch.setattr("sojourn.inference.adaln.sweep._reads_beside", lambda device: True)


@pytest.mark.parametrize("is_cached", [True, False])
def test_while_a_device_computes_a_layer_the_next_is_read(beside: None, is_cached: bool) -> None:
    rig = make_rig()
    rig.source.cached = is_cached
    write, written = rig.cache.slab.write, []

    def waiting(name: str, *args: Any, **kwargs: Any) -> None:
        written.append(name)
        deadline = time.monotonic() + 30
        while len(rig.source.reads) < 2 * min(len(written) + 1, len(PROJECTIONS)):
            assert time.monotonic() < deadline, f"nothing is read while {name} is computed"
            time.sleep(0.001)
        write(name, *args, **kwargs)

    rig.cache.slab.write = waiting  # type: ignore[method-assign]
    rig.build([0.3])
    assert sorted(written) == sorted(PROJECTIONS)
    for name, rows in fresh_rows(rig.transformer, 0.3).items():
        assert torch.equal(rig.rows(name, 0.3), rows), name


@pytest.mark.parametrize("name", PROJECTIONS)
def test_an_error_while_reading_beside_leaves_nothing(beside: None, name: str) -> None:
    rig = make_rig()
    rig.source.fail_at = f"{name}.weight"
    with pytest.raises(Injected, match=name):
        rig.build([0.3])
    rig.check()
    rig.source.fail_at = None
    rig.build([0.3])
    assert rig.holds(0.3)


def test_layers_are_read_in_the_order_of_the_file() -> None:
    rig = make_rig()
    rig.source.tensors = dict(reversed(rig.source.tensors.items()))
    rig.cache.projector.retarget(rig.source)
    rig.build([0.3])
    assert next(name for name in rig.source.reads if name.endswith("weight")) == "norm_out.modulation.weight"


def test_a_linear_that_runs_twice_in_a_forward_reads_two_plans() -> None:
    def now_and_clean(inputs: Inputs) -> tuple[Inputs, ...]:
        return inputs, {"timestep": torch.zeros_like(inputs["timestep"])}

    rig = make_rig()
    rig.cache.family = replace(TOY, calls=now_and_clean)
    rig.build([0.3])
    assert len(rig.keys) == 2
    first, second = rig.cache.find(step(0.3))
    for name in rig.cache.slab.table:
        rows = [rig.cache.slab.look_up(name, found.rows) for found in (first, second)]
        assert torch.equal(rows[0], fresh_rows(rig.transformer, 0.3)[name])
        assert torch.equal(rows[1], fresh_rows(rig.transformer, 0.0)[name])
