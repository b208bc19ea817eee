"""What is done next about a release, for every state that helm leaves behind."""

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest
from sojourn.operator.records import Record, deployed, newest
from sojourn.operator.recovery import (
    Apply,
    DeleteRecords,
    Rollback,
    Settled,
    Step,
    Sweep,
    Tidy,
    Uninstall,
    Wait,
    Wanted,
    next_step,
)

NOW = datetime(2026, 9, 1, 12, tzinfo=UTC)


def record(revision: int, status: str, *, age: float = 1000, digest: str = "old", sweep: str = "done") -> Record:
    return Record(
        name=f"sh.helm.release.v1.dsvc-demo.v{revision}",
        namespace="studio",
        release="dsvc-demo",
        revision=revision,
        status=status,
        created=NOW - timedelta(seconds=age),
        digest=digest,
        sweep=sweep,
    )


def step(*records: Record, known_before: bool = True) -> Step:
    return next_step(records, Wanted("inputs", "wanted"), known_before=known_before, now=NOW, lock_seconds=60)


@pytest.mark.parametrize("status", ["pending-install", "pending-upgrade", "pending-rollback"])
def test_a_young_lock_is_waited_for(status: str) -> None:
    assert step(record(1, "deployed"), record(2, status, age=20)) == Wait(41)


CASES: list[tuple[str, tuple[Record, ...], Step]] = [
    ("nothing there, nothing stray possible", (), Apply(sweep=True)),
    (
        "as wanted",
        (record(1, "superseded"), record(2, "deployed", digest="wanted")),
        Settled(record(2, "deployed", digest="wanted")),
    ),
    ("deployed, but something else", (record(1, "deployed"),), Apply(sweep=False)),
    (
        "deployed as wanted, the sweep after it was cut off",
        (record(2, "deployed", digest="wanted", sweep="pending"),),
        Sweep(record(2, "deployed", digest="wanted", sweep="pending")),
    ),
    ("a wish after a cut-off sweep keeps it", (record(2, "deployed", sweep="pending"),), Apply(sweep=True)),
    ("failed", (record(1, "deployed"), record(2, "failed", digest="wanted")), Apply(sweep=True)),
    ("only superseded left", (record(1, "superseded"),), Apply(sweep=True)),
    ("killed install", (record(1, "pending-install"),), Rollback(1)),
    (
        "killed upgrade",
        (record(1, "deployed"), record(2, "pending-upgrade")),
        DeleteRecords((record(2, "pending-upgrade"),), record(1, "deployed")),
    ),
    (
        "killed upgrade whose predecessor is only superseded",
        (record(1, "superseded"), record(2, "pending-upgrade")),
        DeleteRecords((record(2, "pending-upgrade"),), record(1, "superseded")),
    ),
    (
        "rolled forward, the killed install still in the history",
        (record(1, "pending-install"), record(2, "deployed", digest="wanted")),
        Tidy((record(1, "pending-install"),)),
    ),
    (
        "killed rollback of a killed install",
        (record(1, "pending-install"), record(2, "pending-rollback")),
        DeleteRecords((record(1, "pending-install"), record(2, "pending-rollback")), None),
    ),
    ("killed uninstall", (record(1, "superseded"), record(2, "uninstalling", age=0)), Uninstall()),
    ("kept history of an uninstalled release", (record(2, "uninstalled"),), Apply(sweep=True)),
]


@pytest.mark.parametrize(("records", "wanted"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_every_state_has_its_next_step(records: tuple[Record, ...], wanted: Step) -> None:
    assert step(*records) == wanted


def test_equal_inputs_are_equal_whatever_the_digest() -> None:
    same = dataclasses.replace(record(1, "deployed", digest=""), inputs="inputs")
    assert step(same) == Settled(same)
    assert next_step((record(1, "deployed", digest=""),), Wanted("a"), known_before=True, now=NOW, lock_seconds=60) == (
        Apply(sweep=False)
    )


def test_a_first_install_sweeps_nothing() -> None:
    assert step(known_before=False) == Apply(sweep=False)


def test_the_newest_is_by_number_not_by_order() -> None:
    records = (record(10, "superseded"), record(9, "deployed"), record(2, "deployed"))
    assert newest(records) == records[0]
    assert deployed(records) == records[1]
