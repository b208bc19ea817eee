"""What to do next about a release, from the state of its records alone.

The lock of a release is nothing but the state of its newest record: it has neither owner nor expiry. A pending record
older than helm's own timeout was left by a helm that was killed. Why each answer is right was measured over every
kill point of install, upgrade, rollback and uninstall.
"""

from dataclasses import dataclass
from datetime import datetime

from sojourn.operator.records import Record, Records, newest


@dataclass(frozen=True)
class Wanted:
    """The manifest that should be deployed.

    Attributes:
        inputs: hash of chart and values.
        digest: hash of the manifest; None where it was not rendered, since nothing is there to compare it with.
    """

    inputs: str
    digest: str | None = None

    def is_in(self, record: Record) -> bool:
        """Whether a record holds it."""
        return record.inputs == self.inputs or (self.digest is not None and record.digest == self.digest)


@dataclass(frozen=True)
class Settled:
    """The wanted manifest is deployed."""

    record: Record


@dataclass(frozen=True)
class Sweep:
    """The wanted manifest is deployed, but objects that it lacks may be left."""

    record: Record


@dataclass(frozen=True)
class Apply:
    """Install or upgrade; then sweep, where the release did not start from a deployed state."""

    sweep: bool


@dataclass(frozen=True)
class Wait:
    """Another helm may still be at work."""

    seconds: float


@dataclass(frozen=True)
class Rollback:
    """Roll to a named revision. Without a name helm takes the one before, which may be missing or failed."""

    revision: int


@dataclass(frozen=True)
class DeleteRecords:
    """Delete records that block; the objects stay and are adopted.

    Attributes:
        base: the newest record that stays, which must first note that a sweep is due: nothing else would know of it
            once the blocking records are gone. None where no record stays.
    """

    records: Records
    base: Record | None


@dataclass(frozen=True)
class Tidy:
    """Delete what a recovered operation left in the history: it blocks nothing and would puzzle people."""

    records: Records


@dataclass(frozen=True)
class Uninstall:
    """Finish an uninstall that was cut off."""


Step = Settled | Sweep | Apply | Wait | Rollback | DeleteRecords | Tidy | Uninstall


def next_step(records: Records, wanted: Wanted, *, known_before: bool, now: datetime, lock_seconds: float) -> Step:
    """The next step towards the wanted manifest.

    Args:
        records: all records of the release.
        wanted: what should be deployed.
        known_before: whether the release is known to have existed: its objects may outlive lost records.
        now: the present.
        lock_seconds: helm's own timeout.
    """
    last = newest(records)
    if last is None:
        return Apply(sweep=known_before)
    if last.status == "uninstalling":
        return Uninstall()
    if last.pending:
        return _unlock(last, records, now, lock_seconds)
    if last.status == "deployed":
        left = tuple(record for record in records if record.pending)
        return Tidy(left) if left else _from_deployed(last, wanted)
    return Apply(sweep=True)


def _from_deployed(last: Record, wanted: Wanted) -> Step:
    if not wanted.is_in(last):
        return Apply(sweep=last.sweep == "pending")
    return Sweep(last) if last.sweep == "pending" else Settled(last)


def _unlock(last: Record, records: Records, now: datetime, lock_seconds: float) -> Step:
    age = (now - last.created).total_seconds()
    # Creation times are whole seconds.
    if age < lock_seconds + 1:
        return Wait(lock_seconds + 1 - age)
    if last.status == "pending-install":
        # Rolls forward to the pending revision itself, so that helm knows every object it made.
        return Rollback(last.revision)
    # One roll of the pods instead of two; objects that only the pending revision had are swept.
    stay = [record for record in records if not record.pending]
    return DeleteRecords(tuple(record for record in records if record.pending), newest(stay))
