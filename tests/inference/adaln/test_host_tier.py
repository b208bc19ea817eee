"""The host tier: pages, groups, reference counts, pressure, and the ladder of page-locked allocations."""

import logging
import math
from collections import Counter

import pytest
import torch
from sojourn.inference.adaln.counters import Result, SkipReason, Source, Tier
from sojourn.inference.adaln.host import HostTier, host_budget_bytes, page_capacity
from sojourn.inference.adaln.host_memory import allocate_pages, available_bytes
from sojourn.inference.adaln.refusals import PlanMissing
from sojourn.inference.adaln.runs import runs
from sojourn.inference.adaln.table import Projection, Table

from tests.inference.adaln.toys import Injected, Rig, fresh_rows, make_rig, plan, step

GIB = 1024**3
TABLE = Table.of({"p": Projection(width=4, inputs=2, dtype=torch.float32, bias=True)})


def groups(rig: Rig) -> list[set[bytes]]:
    return [set(group) for group in rig.cache.host.groups]


def keys(*values: float) -> set[bytes]:
    return {plan(value).key for value in values}


def assert_pages_add_up(tier: HostTier) -> None:
    used = [index for stored in tier._plans.values() for index in stored.pages]
    assert len(set(used)) == len(used)
    assert len(used) + tier.free_pages == tier.capacity


def test_swap_in_restores_evicted_plans_bit_for_bit_without_a_read() -> None:
    rig = make_rig(plans=2, pages=8)
    rig.build([0.1, 0.2], [0.3])
    rig.build([0.4], [0.5])
    reads = len(rig.source.reads)
    rig.build([0.1, 0.2], [0.3])
    assert len(rig.source.reads) == reads
    assert rig.counters.plans == Counter({Source.BUILT: 4, Source.HOST: 2})
    assert rig.counters.requests == {Result.BUILT: 2, Result.HOST: 1}
    for name, rows in fresh_rows(rig.transformer, 0.1, 0.2).items():
        assert torch.equal(rig.rows(name, 0.1, 0.2), rows)


def test_a_skip_recomputes() -> None:
    rig = make_rig(plans=2, pages=1)
    for _ in range(2):
        rig.build([0.1], [0.2])
        rig.build([0.3], [0.4])
    assert rig.counters.requests == {Result.BUILT: 4}
    assert rig.counters.host_skips == {SkipReason.TOO_LARGE: 4}
    assert rig.cache.host.free_pages == 1


def test_a_partial_host_hit_is_a_rebuild_and_counted_as_such() -> None:
    rig = make_rig(plans=2, pages=8)
    rig.build([0.1], [0.2])
    rig.build([0.3], [0.4])
    rig.build([0.1], [0.5])
    assert rig.counters.requests == {Result.BUILT: 3}
    assert rig.counters.plans == Counter({Source.BUILT: 6})


def test_only_what_the_slab_lacks_is_swapped_in() -> None:
    rig = make_rig(plans=3, pages=8)
    rig.build([0.1], [0.2])
    rig.build([0.3], [0.4])
    rig.build([0.1], [0.2])
    assert rig.counters.plans == {Source.BUILT: 4, Source.HOST: 1, Source.GPU: 1}


def test_the_oldest_group_goes_and_shared_plans_stay() -> None:
    rig = make_rig(plans=2, pages=3)
    for second in (0.2, 0.3, 0.4):
        rig.build([0.1], [second])
    assert groups(rig) == [keys(0.1, 0.3), keys(0.1, 0.4)]
    assert rig.cache.host.plans == keys(0.1, 0.3, 0.4)
    assert rig.counters.evicted_plans[Tier.HOST] == 1
    assert_pages_add_up(rig.cache.host)


def test_plans_that_the_new_group_shares_survive_the_eviction_of_all_their_groups() -> None:
    rig = make_rig(plans=3, pages=3)
    rig.build([0.1], [0.2], [0.3])
    rig.build([0.1], [0.4], [0.5])
    assert groups(rig) == [keys(0.1, 0.4, 0.5)]
    assert rig.counters.evicted_plans[Tier.HOST] == 2
    assert_pages_add_up(rig.cache.host)


