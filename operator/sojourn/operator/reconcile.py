"""One pass over one custom resource: look at what is wanted and at what is there, and close the gap.

A pass is level-based: it reads nothing but the object, its policies, the release records and the Deployment, and it
can be begun anew at any point. No phase is remembered between passes.
"""

import logging
from dataclasses import dataclass, field, replace

from sojourn.operator.cache import Cache, Key
from sojourn.operator.certificate import ClientCertificate
from sojourn.operator.checks import check
from sojourn.operator.clock import Clock
from sojourn.operator.conditions import READY, RELEASED, Verdict, find
from sojourn.operator.credentials import caller_of
from sojourn.operator.defaults import Defaults
from sojourn.operator.desired import Owner, desired
from sojourn.operator.errors import ApiError, Conflict, NotFound, OperatorError, Permanent
from sojourn.operator.helm import HelmForbidden, Unreachable
from sojourn.operator.kube.client import (
    DEPLOYMENTS,
    DIFFUSION_SERVICES,
    PODS,
    Kube,
    Object,
)
from sojourn.operator.naming import FINALIZER, RECONCILE_AT, release_name
from sojourn.operator.nodes import Nodes
from sojourn.operator.observe import View, summarise
from sojourn.operator.pods import look
from sojourn.operator.records import UnreadableRecord
from sojourn.operator.releases import Outcome, Releases, Target
from sojourn.operator.reporting import (
    Block,
    Findings,
    blocked,
    failing_status,
    policy_status,
    says_something,
    service_status,
    starting_status,
    unresolved,
)
from sojourn.operator.resources import DiffusionServiceSpec
from sojourn.operator.resources.status import DiffusionServiceStatus, PolicyStatus, ReleaseStatus
from sojourn.operator.telemetry import Telemetry
from sojourn.operator.workload import judge
from sojourn.operator.writing import Writer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pace:
    """How often things are looked at.

    Attributes:
        unready_seconds: between two looks at pods that do not serve yet. What holds a pod back sends no event.
        observe_seconds: between two looks at the figures of pods that serve.
        refused_seconds: before a refused manifest is tried again, doubled each time.
        refused_cap_seconds: the longest such pause.
        forced_delete_failures: failed uninstalls in a row after which the records are given up.
    """

    unready_seconds: float = 10.0
    observe_seconds: float = 30.0
    refused_seconds: float = 600.0
    refused_cap_seconds: float = 3600.0
    forced_delete_failures: int = 5


@dataclass
class _Refusal:
    """A manifest that was refused: not tried again before the time, unless the input changes."""

    inputs: str
    block: Block
    until: float
    pause_seconds: float


@dataclass(frozen=True)
class _Wish:
    """What a pass is to achieve.

    Attributes:
        target: the release as it should be.
        forced: whether somebody asked for this very pass.
        known_before: whether an earlier pass may have installed anything.
    """

    target: Target
    forced: bool
    known_before: bool


