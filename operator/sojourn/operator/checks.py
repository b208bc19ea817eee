"""What is wrong with a DiffusionService before anything is started: the same for a pass and for admission."""

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError
from sojourn.operator.cache import Key, policy_keys
from sojourn.operator.desired import Policies
from sojourn.operator.kube.client import ADALN_CACHES, LAYERWISE_OFFLOADS, Object
from sojourn.operator.nodes import Nodes
from sojourn.operator.plan import HostPlan, host_plan
from sojourn.operator.resources import AdaLNCacheSpec, DiffusionServiceSpec, LayerwiseOffloadSpec

Find = Callable[[Key], Object | None]


@dataclass(frozen=True)
class Fault:
    """Why a spec cannot be followed.

    Attributes:
        reason: in one word.
        message: for people, with what to change.
    """

    reason: str
    message: str


@dataclass(frozen=True)
class Checked:
    """A service as it was found.

    Attributes:
        spec: None where it does not parse.
        policies: that it follows; None where one is missing or does not parse.
        plan: host memory that it asks for; None with the policies.
        missing: kind and name of each policy that is not there; None where the spec does not parse.
        fault: why it cannot be followed; None where it can.
    """

    spec: DiffusionServiceSpec | None = None
    policies: Policies | None = None
    plan: HostPlan | None = None
    missing: tuple[str, ...] | None = None
    fault: Fault | None = None


def check(item: Object, find: Find, nodes: Nodes) -> Checked:
    """Looks at a service, its policies and the nodes.

    Args:
        item: the DiffusionService.
        find: the policy of a key; None where there is none.
        nodes: of the cluster.
    """
    found = {key: find(key) for key in policy_keys(item)}
    try:
        spec = DiffusionServiceSpec.model_validate(item["spec"])
        policies = Policies(
            AdaLNCacheSpec.model_validate(_spec(found, ADALN_CACHES.kind)),
            LayerwiseOffloadSpec.model_validate(_spec(found, LAYERWISE_OFFLOADS.kind)),
        )
    except ValidationError as error:
        return Checked(fault=Fault("InvalidSpec", _first_lines(error)))
    missing = tuple(f"{key.kind} {key.name}" for key, body in found.items() if not _usable(body))
    if missing:
        return Checked(spec, missing=missing, fault=Fault("PolicyNotFound", f"not found: {', '.join(missing)}"))
    node = nodes.largest(spec.scheduling.node_selector)
    plan = host_plan(spec, policies, node=node)
    fault = None if plan.fits else Fault("PlanDoesNotFit", plan.message)
    return Checked(spec, policies, plan, missing, fault)


def _spec(found: dict[Key, Object | None], kind: str) -> Object:
    bodies = (body for key, body in found.items() if key.kind == kind and body and _usable(body))
    return next((body.get("spec") or {} for body in bodies), {})


def _usable(body: Object | None) -> bool:
    """Whether a policy is there to stay."""
    return body is not None and "deletionTimestamp" not in body["metadata"]


def _first_lines(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, found['loc']))}: {found['msg']}" for found in error.errors()[:5])
