"""Statuses: from what a pass found to what is written, and whether anything is to be written at all."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sojourn.operator.conditions import (
    PAGE_OUT_EFFECTIVE,
    PLAN_FITS,
    POLICY_RESOLVED,
    READY,
    RECONCILING,
    RELEASED,
    RESIDENCY_VISIBLE,
    STALLED,
    Conditions,
    Verdict,
    find,
    merge,
)
from sojourn.operator.kube.client import Object
from sojourn.operator.naming import INSTANCE_LABEL, release_name
from sojourn.operator.observe import View, rounded
from sojourn.operator.plan import HostPlan, Space, human, overdrawn
from sojourn.operator.resources import DiffusionServiceSpec
from sojourn.operator.resources.status import (
    DiffusionServiceStatus,
    FailureStatus,
    MemoryPlanEntry,
    PolicyStatus,
    ReleaseStatus,
)
from sojourn.operator.workload import Workload

_MODEL_DOES_NOT_FIT = "ModelDoesNotFit"
# Written when a pass has other reasons to write, or at most this often: figures, not states.
FIGURES = frozenset({"residency", "adaLN"})


@dataclass(frozen=True)
class Block:
    """Why a spec is not followed until somebody changes something.

    Attributes:
        stalled: whether that is a fault, and not somebody's wish.
    """

    reason: str
    message: str
    stalled: bool = True


@dataclass(frozen=True)
class Findings:
    """What one pass over a service found out. None: not looked at, or not known.

    Attributes:
        policies: PolicyResolved.
        plan: host memory that was asked for.
        released: Released.
        in_place: whether the release of this very generation is deployed.
        block: why nothing can be done.
        workload: of the Deployment.
        view: of the pods.
        release: what is deployed.
        handled: value of the annotation that asked for this pass.
    """

    policies: Verdict | None = None
    plan: HostPlan | None = None
    released: Verdict | None = None
    in_place: bool = False
    block: Block | None = None
    workload: Workload | None = None
    view: View | None = None
    release: ReleaseStatus | None = None
    handled: str | None = None

    @property
    def spaces(self) -> tuple[Space, ...]:
        """The model's own memory plan, where it told it."""
        return self.view.spaces if self.view else ()


def service_status(before: DiffusionServiceStatus, service: Object, findings: Findings, *, now: str) -> Object:
    """The status of a service after a pass, as JSON."""
    generation = service["metadata"]["generation"]
    conditions = merge(before.conditions, _verdicts(before, service, findings), generation=generation, now=now)
    ready = find(conditions, READY)
    status = before.model_copy(
        update={
            "observed_generation": generation,
            "conditions": conditions,
            "last_failure": _failure(
                before.last_failure,
                findings.workload.failure if findings.workload else None,
                recovered_at=now if ready and ready.status == "True" else None,
            ),
            **_identity(service),
            **_counts(findings.workload),
            **_figures(before, service, findings),
        }
    )
    return dump(status)


def starting_status(before: DiffusionServiceStatus, service: Object, message: str, *, now: str) -> Object:
    """The status while a new spec is on its way: never Ready, whatever the old pods do."""
    generation = service["metadata"]["generation"]
    verdicts = (
        Verdict(READY, "Unknown", "Reconciling", message),
        Verdict(RECONCILING, "True", "Reconciling", message),
        Verdict(RELEASED, "Unknown", "Reconciling", message),
    )
    conditions = merge(before.conditions, verdicts, generation=generation, now=now)
    return dump(before.model_copy(update={"conditions": conditions, **_identity(service)}))


def says_something(before: DiffusionServiceStatus) -> bool:
    """Whether a status speaks of any spec: a new object is born with Ready Unknown, which promises nothing."""
    ready = find(before.conditions, READY)
    return ready is not None and ready.observed_generation > 0


def failing_status(before: DiffusionServiceStatus, service: Object, reason: str, message: str, *, now: str) -> Object:
    """The status after a pass that failed and will be tried again. Ready stays as it was last found."""
    generation = service["metadata"]["generation"]
    verdicts = [Verdict(RECONCILING, "True", reason, message)]
    ready = find(before.conditions, READY)
    if ready is None or ready.observed_generation != generation:
        verdicts.append(Verdict(READY, "Unknown", reason, message))
    return dump(
        before.model_copy(update={"conditions": merge(before.conditions, verdicts, generation=generation, now=now)})
    )