@dataclass
class Reconciler:
    """What passes need. One pass per key at a time."""

    kube: Kube
    releases: Releases
    cache: Cache
    defaults: Defaults
    chart: str
    telemetry: Telemetry
    nodes: Nodes
    writer: Writer
    pace: Pace = field(default_factory=Pace)
    certificate: ClientCertificate | None = None
    clock: Clock = field(default_factory=Clock)
    # Deployments or whole services whose objects are to be compared with their manifest at the next pass.
    suspects: set[Key] = field(default_factory=set)
    _refusals: dict[Key, _Refusal] = field(default_factory=dict)
    _looked: dict[Key, float] = field(default_factory=dict)
    _failed_deletes: dict[Key, int] = field(default_factory=dict)

    async def reconcile(self, key: Key) -> float | None:
        """One pass. Returns the seconds until the next one, None to wait for an event.

        Raises:
            OperatorError: the pass could not be finished.
        """
        item = self.cache.resources.get(key)
        if item is None:
            self._forget(key)
            return None
        try:
            if key.kind == DIFFUSION_SERVICES.kind and "deletionTimestamp" not in item["metadata"]:
                return await self._service(key, item)
            if key.kind == DIFFUSION_SERVICES.kind:
                await self._delete(key, item)
            else:
                await self._policy(key, item)
            return None
        except (NotFound, Conflict) as error:
            await self._look_again(key, error)
            return None

    async def report(self, key: Key, error: OperatorError) -> None:
        """Tells of a pass that failed, in the status of a service."""
        item = self.cache.resources.get(key)
        if item is None or key.kind != DIFFUSION_SERVICES.kind:
            return
        status = failing_status(_status_of(item), item, error.reason, str(error), now=self.writer.stamp())
        try:
            await self.writer.write_status(key, status)
        except ApiError as unwritten:
            logger.debug("status of %s not written: %s", key, unwritten)

    # ---- services -------------------------------------------------------------------------------------------------

    async def _service(self, key: Key, item: Object) -> float | None:
        # Nothing is installed before the finalizer is there: without it there is nothing to recover.
        known = FINALIZER in item["metadata"].get("finalizers", [])
        item = await self.writer.ensure_finalizer(key, item)
        # From here on `item` is what this pass speaks of. The cache may move on to a newer spec meanwhile; what is
        # found out about this one must not be said of that one.
        findings, target = self._resolve(key, item)
        handled = _asked(item)
        outcome = Outcome()
        if target and not findings.block:
            wish = _Wish(target, forced=handled is not None, known_before=known)
            findings, outcome = await self._follow(key, item, findings, wish)
        else:
            findings = self._stay(key, item, findings)
        findings = await self._inspect(key, item, replace(findings, handled=handled))
        await self.writer.write_status(key, service_status(self._before(key), item, findings, now=self.writer.stamp()))
        return self._next_look(findings, outcome)

    def _resolve(self, key: Key, item: Object) -> tuple[Findings, Target | None]:
        """What the object asks for; no target where it cannot be known."""
        checked = check(item, self.cache.resources.get, self.nodes)
        policies = None if checked.missing is None else unresolved(checked.missing)
        findings = Findings(policies=policies, plan=checked.plan)
        if checked.fault:
            findings = blocked(findings, checked.fault.reason, checked.fault.message)
        if checked.spec is None or checked.policies is None:
            return findings, None
        owner = Owner(key.namespace, key.name, item["metadata"]["uid"])
        values = desired(owner, checked.spec, checked.policies, self.defaults)
        return findings, self.releases.target(key.namespace, key.name, owner.uid, values)

    async def _follow(self, key: Key, item: Object, findings: Findings, wish: _Wish) -> tuple[Findings, Outcome]:
        """Has the release follow the target, unless that is suspended or was refused before."""
        target = wish.target
        if item["spec"].get("suspend"):
            in_place = await self.releases.in_place(target)
            verdict = Verdict(RELEASED, "True" if in_place else "False", "Suspended", "suspend is true")
            suspended = (
                None
                if in_place
                else Block("Suspended", "suspend is true and the newest spec is not deployed", stalled=False)
            )
            return replace(findings, released=verdict, in_place=in_place, block=suspended), Outcome()
        refusal = self._refusals.get(key)
        if refusal and refusal.inputs == target.inputs and self.clock.now() < refusal.until and not wish.forced:
            return replace(findings, block=refusal.block), Outcome()
        try:
            return await self._settle(key, item, findings, wish)
        except Permanent as error:
            return self._refused(key, findings, target, error), Outcome()

    async def _settle(self, key: Key, item: Object, findings: Findings, wish: _Wish) -> tuple[Findings, Outcome]:
        before, seen, target = self._before(key), self.cache.deployment_of(key), wish.target

        async def before_apply() -> None:
            if says_something(before):
                status = starting_status(self._before(key), item, "applying the release", now=self.writer.stamp())
                await self.writer.write_status(key, status)

        outcome = await self.releases.settle(
            target, known_before=wish.known_before, before_apply=before_apply, noted=before.release
        )
        self._refusals.pop(key, None)
        if outcome.record is None:
            waiting = Verdict(
                RELEASED, "Unknown", "ReleaseLocked", "another operation on the release is, or was, at work"
            )
            return replace(findings, released=waiting), outcome
        await self._tell_outcome(key, outcome)
        if outcome.applied and (seen or self.cache.deployment_of(key) is None):
            await self._refresh_deployment(key)
        elif not outcome.applied and (key in self.suspects or wish.forced):
            outcome = await self._correct_drift(key, target, outcome)
        self.suspects.discard(key)
        return replace(
            findings, in_place=True, released=_released(outcome), release=self._release(key, target, outcome)
        ), outcome

    async def _correct_drift(self, key: Key, target: Target, outcome: Outcome) -> Outcome:
        try:
            drifted = await self.releases.correct_drift(target)
        except UnreadableRecord as error:
            await self.releases.repair(target)
            self.telemetry.recoveries.inc()
            await self.writer.event(key, "Warning", error.reason, str(error))
            raise
        for drift in drifted:
            self.telemetry.drifted.labels(drift.kind).inc()
        if drifted:
            logger.info("%s/%s: drift corrected: %s", key.namespace, key.name, "; ".join(map(str, drifted)))
            await self.writer.event(key, "Normal", "DriftCorrected", "; ".join(map(str, drifted)))
            await self._refresh_deployment(key)
        return outcome

    def _refused(self, key: Key, findings: Findings, target: Target, error: Permanent) -> Findings:
        """Remembers what was refused: trying it again at once would change nothing."""
        before = self._refusals.get(key)
        pause = self.pace.refused_seconds
        if before and before.inputs == target.inputs:
            pause = min(before.pause_seconds * 2, self.pace.refused_cap_seconds)
        block = Block(error.reason, str(error))
        self._refusals[key] = _Refusal(target.inputs, block, self.clock.now() + pause, pause)
        return replace(findings, block=block, released=Verdict(RELEASED, "False", error.reason, str(error)))

    def _stay(self, key: Key, item: Object, findings: Findings) -> Findings:
        """Nothing can be applied; pods of this very generation may serve all the same."""
        before = find(self._before(key).conditions, RELEASED)
        generation = item["metadata"]["generation"]
        in_place = before is not None and before.status == "True" and before.observed_generation == generation
        return replace(findings, in_place=in_place)

    async def _inspect(self, key: Key, item: Object, findings: Findings) -> Findings:
        """The Deployment, its pods where they do not serve, and what they say of themselves where they do."""
        deployment = self.cache.deployment_of(key)
        if deployment is None and not findings.in_place:
            return findings
        workload = judge(deployment)
        if not workload.existing:
            return replace(findings, workload=workload)
        # A model that was not found serving is asked each time; one that was, as often as figures are looked at.
        if workload.ready == "True" and self._was_ready(key, item) and not self._look_due(key):
            return replace(findings, workload=workload)
        pods = await self.kube.list(PODS, key.namespace, labels=f"app.kubernetes.io/instance={release_name(key.name)}")
        workload = judge(deployment, pods)
        view = await self._view(key, item, pods) if workload.ready == "True" else None
        return replace(findings, workload=workload, view=view)

    async def _view(self, key: Key, item: Object, pods: list[Object]) -> View:
        spec = DiffusionServiceSpec.model_validate(item["spec"])
        caller = await caller_of(self.kube, key.namespace, spec.grpc, self.certificate)
        self._looked[key] = self.clock.now()
        return summarise(await look(pods, caller), obstacle=caller.shut or caller.unnamed)

    def _was_ready(self, key: Key, item: Object) -> bool:
        ready = find(self._before(key).conditions, READY)
        generation = item["metadata"]["generation"]
        return ready is not None and ready.status == "True" and ready.observed_generation == generation

    def _look_due(self, key: Key) -> bool:
        last = self._looked.get(key)
        return last is None or self.clock.now() - last >= self.pace.observe_seconds

    def _next_look(self, findings: Findings, outcome: Outcome) -> float | None:
        if outcome.wait_seconds is not None:
            return outcome.wait_seconds
        workload = findings.workload
        if workload is None or not workload.wanted:
            return None
        serves = workload.ready == "True" and (findings.view is None or findings.view.serving == "True")
        return self.pace.observe_seconds if serves else self.pace.unready_seconds

    # ---- deletion -------------------------------------------------------------------------------------------------

    async def _delete(self, key: Key, item: Object) -> None:
        metadata = item["metadata"]
        if FINALIZER not in metadata.get("finalizers", []):
            return
        failures = self._failed_deletes.get(key, 0)
        try:
            await self.releases.remove(
                key.namespace, key.name, metadata["uid"], for_good=failures >= self.pace.forced_delete_failures
            )
        except (HelmForbidden, Unreachable, ApiError):
            raise  # says nothing about the release: it may be whole
        except OperatorError:
            self._failed_deletes[key] = failures + 1
            raise
        await self.writer.remove_finalizer(key, item)
        self._forget(key)

    # ---- policies -------------------------------------------------------------------------------------------------

    async def _policy(self, key: Key, item: Object) -> None:
        if "deletionTimestamp" in item["metadata"]:
            return
        users = [user.name for user in self.cache.users_of(key)]
        before = PolicyStatus.model_validate(item.get("status") or {})
        await self.writer.write_status(key, policy_status(before, item, users, now=self.writer.stamp()))

    # ---- telling --------------------------------------------------------------------------------------------------

    async def _tell_outcome(self, key: Key, outcome: Outcome) -> None:
        if outcome.recovered:
            self.telemetry.recoveries.inc()
            logger.warning("%s/%s: %s", key.namespace, key.name, outcome.recovered)
            await self.writer.event(key, "Warning", "ReleaseRecovered", outcome.recovered)
        if outcome.swept:
            await self.writer.event(key, "Normal", "StrayObjectsDeleted", ", ".join(outcome.swept))
        if outcome.applied and outcome.record:
            logger.info("%s/%s: release revision %d", key.namespace, key.name, outcome.record.revision)

    async def _refresh_deployment(self, key: Key) -> None:
        """Reads what was just applied: the cache may not have seen it, and would call old pods the new ones."""
        try:
            self.cache.put_deployment(await self.kube.get(DEPLOYMENTS, key.namespace, release_name(key.name)))
        except NotFound:
            self.cache.deployments.pop((key.namespace, release_name(key.name)), None)

    async def _look_again(self, key: Key, error: ApiError) -> None:
        """After 404 or a conflict: read the object; where it is gone the work is over."""
        try:
            await self.writer.look_again(key)
        except NotFound:
            self.cache.drop(key)
            self._forget(key)
            return
        raise error

    # ---- small things ---------------------------------------------------------------------------------------------

    def _release(self, key: Key, target: Target, outcome: Outcome) -> ReleaseStatus | None:
        record, before = outcome.record, self._before(key).release
        if record is None:
            return before
        # An upgraded operator that changes no manifest writes nothing: the chart stays the one that was applied.
        known = before is not None and before.revision == record.revision and before.chart
        chart = before.chart if before is not None and known else self.chart
        return ReleaseStatus(name=target.release, revision=record.revision, digest=record.digest, chart=chart)

    def _before(self, key: Key) -> DiffusionServiceStatus:
        return _status_of(self.cache.resources[key])

    def _forget(self, key: Key) -> None:
        self.writer.forget(key)
        for known in (self._refusals, self._looked, self._failed_deletes):
            known.pop(key, None)
        self.suspects.discard(key)


def _asked(item: Object) -> str | None:
    """The value of the annotation that asks for a pass, where it was not obeyed yet."""
    value = (item["metadata"].get("annotations") or {}).get(RECONCILE_AT)
    return value if value and value != _status_of(item).last_handled_reconcile_at else None


def _status_of(item: Object) -> DiffusionServiceStatus:
    return DiffusionServiceStatus.model_validate(item.get("status") or {})


def _released(outcome: Outcome) -> Verdict:
    assert outcome.record, "a settled release has a record"
    return Verdict(RELEASED, "True", "Deployed", f"revision {outcome.record.revision} is deployed")
