"""Conditions: pure transitions."""

from sojourn.operator.conditions import (
    MAX_MESSAGE_CHARACTERS,
    READY,
    RECONCILING,
    STALLED,
    Verdict,
    find,
    merge,
    transitions,
)
from sojourn.operator.resources.status import UNSEEN, DiffusionServiceStatus

EARLY, LATE = "2026-09-01T12:00:00Z", "2026-09-01T12:05:00Z"


def test_the_time_moves_only_with_the_status() -> None:
    before = merge((), [Verdict(READY, "False", "Loading")], generation=1, now=EARLY)
    same = merge(before, [Verdict(READY, "False", "OOMKilled", "code 137")], generation=2, now=LATE)
    other = merge(same, [Verdict(READY, "True", "Serving")], generation=2, now=LATE)
    assert [found.last_transition_time for found in (*same, *other)] == [EARLY, LATE]
    assert same[0].observed_generation == 2


def test_the_time_begins_with_what_the_operator_says_not_with_what_an_object_is_born_with() -> None:
    born = DiffusionServiceStatus.model_validate(UNSEEN).conditions
    after = merge(born, [Verdict(READY, "Unknown", "Reconciling")], generation=1, now=EARLY)
    assert after[0].last_transition_time == EARLY


def test_reconciling_and_stalled_exist_only_while_they_are_true() -> None:
    busy = merge((), [Verdict(RECONCILING, "True", "RollingOut")], generation=1, now=EARLY)
    assert find(busy, RECONCILING)
    assert merge(busy, [Verdict(RECONCILING, "False", "Serving")], generation=1, now=LATE) == ()
    assert merge(busy, [], generation=1, now=LATE) == ()


def test_what_was_not_looked_at_stays() -> None:
    before = merge((), [Verdict("PlanFits", "True", "Fits")], generation=1, now=EARLY)
    after = merge(before, [Verdict(STALLED, "True", "PolicyNotFound")], generation=2, now=LATE)
    assert find(after, "PlanFits") == before[0]


def test_a_pass_that_finds_the_same_changes_nothing() -> None:
    verdicts = [Verdict(READY, "True", "Serving", "1 of 1"), Verdict("PlanFits", "True", "Fits")]
    before = merge((), verdicts, generation=3, now=EARLY)
    assert merge(before, verdicts, generation=3, now=LATE) == before
    assert transitions(before, merge(before, verdicts, generation=3, now=LATE)) == []


def test_a_long_message_is_cut_to_what_the_schema_takes() -> None:
    (cut,) = merge((), [Verdict(READY, "False", "HelmFailed", "x" * 5000)], generation=1, now=EARLY)
    assert len(cut.message) == MAX_MESSAGE_CHARACTERS


def test_a_transition_is_a_new_status_or_reason() -> None:
    before = merge((), [Verdict(READY, "False", "Loading", "a")], generation=1, now=EARLY)
    after = merge(before, [Verdict(READY, "False", "OOMKilled", "a")], generation=1, now=LATE)
    assert [found.reason for found in transitions(before, after)] == ["OOMKilled"]