def policy_status(before: PolicyStatus, policy: Object, users: Iterable[str], *, now: str) -> Object:
    """The status of a policy that these services follow."""
    names = tuple(users)
    verdict = (
        Verdict("InUse", "True", "Followed", f"{len(names)} DiffusionServices follow it")
        if names
        else Verdict("InUse", "False", "Unused", "no DiffusionService follows it")
    )
    generation = policy["metadata"]["generation"]
    return dump(
        PolicyStatus(
            observed_generation=generation,
            used_by=len(names),
            users=names[:64],
            conditions=merge(before.conditions, (verdict,), generation=generation, now=now),
        )
    )


def dump(status: DiffusionServiceStatus | PolicyStatus) -> Object:
    """A status as the API holds it: what is empty is not there."""
    dumped: Object = status.model_dump(by_alias=True, exclude_none=True, mode="json")
    return dumped


def changes(before: Object, after: Object) -> Object:
    """The merge patch from one status to another; empty where they are equal."""
    changed: dict[str, Any] = {
        key: changes(before[key], value) if isinstance(before.get(key), dict) and isinstance(value, dict) else value
        for key, value in after.items()
        if before.get(key) != value
    }
    return changed | {key: None for key in before if key not in after}


def ready_conditions(status: Object) -> Conditions:
    """The conditions of a status as the API holds it."""
    return DiffusionServiceStatus.model_validate(status).conditions


def _verdicts(before: DiffusionServiceStatus, service: Object, findings: Findings) -> list[Verdict]:
    plan, view = findings.plan, findings.view
    verdicts = [verdict for verdict in (findings.policies, findings.released) if verdict]
    # What the model has said of itself holds until it is asked again, or made anew.
    said = find(before.conditions, PLAN_FITS)
    stays = view is None and said is not None and said.reason == _MODEL_DOES_NOT_FIT and _unchanged(before, service)
    if plan and not (stays and plan.fits):
        verdicts.append(_fits(plan, findings.spaces))
    if view:
        verdicts.append(Verdict(RESIDENCY_VISIBLE, "True" if view.visible else "False", view.reason, view.message))
    if view and view.not_owned is not None:
        verdicts.append(_page_out(view.not_owned))
    return [*verdicts, *_summary(service, findings)]


def _fits(plan: HostPlan, spaces: Sequence[Space]) -> Verdict:
    """Whether what is asked for, and what the model has planned, is there."""
    if not plan.fits:
        return Verdict(PLAN_FITS, "False", "DoesNotFit", plan.message)
    if beyond := overdrawn(spaces):
        return Verdict(PLAN_FITS, "False", _MODEL_DOES_NOT_FIT, f"{beyond}; {plan.message}")
    return Verdict(PLAN_FITS, "True", "Fits" if plan.limit else "NoLimit", plan.message)


def _page_out(not_owned: float) -> Verdict:
    """Whether the kernel takes back what it is offered. It does not for files of another user, without an error."""
    if not not_owned:
        return Verdict(PAGE_OUT_EFFECTIVE, "True", "Owned", "the checkpoint's files belong to the pods' user")
    return Verdict(
        PAGE_OUT_EFFECTIVE,
        "False",
        "NotOwner",
        f"{human(rounded(not_owned))} of cold weights stay in memory, since the checkpoint's files do not belong to "
        "user 10001: change their owner, or set sharedHostMemory.modelCache",
    )


def _summary(service: Object, findings: Findings) -> list[Verdict]:
    """Ready, Reconciling, Stalled."""
    workload, block = findings.workload, findings.block
    stalled = _stalled(service, findings)
    if findings.in_place and workload:
        ready = _ready(service, workload, findings.view)
    elif block:
        ready = Verdict(READY, "False", block.reason, block.message)
    else:
        ready = Verdict(READY, "Unknown", "Reconciling", "the newest spec is not deployed yet")
    progressing = (
        not stalled and not block and (not findings.in_place or (workload is not None and workload.progressing))
    )
    reconciling = Verdict(RECONCILING, "True" if progressing else "False", ready.reason, ready.message)
    return [ready, reconciling, *([stalled] if stalled else [])]


def _ready(service: Object, workload: Workload, view: View | None) -> Verdict:
    """What the Deployment says and, where all its pods serve, what the models say themselves."""
    if workload.ready != "True" or view is None:
        return Verdict(READY, workload.ready, workload.reason, workload.message)
    if view.serving != "True":
        return Verdict(READY, view.serving, view.health, view.health_message)
    if other := _other_model(service, view):
        return Verdict(READY, "False", *other)
    return Verdict(READY, "True", workload.reason, workload.message)