def test_a_hit_refreshes_the_group() -> None:
    rig = make_rig(plans=4, pages=4)
    rig.build([0.1], [0.2])
    rig.build([0.3], [0.4])
    rig.build([0.1], [0.2])
    rig.build([0.5], [0.6])
    assert groups(rig) == [keys(0.1, 0.2), keys(0.5, 0.6)]


def test_a_group_whose_host_copy_was_evicted_is_stored_again_on_a_hit() -> None:
    rig = make_rig(plans=4, pages=2)
    rig.build([0.1], [0.2])
    rig.build([0.3], [0.4])
    assert groups(rig) == [keys(0.3, 0.4)]
    rig.build([0.1], [0.2])
    assert groups(rig) == [keys(0.1, 0.2)]
    assert rig.counters.host_skips == {}


def test_a_wide_plan_takes_a_page_per_row() -> None:
    rig = make_rig(plans=2, pages=4)
    rig.build([0.1, 0.2, 0.3])
    assert rig.cache.host.free_pages == 1


@pytest.mark.parametrize("where", ["copy", "settle"])
def test_a_failure_while_storing_never_fails_the_request(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    rig = make_rig(plans=4, pages=4)
    rig.build([0.1])

    def fail(*_: object) -> None:
        raise Injected(where)

    target = (rig.cache, "_copy_out") if where == "copy" else (rig.cache.streams, "synchronize")
    with monkeypatch.context() as patched:
        patched.setattr(*target, fail)
        rig.build([0.1], [0.2])
    assert rig.holds(0.2)
    assert rig.counters.host_skips == {SkipReason.COPY_FAILED: 1}
    assert rig.cache.host.plans == keys(0.1)
    assert_pages_add_up(rig.cache.host)
    rig.build([0.1], [0.2])
    assert rig.cache.host.plans == keys(0.1, 0.2)


def test_a_failed_swap_in_leaks_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(plans=1, pages=4)
    rig.build([0.1])
    rig.build([0.2])

    def fail(*_: object) -> None:
        raise Injected("swap-in")

    with monkeypatch.context() as patched:
        patched.setattr("sojourn.inference.adaln.cache.copy_rows", fail)
        for _ in range(3):
            with pytest.raises(Injected):
                rig.build([0.1])
            rig.check()
    with pytest.raises(PlanMissing):
        rig.cache.find(step(0.1))
    rig.build([0.1])
    assert rig.counters.requests[Result.HOST] == 1


def test_a_host_short_of_memory_skips_with_its_reason_and_stores_once_there_is_some() -> None:
    free = [0]
    rig = make_rig(plans=2, pages=4, available_bytes=lambda: free[0])
    rig.build([0.1])
    assert rig.counters.host_skips == {SkipReason.PRESSURE: 1}
    free[0] = 8 * GIB
    rig.build([0.1])
    assert rig.cache.host.plans == keys(0.1)


def test_pages_that_were_written_before_need_no_new_memory() -> None:
    free = [8 * GIB]
    rig = make_rig(plans=2, pages=1, available_bytes=lambda: free[0])
    rig.build([0.1])
    free[0] = 0
    rig.build([0.2])
    assert rig.cache.host.plans == keys(0.2)


def test_what_the_tier_takes_is_what_was_ever_written_and_all_of_it_where_locked() -> None:
    rig = make_rig(plans=4, pages=4)
    page = rig.cache.slab.table.row_bytes
    assert rig.cache.snapshot().host_bytes == 0, "address space is no memory"
    rig.build([0.1, 0.2])
    assert rig.cache.snapshot().host_bytes == 2 * page
    for value in (0.3, 0.4, 0.5, 0.6, 0.7):
        rig.build([value])
    assert rig.cache.snapshot().host_bytes == 4 * page
    rig.cache.invalidate()
    assert rig.cache.snapshot().host_bytes == 4 * page, "pages that were written stay in memory"
    assert HostTier(TABLE, 13, pinned=True, allocate=Ladder(lockable=13)).nbytes == 13 * TABLE.row_bytes


class Ladder:
    """Refuses to lock more than some pages."""

    def __init__(self, lockable: int) -> None:
        self.lockable = lockable
        self.asked: list[tuple[int, bool]] = []

    def __call__(self, pages: int, elements: int, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
        self.asked.append((pages, pinned))
        if pinned and pages > self.lockable:
            raise RuntimeError("CUDA error: out of memory")
        return torch.empty(pages, elements, dtype=dtype)


def test_the_exact_size_is_locked_where_possible(caplog: pytest.LogCaptureFixture) -> None:
    ladder = Ladder(lockable=13)
    tier = HostTier(TABLE, 13, pinned=True, allocate=ladder)
    assert (tier.capacity, tier.kind, ladder.asked) == (13, "pinned", [(13, True)])
    assert not caplog.records


def test_a_failed_lock_halves_until_it_fits_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    ladder = Ladder(lockable=4)
    tier = HostTier(TABLE, 16, pinned=True, allocate=ladder)
    assert (tier.capacity, tier.free_pages, tier.kind) == (4, 4, "pinned")
    assert ladder.asked == [(16, True), (8, True), (4, True)]
    assert "shrank to 4 of 16 pages" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_without_any_lock_the_full_size_is_pageable_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    ladder = Ladder(lockable=0)
    tier = HostTier(TABLE, 4, pinned=True, allocate=ladder)
    assert (tier.capacity, tier.kind, tier.pinned) == (4, "pageable", False)
    assert ladder.asked[-1] == (4, False)
    assert "pageable" in caplog.text


def test_a_tier_without_pages_holds_nothing() -> None:
    tier = HostTier(TABLE, 0, pinned=True)
    assert (tier.kind, tier.nbytes, tier.holds([b"x"])) == ("none", 0, False)


@pytest.mark.parametrize(
    ("available", "ranks", "budget"),
    [
        (0, 1, 0),
        (2 * GIB, 1, 0),
        (10 * GIB, 1, 8 * GIB),
        (10 * GIB, 4, 2 * GIB),
        (100 * GIB, 1, 100 * GIB - math.floor(0.05 * 100 * GIB)),
    ],
)
def test_the_budget_leaves_five_percent_or_two_gib_to_the_host(available: int, ranks: int, budget: int) -> None:
    assert host_budget_bytes(available, ranks=ranks) == budget


def test_the_capacity_is_the_lesser_of_setting_and_budget() -> None:
    page = TABLE.row_bytes
    assert page_capacity(TABLE, configured_bytes=10 * page + 1, budget_bytes=100 * page) == 10
    assert page_capacity(TABLE, configured_bytes=10 * page, budget_bytes=3 * page) == 3
    assert page_capacity(TABLE, configured_bytes=0, budget_bytes=100 * page) == 0


def test_locked_pages_are_registered_at_their_exact_size_and_unregistered_when_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, int]] = []

    class Runtime:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            calls.append(("register", nbytes))
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            calls.append(("unregister", address))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    pages = allocate_pages(13, 7, torch.bfloat16, True)
    address = pages.data_ptr()
    assert calls == [("register", 13 * 7 * 2)]
    del pages
    assert calls[1:] == [("unregister", address)]


def test_memory_that_cannot_be_locked_is_a_failed_step_of_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            return 2

    def check(code: int) -> None:
        raise RuntimeError(f"CUDA error {code}: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    assert HostTier(TABLE, 4, pinned=True).kind == "pageable"


def test_the_host_says_how_much_memory_there_is() -> None:
    assert 0 < available_bytes() < 2**50


def test_rows_that_lie_together_on_both_sides_are_one_copy() -> None:
    assert list(runs([(4, 0), (5, 1), (6, 2)])) == [(4, 0, 3)]
    assert list(runs([(4, 0), (5, 1), (7, 2), (8, 3), (8, 4)])) == [(4, 0, 2), (7, 2, 2), (8, 4, 1)]
    assert list(runs([(4, 1), (5, 0)])) == [(4, 1, 1), (5, 0, 1)]
    assert list(runs([])) == []
