"""Conditions as kstatus reads them, as pure transitions over frozen tuples.

Ready is always there; Reconciling and Stalled exist only while they are True. The time of a condition moves only when
its status does.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sojourn.operator.resources.status import Condition

Status = Literal["True", "False", "Unknown"]
Conditions = tuple[Condition, ...]

READY = "Ready"
RECONCILING = "Reconciling"
STALLED = "Stalled"
RELEASED = "Released"
PLAN_FITS = "PlanFits"
RESIDENCY_VISIBLE = "ResidencyVisible"
PAGE_OUT_EFFECTIVE = "PageOutEffective"
POLICY_RESOLVED = "PolicyResolved"
IN_USE = "InUse"

ONLY_WHILE_TRUE = frozenset({RECONCILING, STALLED})
# A message comes from helm, the API server or a runtime; longer ones are refused by the schema.
MAX_MESSAGE_CHARACTERS = 1024


@dataclass(frozen=True)
class Verdict:
    """What a pass found out about one aspect."""

    type: str
    status: Status
    reason: str
    message: str = ""


def find(conditions: Conditions, type_: str) -> Condition | None:
    """The condition of a type, if it is there."""
    return next((condition for condition in conditions if condition.type == type_), None)


def merge(before: Conditions, verdicts: Iterable[Verdict], *, generation: int, now: str) -> Conditions:
    """Conditions after a pass over `generation`.

    Types without a verdict stay as they are, except those that exist only while they are True: without a verdict
    they go.
    """
    given = {verdict.type: verdict for verdict in verdicts}
    kept = {old.type: old for old in before if old.type not in ONLY_WHILE_TRUE}
    fresh = {
        verdict.type: _condition(find(before, verdict.type), verdict, generation, now)
        for verdict in given.values()
        if verdict.status == "True" or verdict.type not in ONLY_WHILE_TRUE
    }
    return tuple(sorted({**kept, **fresh}.values(), key=lambda condition: condition.type))


def transitions(before: Conditions, after: Conditions) -> list[Condition]:
    """Conditions whose status or reason is another than before. What people get an event about."""
    return [
        condition
        for condition in after
        if (old := find(before, condition.type)) is None
        or (old.status, old.reason) != (condition.status, condition.reason)
    ]


def _condition(old: Condition | None, verdict: Verdict, generation: int, now: str) -> Condition:
    message = verdict.message
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = message[: MAX_MESSAGE_CHARACTERS - 1] + "…"
    return Condition(
        type=verdict.type,
        status=verdict.status,
        reason=verdict.reason,
        message=message,
        observed_generation=generation,
        last_transition_time=old.last_transition_time if old and _lasts(old, verdict) else now,
    )


def _lasts(old: Condition, verdict: Verdict) -> bool:
    """Whether the status stays what it was. What an object is born with, of no generation, has no time."""
    return old.status == verdict.status and old.observed_generation > 0
