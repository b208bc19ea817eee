"""The build transaction: what is checked first, what a failure leaves behind, what a hit refreshes."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from sojourn.inference.adaln.counters import Result, Source, Tier
from sojourn.inference.adaln.refusals import PlanMissing, PlansRefused, RequestReason, SettingRefused
from sojourn.inference.adaln.runs import Run
from sojourn.inference.adaln.slab import Slab
from sojourn.inference.adaln.table import Projection, Table
from sojourn.inference.errors import RequestCancelled

from tests.inference.adaln.toys import CPU, PROJECTIONS, Injected, Rig, fresh_rows, make_rig, plan, step


@dataclass(frozen=True)
class State:
    """All that is observable of a cache."""

    published: dict[bytes, int]
    order: list[bytes]
    free: frozenset[int]
    lengths: list[int]
    rows: dict[bytes, list[bytes]]


def state(rig: Rig) -> State:
    slots, slab = rig.cache.slots, rig.cache.slab
    rows = {
        key: [bytes(rows[slot].view(torch.uint8).numpy()) for rows in slab.rows.values()]
        for key, slot in slots.published.items()
    }
    return State(slots.published, list(slots.published), slots.free, slab.lengths.tolist(), rows)


def assert_rows_are_fresh(rig: Rig, *values: float) -> None:
    for name, rows in fresh_rows(rig.transformer, *values).items():
        assert torch.equal(rig.rows(name, *values), rows), name


def test_built_rows_equal_those_of_resident_projections_bit_for_bit() -> None:
    rig = make_rig()
    rig.build([0.0], [0.1, 0.7], [0.2, 0.5, 0.999])
    for values in ([0.0], [0.1, 0.7], [0.2, 0.5, 0.999]):
        assert_rows_are_fresh(rig, *values)
    rig.check()


def test_each_weight_is_read_once_for_all_plans_of_a_build() -> None:
    rig = make_rig()
    rig.build([0.1], [0.2], [0.3, 0.4])
    tensors = [f"{name}.{leaf}" for name in PROJECTIONS for leaf in ("weight", "bias")]
    assert sorted(rig.source.reads) == sorted(tensors)
    assert rig.counters.read_bytes == rig.cache.slab.table.weight_bytes
    assert rig.counters.builds == 1


def test_overflow_does_not_lose_a_plan_that_the_present_request_reuses() -> None:
    rig = make_rig(plans=2)
    rig.build([0.1], [0.2])
    rig.build([0.1], [0.3])
    assert rig.holds(0.1)
    assert rig.holds(0.3)
    assert not rig.holds(0.2)
    assert_rows_are_fresh(rig, 0.1)
    assert_rows_are_fresh(rig, 0.3)
    assert rig.counters.plans == {Source.BUILT: 3, Source.GPU: 1}


@pytest.mark.parametrize("leaf", ["weight", "bias"])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_a_build_that_fails_at_any_layer_does_not_look_like_a_hit_on_retry(projection: str, leaf: str) -> None:
    rig = make_rig()
    rig.build([0.1])
    before = state(rig)
    rig.source.fail_at = f"{projection}.{leaf}"
    for _ in range(rig.cache.slab.plans + 1):  # more often than there are slots: a leaked one would be missed
        with pytest.raises(Injected):
            rig.build([0.2, 0.3], [0.1])
        rig.check()
        assert not rig.holds(0.2, 0.3)
        with pytest.raises(PlanMissing):
            rig.cache.find(step(0.2, 0.3))
    assert state(rig) == before
    rig.source.fail_at = None
    rig.build([0.2, 0.3], [0.1])
    assert rig.counters.requests == {Result.BUILT: 2, Result.FAILED: 5}
    assert_rows_are_fresh(rig, 0.2, 0.3)


def test_a_build_that_fails_while_embedding_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(plans=2)
    rig.build([0.1], [0.2])
    before = state(rig)

    def fail(*_: object) -> torch.Tensor:
        raise Injected("embedding")

    monkeypatch.setattr(rig.transformer.time_embedder, "forward", fail)
    for _ in range(3):
        with pytest.raises(Injected):
            rig.build([0.3], [0.4])
    assert state(rig) == before
    assert rig.counters.evicted_plans == {}
    monkeypatch.undo()
    rig.build([0.3], [0.4])
    assert_rows_are_fresh(rig, 0.3)


def test_a_source_that_has_changed_fails_the_build_before_anything_is_touched() -> None:
    rig = make_rig(plans=1)
    rig.build([0.1])
    before = state(rig)
    rig.source.fail_check = True
    with pytest.raises(Injected):
        rig.build([0.2])
    assert state(rig) == before


@pytest.mark.parametrize("method", ["write", "show"])
def test_a_build_that_fails_while_writing_leaks_no_slot(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    rig = make_rig(plans=2)
    rig.build([0.1])

    def fail(*_: object, **__: object) -> None:
        raise Injected(method)

    with monkeypatch.context() as patched:
        patched.setattr(rig.cache.slab, method, fail)
        with pytest.raises(Injected):
            rig.build([0.2])
    rig.check()
    assert len(rig.cache.slots.free) == 1
    rig.build([0.2])
    assert_rows_are_fresh(rig, 0.2)


def test_an_interrupted_build_leaks_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rig.cache.slab, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rig.build([0.2])
    rig.check()
    assert len(rig.cache.slots.free) == rig.cache.slots.capacity


def test_a_request_that_is_stopped_during_its_build_leaves_nothing_behind() -> None:
    rig = make_rig()
    layers = []

    def stop() -> None:
        layers.append(len(rig.source.reads))
        if len(layers) == 3:
            raise RequestCancelled("gone")

    with pytest.raises(RequestCancelled):
        rig.cache.prepare([step(0.1), step(0.2)], check=stop)
    assert len(layers) == 3
    rig.check()
    assert len(rig.cache.slots.free) == rig.cache.slots.capacity
    rig.build([0.1], [0.2])
    assert_rows_are_fresh(rig, 0.1)


def test_the_gauges_wait_for_no_build() -> None:
    rig = make_rig()
    seen = []

    def look() -> None:
        reader = threading.Thread(target=lambda: seen.append(rig.cache.snapshot()))
        reader.start()
        reader.join(10)

    rig.cache.prepare([step(0.1), step(0.2)], check=look).release()
    assert [gauges.slots_reserved for gauges in seen] == [2] * len(PROJECTIONS)


def test_an_over_many_request_is_refused_before_any_resident_plan_is_touched() -> None:
    rig = make_rig(plans=2)
    rig.build([0.1], [0.2])
    before = state(rig)
    with pytest.raises(PlansRefused, match="3 different plans and --adaln-plans is 2; set it to 3") as caught:
        rig.build([0.1], [0.3], [0.4])
    assert caught.value.reason is RequestReason.TOO_MANY_PLANS
    assert state(rig) == before
    assert rig.counters.requests[Result.REFUSED] == 1
    assert rig.counters.refusals == {RequestReason.TOO_MANY_PLANS: 1}


def test_an_over_wide_request_is_refused_before_any_resident_plan_is_touched() -> None:
    rig = make_rig(plans=2, width=2)
    rig.build([0.1], [0.2])
    before = state(rig)
    with pytest.raises(PlansRefused, match=r"set --adaln-plan-width 3 or more \(one needs 1, many needs 4\)") as caught:
        rig.build([0.1, 0.2, 0.3])
    assert caught.value.reason is RequestReason.TOO_WIDE
    assert state(rig) == before
    assert rig.source.reads.count("blocks.0.modulation.weight") == 1


def test_a_request_with_nan_is_refused_and_counted() -> None:
    rig = make_rig()
    with pytest.raises(PlansRefused):
        rig.build([0.1], [float("nan")])
    assert rig.counters.refusals == {RequestReason.NONFINITE: 1}
    assert not rig.keys


def test_a_schedule_with_repeated_plans_counts_each_once_against_the_capacity() -> None:
    rig = make_rig(plans=2)
    rig.build([0.1], [0.2], [0.1], [0.2])
    assert len(rig.keys) == 2


@pytest.mark.parametrize(
    ("plans", "width", "setting"),
    [(0, 4, "--adaln-plans"), (-1, 4, "--adaln-plans"), (4, 0, "--adaln-plan-width"), (4, -2, "--adaln-plan-width")],
)
def test_non_positive_capacities_are_refused_at_construction_naming_the_setting(
    plans: int, width: int, setting: str
) -> None:
    table = Table.of({"p": Projection(width=4, inputs=2, dtype=torch.float32, bias=True)})
    with pytest.raises(SettingRefused, match=setting) as caught:
        Slab(table, plans=plans, width=width, device=CPU)
    assert caught.value.setting == setting


def test_alternating_two_schedules_that_fit_hits_after_the_first_pass() -> None:
    rig = make_rig(plans=4)
    for _ in range(5):
        rig.build([0.1], [0.2])
        rig.build([0.3], [0.4])
    assert rig.counters.requests == {Result.BUILT: 2, Result.HIT: 8}
    assert rig.counters.evicted_plans == {}
    assert set(rig.cache.slots.published.values()) == {0, 1, 2, 3}


def test_a_hit_refreshes() -> None:
    rig = make_rig(plans=2)
    rig.build([0.1])
    rig.build([0.2])
    rig.build([0.1])
    rig.build([0.3])
    assert rig.holds(0.1)
    assert not rig.holds(0.2)


def test_the_least_recently_used_plan_is_evicted_first() -> None:
    rig = make_rig(plans=2)
    rig.build([0.1])
    rig.build([0.2])
    rig.build([0.1], [0.3])
    assert rig.holds(0.1)
    assert not rig.holds(0.2)
    assert rig.counters.evicted_plans == {Tier.GPU: 1}


def test_plus_and_minus_zero_are_built_apart() -> None:
    rig = make_rig()
    rig.build([0.0])
    rig.build([-0.0])
    assert rig.counters.requests == {Result.BUILT: 2}


def test_a_victim_is_invisible_before_its_slot_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(plans=1)
    rig.build([0.1])
    seen = []
    write = rig.cache.slab.write

    def spy(name: str, rows: torch.Tensor, places: Sequence[Run], *, first_output: int = 0) -> None:
        ((target, _, _),) = places
        slot = target // rig.cache.slab.width
        seen.append((rig.cache.slab.lengths[slot].item(), rig.holds(0.1), slot in rig.cache.slots.reserved))
        write(name, rows, places, first_output=first_output)

    monkeypatch.setattr(rig.cache.slab, "write", spy)
    rig.build([0.2])
    assert set(seen) == {(0, False, True)}


def test_plans_of_a_request_in_flight_are_pinned_until_it_ends() -> None:
    rig = make_rig(plans=2)
    running = rig.cache.prepare([step(0.1)])
    rig.build([0.2])
    rig.build([0.3])
    assert rig.holds(0.1)
    with pytest.raises(PlansRefused, match="requests in flight hold all but 1 of the other plans"):
        rig.build([0.4], [0.5])
    running.release()
    running.release()
    rig.build([0.4], [0.5])
    assert rig.cache.slots.pinned == frozenset()


def test_a_lease_that_nobody_holds_any_more_is_released() -> None:
    rig = make_rig(plans=1)
    running = rig.cache.prepare([step(0.1)])
    assert rig.cache.slots.pinned
    del running
    assert not rig.cache.slots.pinned
    rig.build([0.2])


def test_a_failed_request_pins_nothing() -> None:
    rig = make_rig()
    rig.source.fail_at = "norm_out.modulation.bias"
    with pytest.raises(Injected):
        rig.build([0.1])
    assert not rig.cache.slots.pinned


def test_the_slots_of_a_request_are_a_device_tensor_in_the_order_of_its_forwards() -> None:
    rig = make_rig()
    with rig.cache.prepare([step(0.1), step(0.2), step(0.1)]) as lease:
        assert lease.slots.dtype == torch.int64
        assert lease.slots[0] == lease.slots[2] != lease.slots[1]
        assert lease.slots.tolist() == [rig.cache.slots.published[plan(v).key] for v in (0.1, 0.2, 0.1)]


def test_the_buffers_never_move() -> None:
    rig = make_rig(plans=2, pages=2)
    pointers = [tensor.data_ptr() for tensor in (rig.cache.slab.lengths, *rig.cache.slab.rows.values())]
    for value in range(6):
        rig.build([value / 10])
    rig.cache.invalidate()
    rig.build([0.1])
    assert pointers == [tensor.data_ptr() for tensor in (rig.cache.slab.lengths, *rig.cache.slab.rows.values())]


def test_invalidate_drops_all_tiers() -> None:
    rig = make_rig(pages=8)
    rig.build([0.1], [0.2])
    other = make_rig(seed=1)
    rig.transformer.load_state_dict(other.transformer.state_dict())
    rig.cache.invalidate(other.source)
    rig.check()
    with pytest.raises(PlanMissing, match="no request has prepared"):
        rig.cache.find(step(0.1))
    rig.build([0.1], [0.2])
    assert rig.counters.requests == {Result.BUILT: 2}
    assert_rows_are_fresh(rig, 0.1)
    assert other.source.reads


def test_a_request_in_flight_over_an_invalidation_fails_and_never_reads_other_rows() -> None:
    rig = make_rig()
    lease = rig.cache.prepare([step(0.1)])
    rig.cache.invalidate()
    rig.build([0.7])
    assert not lease.steps[0][0].is_valid()
    lease.release()
    rig.check()


def test_the_gauges_add_up_to_the_capacities() -> None:
    rig = make_rig(plans=4, pages=6)
    rig.build([0.1, 0.2], [0.3])
    gauges = rig.cache.snapshot()
    assert (gauges.slots_published, gauges.slots_reserved, gauges.slots_free) == (2, 0, 2)
    assert (gauges.pages_used, gauges.pages_free) == (3, 3)
    assert gauges.device_bytes == rig.cache.slab.nbytes
    assert gauges.host_kind == "pageable"
    assert gauges.weight_bytes == sum(
        tensor.nbytes for name, tensor in rig.source.tensors.items() if ".modulation." in name
    )
