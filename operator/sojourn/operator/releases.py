"""Brings one release to where it should be: digest, recovery, apply, sweep, drift, uninstall.

Everything here can be cut off at any request and begun again: what was going on is read from the records, never from
memory. Calls for one release must not overlap; the queue sees to that.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from sojourn.operator.desired import Values
from sojourn.operator.drift import Drift, correct, sweep
from sojourn.operator.errors import NotFound, OperatorError, Permanent
from sojourn.operator.helm import Helm, KindMissing, ReleaseBroken, ReleaseLocked, ReleaseNotFound
from sojourn.operator.kube.client import CHART_KINDS, DEPLOYMENTS, Kube, Object
from sojourn.operator.manifest import digest, inputs_digest
from sojourn.operator.naming import (
    DIGEST_LABEL,
    HANDOVER_MANAGER,
    HELM_MANAGER,
    INPUTS_LABEL,
    SWEEP_LABEL,
    release_name,
)
from sojourn.operator.records import Record, RecordBook, Records, UnreadableRecord, deployed, newest, record_name
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
from sojourn.operator.resources.status import ReleaseStatus

logger = logging.getLogger(__name__)

# Steps of the longest way there: finish an uninstall, apply, sweep; each with one look before it. More means that
# somebody else works on the release at the same time.
MAX_STEPS = 8

BeforeApply = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Target:
    """A release as it should be."""

    namespace: str
    service: str
    uid: str
    values: Values
    inputs: str

    @property
    def release(self) -> str:
        """Name of the release."""
        return release_name(self.service)


@dataclass(frozen=True)
class Outcome:
    """How far `settle` got.

    Attributes:
        record: the deployed record; None while another helm may be at work.
        applied: whether helm changed anything.
        recovered: what was cut off and brought to an end, for people; empty if nothing was.
        swept: objects that were left over.
        wait_seconds: when to look again, where another helm may be at work.
    """

    record: Record | None = None
    applied: bool = False
    recovered: str = ""
    swept: tuple[str, ...] = ()
    wait_seconds: float | None = None


@dataclass
class _Progress:
    applied: bool = False
    recovered: list[str] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)


class Releases:
    """All releases of this operator."""

    def __init__(
        self,
        kube: Kube,
        helm: Helm,
        book: RecordBook,
        *,
        chart_digest: str,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._kube = kube
        self._helm = helm
        self._book = book
        self._chart_digest = chart_digest
        self._now = now
        # Digests by inputs of releases whose record names other inputs: only after the chart has changed.
        self._rendered: dict[tuple[str, str], tuple[str, str]] = {}

    def target(self, namespace: str, service: str, uid: str, values: Values) -> Target:
        """What `settle` takes."""
        return Target(namespace, service, uid, values, inputs_digest(self._chart_digest, values))

    async def in_place(self, target: Target) -> bool:
        """Whether the newest deployed record holds what is wanted, as far as can be told without helm."""
        record = deployed(await self._book.of(target.namespace, target.release))
        return record is not None and record.inputs == target.inputs

    async def settle(
        self,
        target: Target,
        *,
        known_before: bool,
        before_apply: BeforeApply,
        noted: ReleaseStatus | None = None,
    ) -> Outcome:
        """Takes steps until the wanted manifest is deployed and nothing stray is left.

        Args:
            target: what is wanted.
            known_before: whether an earlier pass may have installed anything.
            before_apply: awaited before the first change.
            noted: what the status says of the release; saves reading a record for its digest.

        Raises:
            Permanent: helm or the API server refuses the manifest.
            Transient: it may work later.
        """
        wanted = await self._wanted(target, known_before)
        progress = _Progress()
        for _ in range(MAX_STEPS):
            step = next_step(
                await self._records(target, wanted, noted),
                wanted,
                known_before=known_before,
                now=self._now(),
                lock_seconds=self._helm.settings.timeout_seconds,
            )
            if isinstance(step, Settled) and (record := await self._with_digest(step.record, noted)):
                return self._outcome(progress, record=record)
            if isinstance(step, Wait):
                return self._outcome(progress, wait_seconds=step.seconds)
            await before_apply()
            await self._take(step, target, wanted, progress)
        raise ReleaseLocked(f"release {target.release} changes while it is worked on")

    async def correct_drift(self, target: Target) -> list[Drift]:
        """Undoes what others changed of the deployed objects.

        Raises:
            UnreadableRecord: the record does not hold a manifest. `repair` helps.
        """
        record = deployed(await self._book.of(target.namespace, target.release))
        if record is None:
            return []
        manifest = await self._book.manifest(record)
        return await correct(self._kube, manifest, release=target.release, namespace=target.namespace)

    async def repair(self, target: Target) -> None:
        """Gives up the records of a release; the next `settle` installs it anew and adopts its objects."""
        await self._delete_records(target.namespace, target.release)

    async def remove(self, namespace: str, service: str, uid: str, *, for_good: bool) -> None:
        """Uninstalls a release: returns only when no object of it is left in helm's hands.

        Args:
            namespace: of the service.
            service: its name.
            uid: its uid; only objects that bear it are ever swept.
            for_good: whether to give up the records should helm fail, and delete the objects directly.

        Raises:
            OperatorError: it could not be done; nothing may be forgotten yet.
        """
        release = release_name(service)
        try:
            await self._helm.uninstall(release, namespace)
        except (ReleaseNotFound, KindMissing, ReleaseBroken) as error:
            logger.debug("uninstall of %s/%s: %s", namespace, release, error)
            await self._remove_by_hand(namespace, release, uid)
        except OperatorError:
            if not for_good:
                raise
            await self._remove_by_hand(namespace, release, uid)
        finally:
            self._book.forget(namespace, release)
            self._rendered.pop((namespace, release), None)

    async def _remove_by_hand(self, namespace: str, release: str, uid: str) -> None:
        """Without a usable record: the objects by their owner reference, then whatever records there are."""
        await sweep(self._kube, CHART_KINDS, "", release=release, namespace=namespace, owner=uid)
        await self._delete_records(namespace, release)

    async def _take(self, step: Step, target: Target, wanted: Wanted, progress: _Progress) -> None:
        namespace, release = target.namespace, target.release
        first: Record | None = None
        try:
            match step:
                case Settled(record):
                    raise UnreadableRecord(f"release record {record.name} holds no manifest")
                case Apply(sweep=sweep_after):
                    first = await self._apply(target, wanted, sweep_after)
                    progress.applied = True
                case Sweep(record):
                    progress.swept += await self._sweep(record, target)
                case Rollback(revision):
                    progress.recovered.append("an install was cut off: rolled forward")
                    await self._helm.rollback(release, namespace, revision)
                case DeleteRecords(records, base):
                    progress.recovered.append(f"an operation was cut off ({records[-1].status}): applied anew")
                    if base:
                        await self._book.label(base, {SWEEP_LABEL: "pending"})
                    await self._book.delete(records)
                case Tidy(records):
                    await self._book.delete(records)
                case Uninstall():
                    progress.recovered.append("an uninstall was cut off: finished")
                    await self._helm.uninstall(release, namespace)
        except (ReleaseBroken, KindMissing, UnreadableRecord) as error:
            first = await self._start_over(error, target, wanted, progress)
        finally:
            self._book.forget(namespace, release)
        if first:
            self._book.note_only(first)

    async def _start_over(
        self, error: OperatorError, target: Target, wanted: Wanted, progress: _Progress
    ) -> Record | None:
        """A record that helm cannot build on blocks every later call; without records helm adopts the objects.

        Raises:
            Permanent: the kind is missing from the wanted manifest itself.
        """
        progress.recovered.append(f"the release record was of no use ({error.reason}): written anew")
        await self._delete_records(target.namespace, target.release)
        try:
            first = await self._apply(target, wanted, sweep_after=True)
        except KindMissing as again:
            refused = Permanent(str(again))
            refused.reason = again.reason
            raise refused from again
        progress.applied = True
        return first

    async def _apply(self, target: Target, wanted: Wanted, sweep_after: bool) -> Record | None:
        """Calls helm. Returns the record where it is the release's first; of others there is more to know."""
        if target.values.get("autoscaling", {}).get("enabled"):
            await self._hand_over_replicas(target)
        labels = {
            # null removes what the revision before carried; a first install is not rendered beforehand.
            DIGEST_LABEL: wanted.digest or "null",
            INPUTS_LABEL: wanted.inputs,
            SWEEP_LABEL: "pending" if sweep_after else "done",
        }
        applied = await self._helm.upgrade(target.release, target.namespace, target.values, labels)
        if applied.revision != 1:
            return None
        return Record(
            name=record_name(target.release, applied.revision),
            namespace=target.namespace,
            release=target.release,
            revision=applied.revision,
            status="deployed",
            created=self._now(),
            digest=digest(applied.manifest),
            inputs=wanted.inputs,
            sweep=labels[SWEEP_LABEL],
        )

    async def _hand_over_replicas(self, target: Target) -> None:
        """Has another manager hold the live number of replicas, so that it survives the chart's letting go of it.

        Without this the Deployment goes to 1 at once: helm was the field's only owner.
        """
        try:
            live = await self._kube.get(DEPLOYMENTS, target.namespace, target.release)
        except NotFound:
            return
        if not _helm_owns_replicas(live):
            return
        held = {
            "apiVersion": live["apiVersion"],
            "kind": live["kind"],
            "metadata": {"name": target.release, "namespace": target.namespace},
            "spec": {"replicas": live["spec"]["replicas"]},
        }
        await self._kube.apply(DEPLOYMENTS, held, manager=HANDOVER_MANAGER)

    async def _sweep(self, record: Record, target: Target) -> list[str]:
        """Puts the objects of the manifest back, since a cut-off operation may have changed them, and ends the rest."""
        manifest = await self._book.manifest(record)
        await correct(self._kube, manifest, release=target.release, namespace=target.namespace)
        swept = await sweep(
            self._kube,
            CHART_KINDS,
            manifest,
            release=target.release,
            namespace=target.namespace,
            owner=target.uid,
        )
        await self._book.label(record, {SWEEP_LABEL: "done"})
        return swept

    async def _delete_records(self, namespace: str, release: str) -> None:
        self._book.forget(namespace, release)
        await self._book.delete(await self._book.of(namespace, release))

    async def _wanted(self, target: Target, known_before: bool) -> Wanted:
        """What should be deployed; rendered only where something else is, or was, deployed that it may be equal to.

        A first install is not: its record goes without the label of the digest, and its status tells it.
        """
        key = (target.namespace, target.release)
        records = await self._book.of(*key)
        if not (records or known_before) or any(record.inputs == target.inputs for record in records):
            self._rendered.pop(key, None)
            return Wanted(target.inputs)
        if self._rendered.get(key, ("", ""))[0] != target.inputs:
            manifest = await self._helm.template(target.release, target.namespace, target.values)
            self._rendered[key] = (target.inputs, digest(manifest))
        return Wanted(target.inputs, self._rendered[key][1])

    async def _records(self, target: Target, wanted: Wanted, noted: ReleaseStatus | None) -> Records:
        """The records; the newest with its digest, where that is what decides."""
        records = await self._book.of(target.namespace, target.release)
        last = newest(records)
        if last is None or last.status != "deployed" or wanted.digest is None or last.inputs == wanted.inputs:
            return records
        whole = await self._with_digest(last, noted) or last
        return tuple(whole if record is last else record for record in records)

    async def _with_digest(self, record: Record, noted: ReleaseStatus | None) -> Record | None:
        """The record with the digest of its manifest, from its label, the status or its body; None if unreadable."""
        if record.digest:
            return record
        if noted and noted.revision == record.revision and noted.digest:
            return replace(record, digest=noted.digest)
        try:
            return replace(record, digest=digest(await self._book.manifest(record)))
        except UnreadableRecord as error:
            logger.debug("%s", error)
            return None

    @staticmethod
    def _outcome(progress: _Progress, *, record: Record | None = None, wait_seconds: float | None = None) -> Outcome:
        return Outcome(record, progress.applied, "; ".join(progress.recovered), tuple(progress.swept), wait_seconds)


def _helm_owns_replicas(live: Object) -> bool:
    return any(
        entry.get("manager") == HELM_MANAGER
        and entry.get("operation") == "Apply"
        and "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
        for entry in live["metadata"].get("managedFields") or []
    )
