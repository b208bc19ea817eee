"""The plan store: built once per node, mapped by everyone else, never trusted blindly."""

import multiprocessing
import os
import stat
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sojourn.inference.adaln.counters import Counters, RejectReason, Result, Source
from sojourn.inference.adaln.refusals import SettingRefused
from sojourn.inference.adaln.store import PlanStore, schedule_digest
from sojourn.inference.adaln.table import Table

from tests.inference.adaln.toys import Rig, fresh_rows, make_rig, plan

FINGERPRINT = "f" * 64
SCHEDULE = ([0.0], [0.1, 0.7], [0.2])


def stored_at(
    directory: Path, *, fingerprint: str = FINGERPRINT, max_bytes: int = 1 << 30, wait_seconds: float = 600.0
) -> Callable[[Table, Counters], PlanStore]:
    def make(table: Table, counters: Counters) -> PlanStore:
        return PlanStore(directory, max_bytes, fingerprint, table, counters.store_rejected, wait_seconds)

    return make


def file_of(directory: Path) -> Path:
    (path,) = directory.glob("*.safetensors")
    return path


def assert_rows_are_fresh(rig: Rig) -> None:
    for values in SCHEDULE:
        for name, rows in fresh_rows(rig.transformer, *values).items():
            assert torch.equal(rig.rows(name, *values), rows)


def test_what_one_process_builds_another_maps(tmp_path: Path) -> None:
    first = make_rig(store=stored_at(tmp_path))
    first.build(*SCHEDULE)
    second = make_rig(store=stored_at(tmp_path))
    second.build(*SCHEDULE)
    assert first.counters.requests == {Result.BUILT: 1}
    assert second.counters.requests == {Result.STORE: 1}
    assert second.counters.plans == Counter({Source.STORE: 3})
    assert second.source.reads == []
    assert_rows_are_fresh(second)


def test_a_file_holds_the_whole_schedule_though_some_of_it_was_resident(tmp_path: Path) -> None:
    first = make_rig(store=stored_at(tmp_path))
    first.build([0.2])
    first.build(*SCHEDULE)
    second = make_rig(store=stored_at(tmp_path))
    second.build(*SCHEDULE)
    assert second.counters.requests == {Result.STORE: 1}
    assert_rows_are_fresh(second)


def test_what_comes_from_the_store_goes_to_the_host_tier_too(tmp_path: Path) -> None:
    make_rig(store=stored_at(tmp_path)).build(*SCHEDULE)
    second = make_rig(plans=3, pages=8, store=stored_at(tmp_path))
    second.build(*SCHEDULE)
    second.build([0.5], [0.6], [0.8])
    second.build(*SCHEDULE)
    assert second.counters.requests == {Result.STORE: 1, Result.BUILT: 1, Result.HOST: 1}
    assert_rows_are_fresh(second)


def test_other_weights_have_other_files(tmp_path: Path) -> None:
    make_rig(store=stored_at(tmp_path)).build(*SCHEDULE)
    other = make_rig(seed=1, store=stored_at(tmp_path, fingerprint="e" * 64))
    other.build(*SCHEDULE)
    assert other.counters.requests == {Result.BUILT: 1}
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_a_schedule_is_its_plans_in_order() -> None:
    a, b = plan(0.1).key, plan(0.2).key
    assert schedule_digest([a, b]) != schedule_digest([b, a])
    assert schedule_digest([a, b]) != schedule_digest([a])
    assert schedule_digest([a + b]) != schedule_digest([a, b])


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 0x10
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(4096))


def forbid(path: Path) -> None:
    path.unlink()
    path.mkdir()


def other_fingerprint(path: Path) -> None:
    rewrite(path, fingerprint="0" * 64)


def other_format(path: Path) -> None:
    rewrite(path, format="someone-else-1")


def other_schedule(path: Path) -> None:
    rewrite(path, schedule="0" * 64)


def no_checksums(path: Path) -> None:
    rewrite(path, checksums="")


def words_for_checksums(path: Path) -> None:
    rewrite(path, checksums="a b c")


def other_shape(path: Path) -> None:
    rewrite(path, {name: rows[:, :-1].contiguous() for name, rows in load_file(path).items()})


def other_dtype(path: Path) -> None:
    rewrite(path, {name: rows.to(torch.float16) for name, rows in load_file(path).items()})


def rewrite(path: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: str) -> None:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = {**file.metadata(), **changes}
    save_file(tensors or load_file(path), path, metadata)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, RejectReason.CORRUPT),
        (flip_a_bit, RejectReason.CORRUPT),
        (empty, RejectReason.CORRUPT),
        (garbage, RejectReason.CORRUPT),
        (no_checksums, RejectReason.CORRUPT),
        (words_for_checksums, RejectReason.CORRUPT),
        (other_shape, RejectReason.CORRUPT),
        (other_dtype, RejectReason.CORRUPT),
        (other_fingerprint, RejectReason.FOREIGN),
        (other_format, RejectReason.FOREIGN),
        (other_schedule, RejectReason.FOREIGN),
        (forbid, RejectReason.UNREADABLE),
    ],
)
def test_a_damaged_or_foreign_file_is_counted_and_never_trusted(
    tmp_path: Path, damage: Callable[[Path], None], reason: RejectReason
) -> None:
    make_rig(store=stored_at(tmp_path)).build(*SCHEDULE)
    damage(file_of(tmp_path))
    second = make_rig(store=stored_at(tmp_path))
    second.build(*SCHEDULE)
    assert second.counters.requests == {Result.BUILT: 1}
    assert second.counters.store_rejects[reason] == 1
    assert set(second.counters.store_rejects) <= {reason, RejectReason.UNWRITABLE}
    assert_rows_are_fresh(second)
    second.check()


