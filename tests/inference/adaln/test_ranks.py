"""Two processes that build together: shares, agreement, and failures on one of them that fail both and then pass."""

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sojourn.inference.adaln.component import Place, _host_tier
from sojourn.inference.adaln.counters import Counters, Result, Source
from sojourn.inference.adaln.projection import Projector
from sojourn.inference.adaln.ranks import Deferred, DistributedRanks, OneRank, Sharing, together
from sojourn.inference.adaln.refusals import BuildFailedElsewhere, PlansRefused
from sojourn.inference.adaln.slab import Slab
from sojourn.inference.adaln.store import PlanStore

from tests.inference.adaln.toys import CPU, Injected, Rig, fresh_rows, make_rig

SCHEDULE = ([0.0], [0.1, 0.7], [0.2])
TIMEOUT_SECONDS = 30
Scenario = Callable[[int, Path], None]


def worker(rank: int, folder: Path, scenarios: Any, outcomes: Any) -> None:
    """Runs scenarios, one after another, until it is given None."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # and not whichever the host's name resolves to, slowly
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    while (given := scenarios.get()) is not None:
        scenario, scratch = given
        try:
            scenario(rank, scratch)
            dist.barrier()
            outcomes.put(None)
        except BaseException as error:
            outcomes.put(f"rank {rank}: {type(error).__name__}: {error}")
    outcomes.close()
    outcomes.join_thread()
    os._exit(0)  # gloo's threads outlive a failed peer


class Pair:
    """Two processes of one gloo group."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._scenarios = [context.Queue() for _ in range(2)]
        self._outcomes = context.Queue()
        self._processes = [
            context.Process(target=worker, args=(rank, folder, self._scenarios[rank], self._outcomes), daemon=True)
            for rank in range(2)
        ]
        for process in self._processes:
            process.start()

    def run(self, scenario: Scenario, scratch: Path) -> None:
        for queue in self._scenarios:
            queue.put((scenario, scratch))
        assert [self._outcomes.get(timeout=4 * TIMEOUT_SECONDS) for _ in range(2)] == [None, None]

    def end(self) -> None:
        for queue, process in zip(self._scenarios, self._processes, strict=True):
            queue.put(None)
            process.join(TIMEOUT_SECONDS)
            process.kill()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.end()


def rig_of_two(**options: Any) -> Rig:
    return make_rig(ranks=DistributedRanks(CPU), **options)


def assert_rows_are_fresh(rig: Rig) -> None:
    for values in SCHEDULE:
        for name, rows in fresh_rows(rig.transformer, *values).items():
            assert torch.equal(rig.rows(name, *values), rows), name


def share_layers(rank: int, folder: Path) -> None:
    rig = rig_of_two()
    rig.build(*SCHEDULE)
    assert_rows_are_fresh(rig)
    weights = [name for name in rig.source.reads if name.endswith("weight")]
    assert len(weights) == 2  # of four layers
    total = torch.tensor([rig.counters.read_bytes])
    dist.all_reduce(total)
    assert total.item() == rig.cache.slab.table.weight_bytes