def _other_model(service: Object, view: View) -> tuple[str, str] | None:
    """Reason and message where what is served is not what the spec wants; None where it is, or cannot be asked."""
    if view.workflows is None:
        return None
    family = service["spec"]["model"].get("family")
    if family and view.family != family:
        return "OtherFamily", f"the checkpoint is of the family {view.family}, and model.family wants {family}"
    if missing := sorted(set(service["spec"].get("workflows") or ()) - view.workflows):
        served = ", ".join(sorted(view.workflows)) or "none"
        return (
            "WorkflowMissing",
            f"workflows wants {', '.join(missing)}, and the model serves {served}: take a whole checkpoint",
        )
    return None


def _stalled(service: Object, findings: Findings) -> Verdict | None:
    block = findings.block
    if block and block.stalled:
        return Verdict(STALLED, "True", block.reason, block.message)
    workload, view = findings.workload, findings.view
    if findings.in_place and view and view.serving == "True" and (other := _other_model(service, view)):
        return Verdict(STALLED, "True", *other)
    if findings.in_place and workload and workload.failed:
        return Verdict(STALLED, "True", workload.reason, f"{workload.message}; pods of the spec before serve on")
    return None


def _identity(service: Object) -> dict[str, Any]:
    metadata = service["metadata"]
    release = release_name(metadata["name"])
    port = DiffusionServiceSpec.model_validate(service["spec"]).grpc.port
    return {
        "selector": f"app.kubernetes.io/name=sojourn-service,{INSTANCE_LABEL}={release}",
        "endpoint": f"{release}.{metadata['namespace']}.svc:{port}",
    }


def _counts(workload: Workload | None) -> dict[str, Any]:
    if workload is None:
        return {}
    return {
        "replicas": workload.existing,
        "ready_replicas": workload.serving,
        "updated_replicas": workload.updated,
        "replicas_summary": f"{workload.serving}/{workload.wanted}",
    }


def _failure(
    known: FailureStatus | None, seen: FailureStatus | None, *, recovered_at: str | None
) -> FailureStatus | None:
    """The newer one of two failures, which is over as soon as the service is Ready.

    Args:
        known: told before. Its pod may be gone, and what other pods keep of older ones is no news.
        seen: the newest that the pods tell of now.
        recovered_at: now, where the service is Ready.
    """
    is_news = seen and (known is None or (seen.finished_at or "") > (known.finished_at or ""))
    newest = seen if is_news else known
    if newest is None or newest.recovered_at is not None:
        return newest
    return newest.model_copy(update={"recovered_at": recovered_at})


def _figures(before: DiffusionServiceStatus, service: Object, findings: Findings) -> dict[str, Any]:
    plan, view = findings.plan, findings.view
    figures: dict[str, Any] = {}
    if plan:
        figures["memory_plan"] = (
            *(MemoryPlanEntry(name=name, size=size) for name, size in plan.parts),
            *_planned(before, service, findings),
        )
    if view:
        figures |= {
            "model": view.model or before.model,
            "family": view.family or before.family,
            # What cannot be seen now is not said: figures of another time would look like those of this one.
            "residency": view.residency,
            "adaln": view.adaln,
        }
    if findings.release:
        figures["release"] = findings.release
    if findings.handled is not None:
        figures["last_handled_reconcile_at"] = findings.handled
    return figures


def _planned(before: DiffusionServiceStatus, service: Object, findings: Findings) -> tuple[MemoryPlanEntry, ...]:
    """What the model has planned: as told now, else as told before of the same spec."""
    if findings.view is None:
        return tuple(entry for entry in before.memory_plan if entry.budget) if _unchanged(before, service) else ()
    return tuple(
        MemoryPlanEntry(
            name=f"{space.name}Peak", size=human(rounded(space.peak_bytes)), budget=human(rounded(space.budget_bytes))
        )
        for space in findings.spaces
    )


def _unchanged(before: DiffusionServiceStatus, service: Object) -> bool:
    """Whether a status speaks of the present spec."""
    return bool(before.observed_generation == service["metadata"]["generation"])


def blocked(findings: Findings, reason: str, message: str) -> Findings:
    """The findings of a pass that can go no further."""
    return replace(findings, block=Block(reason, message))


def unresolved(missing: Sequence[str]) -> Verdict:
    """PolicyResolved of a service whose policies are missing; all found where the list is empty."""
    if missing:
        return Verdict(POLICY_RESOLVED, "False", "PolicyNotFound", f"not found: {', '.join(missing)}")
    return Verdict(POLICY_RESOLVED, "True", "Resolved", "every policy that is referred to exists")