def test_a_damaged_file_is_replaced_by_the_next_build(tmp_path: Path) -> None:
    make_rig(store=stored_at(tmp_path)).build(*SCHEDULE)
    flip_a_bit(file_of(tmp_path))
    make_rig(store=stored_at(tmp_path)).build(*SCHEDULE)
    third = make_rig(store=stored_at(tmp_path))
    third.build(*SCHEDULE)
    assert third.counters.requests == {Result.STORE: 1}


def test_other_files_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model.safetensors").write_bytes(b"not ours")
    rig = make_rig(store=stored_at(tmp_path, max_bytes=8000))
    for value in range(8):
        rig.build([value / 10])
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "model.safetensors").exists()


def test_the_directory_stays_within_its_cap_and_the_oldest_file_goes_first(tmp_path: Path) -> None:
    rig = make_rig(store=stored_at(tmp_path))
    rig.build([0.0])
    size = file_of(tmp_path).stat().st_size
    rig.cache.store = stored_at(tmp_path, max_bytes=3 * size + 10)(rig.cache.slab.table, rig.counters)
    for value in (0.1, 0.2, 0.3, 0.4):
        time.sleep(0.01)
        rig.build([value])
    kept = set(tmp_path.glob("*.safetensors"))
    assert kept == {rig.cache.store.path([plan(value).key]) for value in (0.2, 0.3, 0.4)}
    assert rig.cache.store.nbytes <= rig.cache.store.max_bytes
    assert rig.cache.snapshot().store_bytes == rig.cache.store.nbytes


def test_a_schedule_larger_than_the_cap_is_not_written_and_the_request_is_served(tmp_path: Path) -> None:
    rig = make_rig(store=stored_at(tmp_path, max_bytes=10))
    rig.build(*SCHEDULE)
    assert not list(tmp_path.glob("*.safetensors"))
    assert rig.counters.store_rejects == {RejectReason.UNWRITABLE: 1}
    assert_rows_are_fresh(rig)


def test_a_directory_that_cannot_be_made_costs_no_request(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rig = make_rig(store=stored_at(tmp_path / "file" / "below"))
    rig.build(*SCHEDULE)
    assert_rows_are_fresh(rig)
    assert rig.counters.store_rejects[RejectReason.UNWRITABLE] == 1


def test_the_file_is_readable_by_others_and_no_temporary_is_left(tmp_path: Path) -> None:
    make_rig(store=stored_at(tmp_path)).build(*SCHEDULE)
    assert stat.S_IMODE(file_of(tmp_path).stat().st_mode) == 0o644
    assert not list(tmp_path.glob("*.tmp"))


def test_a_map_of_a_file_that_was_deleted_stays_valid(tmp_path: Path) -> None:
    rig = make_rig(store=stored_at(tmp_path))
    rig.build(*SCHEDULE)
    found = rig.cache.store.find([plan(*values) for values in SCHEDULE])
    file_of(tmp_path).unlink()
    assert found is not None
    assert found.plan_rows(plan(0.2).key)


def test_a_cap_that_holds_nothing_and_a_directory_that_is_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingRefused, match="--adaln-store-bytes is 0"):
        make_rig(store=stored_at(tmp_path, max_bytes=0))
    with pytest.raises(SettingRefused, match=r"--adaln-store .*is a file"):
        make_rig(store=stored_at(tmp_path / "file"))


def race(directory: Path, barrier: Any, results: Any, waits: bool) -> None:
    """One of two processes that build the same schedule at the same moment."""
    torch.set_num_threads(1)
    rig = make_rig(store=stored_at(directory, wait_seconds=600.0 if waits else 0.0))
    barrier.wait(60)
    rig.build(*SCHEDULE)
    assert_rows_are_fresh(rig)
    results.put(dict(rig.counters.requests))


@pytest.mark.parametrize("waits", [True, False], ids=["one waits for the other", "neither waits"])
def test_two_processes_that_race_end_with_one_valid_file_and_both_correct(tmp_path: Path, waits: bool) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    workers = [context.Process(target=race, args=(tmp_path, barrier, queue, waits)) for _ in range(2)]
    for worker in workers:
        worker.start()
    results = [queue.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    if waits:
        assert sorted(str(result) for result in results) == sorted([str({Result.BUILT: 1}), str({Result.STORE: 1})])
    assert file_of(tmp_path).exists()
    third = make_rig(store=stored_at(tmp_path))
    third.build(*SCHEDULE)
    assert third.counters.requests == {Result.STORE: 1}
    assert_rows_are_fresh(third)


def test_whoever_cannot_wait_any_longer_builds_for_itself(tmp_path: Path) -> None:
    patient = make_rig(store=stored_at(tmp_path))
    hurried = make_rig(store=stored_at(tmp_path, wait_seconds=0.1))
    assert patient.cache.store is not None
    with patient.cache.store.building([plan(*values).key for values in SCHEDULE]):
        hurried.build(*SCHEDULE)
    assert hurried.counters.requests == {Result.BUILT: 1}