def share_outputs(rank: int, folder: Path) -> None:
    rig = rig_of_two(sharing=Sharing.OUTPUTS)
    rig.build(*SCHEDULE)
    for values in SCHEDULE:
        for name, rows in fresh_rows(rig.transformer, *values).items():
            assert torch.allclose(rig.rows(name, *values), rows, rtol=1e-2, atol=1e-5)
    mine = sum(rig.source.tensors[name].nbytes // 2 for name in rig.source.reads)
    assert rig.counters.read_bytes == mine
    flat = torch.cat([rows.float().flatten() for rows in rig.cache.slab.rows.values()])[:1]
    other = flat.clone()
    dist.broadcast(other, 0)
    assert torch.equal(flat, other)


def fail_once(rig: Rig, rank: int, target: object, method: str, *, at_call: int = 0) -> None:
    """On rank 1, a method fails at one call and works ever after."""
    if rank != 1:
        return
    original, calls = getattr(target, method), [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at_call + 1:
            raise Injected(method)
        return original(*args, **kwargs)

    setattr(target, method, failing)


def fails_on_both_then_works(rig: Rig, rank: int) -> None:
    expected = Injected if rank == 1 else BuildFailedElsewhere
    with pytest.raises(expected):
        rig.build(*SCHEDULE)
    rig.check()
    assert len(rig.cache.slots.free) == rig.cache.slots.capacity
    rig.build(*SCHEDULE)
    assert_rows_are_fresh(rig)
    assert rig.counters.requests == {Result.FAILED: 1, Result.BUILT: 1}


def fail_at_embedding(rank: int, folder: Path) -> None:
    rig = rig_of_two()
    fail_once(rig, rank, rig.cache.projector, "embed")
    fails_on_both_then_works(rig, rank)


def fail_at_first_layer(rank: int, folder: Path) -> None:
    rig = rig_of_two()
    fail_once(rig, rank, rig.source, "read")
    fails_on_both_then_works(rig, rank)


def fail_at_last_layer(rank: int, folder: Path) -> None:
    rig = rig_of_two()
    fail_once(rig, rank, rig.source, "read", at_call=3)
    fails_on_both_then_works(rig, rank)


def fail_between_collectives(rank: int, folder: Path) -> None:
    rig = rig_of_two()
    share = rig.cache.projector.share

    def failing(*args: Any) -> None:
        if rig.counters.requests == {}:
            fail_once(rig, rank, rig.cache.slab, "write")
        share(*args)

    rig.cache.projector.share = failing  # type: ignore[method-assign]
    fails_on_both_then_works(rig, rank)


def fail_after_collectives(rank: int, folder: Path) -> None:
    rig = rig_of_two()
    fail_once(rig, rank, rig.cache.slab, "show")
    fails_on_both_then_works(rig, rank)


def fail_while_reserving(rank: int, folder: Path) -> None:
    rig = rig_of_two()
    fail_once(rig, rank, rig.cache.slots, "reserve")
    fails_on_both_then_works(rig, rank)


def fail_while_swapping_in(rank: int, folder: Path) -> None:
    rig = rig_of_two(plans=3, pages=8)
    rig.build(*SCHEDULE)
    rig.build([0.4], [0.5], [0.6])
    fail_once(rig, rank, rig.cache.host, "pages")
    with pytest.raises(Injected if rank == 1 else BuildFailedElsewhere):
        rig.build(*SCHEDULE)
    rig.check()
    rig.build(*SCHEDULE)
    assert rig.counters.plans[Source.HOST] == 3
    assert_rows_are_fresh(rig)


def host_copy_on_one_rank_only(rank: int, folder: Path) -> None:
    """A group that one rank could not store is rebuilt by both: they take the same decision."""
    rig = rig_of_two(plans=3, pages=8)
    fail_once(rig, rank, rig.cache, "_copy_out")
    rig.build(*SCHEDULE)
    assert bool(rig.cache.host.groups) == (rank == 0)
    rig.build([0.4], [0.5], [0.6])
    rig.build(*SCHEDULE)
    assert rig.counters.plans[Source.HOST] == 0
    assert_rows_are_fresh(rig)


def store_file_on_one_rank_only(rank: int, folder: Path) -> None:
    def store(table: Any, counters: Any) -> PlanStore:
        return PlanStore(folder / f"store-{rank}", 1 << 30, "f" * 64, table, counters.store_rejected)

    rig = rig_of_two(store=store)
    rig.build(*SCHEDULE)
    assert len(list((folder / f"store-{rank}").glob("*.safetensors"))) == (rank == 0)
    again = rig_of_two(store=store)
    again.build(*SCHEDULE)
    assert again.counters.requests == {Result.BUILT: 1}
    shared = rig_of_two(
        store=lambda table, counters: PlanStore(folder / "store-0", 1 << 30, "f" * 64, table, counters.store_rejected)
    )
    shared.build(*SCHEDULE)
    assert shared.counters.requests == {Result.STORE: 1}
    assert_rows_are_fresh(shared)


def refuse_the_same_on_both(rank: int, folder: Path) -> None:
    rig = rig_of_two(plans=2)
    with pytest.raises(PlansRefused):
        rig.build(*SCHEDULE)
    rig.build([0.1])


def agree_by_minimum(rank: int, folder: Path) -> None:
    ranks = DistributedRanks(CPU)
    assert (ranks.rank, ranks.size) == (rank, 2)
    assert ranks.minimum(100 - rank) == 99
    table = make_rig().cache.slab.table
    place = Place(
        device=CPU,
        host_bytes=(9 - rank) * table.row_bytes,
        host_budget_bytes=(4 + 9 * rank) * table.row_bytes,
        ranks=ranks,
    )
    assert _host_tier(table, place, Counters()).capacity == 4


@pytest.mark.parametrize(
    "scenario",
    [
        share_layers,
        share_outputs,
        fail_at_embedding,
        fail_at_first_layer,
        fail_at_last_layer,
        fail_between_collectives,
        fail_after_collectives,
        fail_while_reserving,
        fail_while_swapping_in,
        host_copy_on_one_rank_only,
        store_file_on_one_rank_only,
        refuse_the_same_on_both,
        agree_by_minimum,
    ],
)
def test_two_ranks(pair: Pair, scenario: Scenario, tmp_path: Path) -> None:
    pair.run(scenario, tmp_path)


# What needs no second process.


def test_one_rank_fails_by_its_own_error() -> None:
    with pytest.raises(Injected), together(OneRank()):
        raise Injected("mine")


def test_a_deferred_failure_is_the_first_one() -> None:
    deferred = Deferred()
    with deferred.keeping():
        raise Injected("first")
    with deferred.keeping():
        raise Injected("second")
    with pytest.raises(Injected, match="first"):
        deferred.raise_first()


def test_outputs_that_do_not_divide_evenly_are_shared_all_the_same() -> None:
    class Third(OneRank):
        rank, size = 1, 3

    rig = make_rig()
    projector = Projector(
        rig.transformer, rig.cache.family, rig.cache.slab.table, rig.source, ranks=Third(), sharing=Sharing.OUTPUTS
    )
    for entry in rig.cache.slab.table.entries.values():
        owned = projector._owned(0, entry)
        assert owned[0][1] == 0
        assert owned[-1][2] == entry.width
        assert all(before[2] == after[1] for before, after in itertools.pairwise(owned))


def test_a_slab_knows_its_size() -> None:
    table = make_rig().cache.slab.table
    slab = Slab(table, plans=3, width=2, device=CPU)
    assert slab.nbytes == 3 * 2 * table.row_bytes + 3 * 8
