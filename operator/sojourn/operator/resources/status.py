"""The status of the three kinds: what the operator last saw, rounded so that an idle cluster stays unwritten."""

from typing import Annotated, Any, Literal

from pydantic import Field
from sojourn.operator.resources.base import Model

Bytes = Annotated[int, Field(ge=0)]


class Condition(Model):
    """One aspect of the object's state."""

    type: Annotated[str, Field(max_length=316)] = Field(description="Which aspect.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: Annotated[str, Field(max_length=1024)] = Field(description="Why, in one word.")
    message: Annotated[str, Field(max_length=32768)] = Field(default="", description="Why, for people.")
    observed_generation: int = Field(default=0, description="Generation of the spec that it speaks of.")
    last_transition_time: str = Field(
        description="When status last changed.", json_schema_extra={"format": "date-time"}
    )


_CONDITIONS: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}


# What the API server says of a new DiffusionService: neither a person nor a tool takes it for served before the
# operator has seen it, and the operator need not write so.
UNSEEN: dict[str, Any] = {
    "observedGeneration": -1,
    "conditions": [
        {
            "type": "Ready",
            "status": "Unknown",
            "reason": "Pending",
            "message": "the operator has not reported on it yet",
            "observedGeneration": 0,
            "lastTransitionTime": "1970-01-01T00:00:00Z",
        }
    ],
}


class ReleaseStatus(Model):
    """The Helm release of the service."""

    name: str = Field(description="Its name.")
    revision: int = Field(default=0, description="Revision that is deployed.")
    digest: str = Field(default="", description="Of the manifest that is deployed.")
    chart: str = Field(default="", description="Name and version of the chart.")


class ComponentResidency(Model):
    """Where the weights of one component are, summed over the pods."""

    component: str = Field(description="Its name in the pipeline.")
    vram_bytes: Bytes = Field(default=0, description="In device memory.")
    pinned_bytes: Bytes = Field(default=0, description="In pinned host memory.")
    mapped_bytes: Bytes = Field(default=0, description="Mapped from the checkpoint: size of the ranges.")
    mapped_resident_bytes: Bytes = Field(default=0, description="Of these in memory.")
    pageable_bytes: Bytes = Field(default=0, description="In anonymous host memory.")


class ResidencyStatus(Model):
    """Where the weights are."""

    vram: str = Field(default="", description="In device memory, for people.")
    host: str = Field(default="", description="In host memory (pinned, resident mapped, pageable), for people.")
    components: tuple[ComponentResidency, ...] = Field(
        default=(),
        description="By component.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["component"]},
    )


class AdaLNStatus(Model):
    """What the plan cache does."""

    hit_ratio: str = Field(default="", description="Requests served without a build, of all, in percent.")
    builds: int = Field(default=0, description="Builds of all pods since their start.")
    saved: str = Field(
        default="",
        description="Weights that were never loaded less the rows in their place, on the device, for people. Negative "
        "where the rows take more.",
    )
    host_tier: str = Field(default="", description="Host memory that rows of recent requests take, for people.")


class MemoryPlanEntry(Model):
    """The memory that one thing takes."""

    name: str = Field(
        description="What takes it: a setting, or hostPeak and devicePeak, the most that any stage of the model takes."
    )
    size: str = Field(description="How much.")
    budget: str = Field(default="", description="What it may take, where the model has said so.")


class FailureStatus(Model):
    """The last failure of a container. Kept as a container's last state is; its times tell how old it is."""

    reason: str = Field(description="Such as OOMKilled, BusError or Error.")
    message: str = Field(default="", description="What the runtime said.")
    exit_code: int = Field(default=0, description="Exit code of the container.")
    container: str = Field(description="Which container.")
    pod: str = Field(description="Which pod.")
    finished_at: str | None = Field(
        default=None,
        description="When the container ended, where the kubelet knows.",
        json_schema_extra={"format": "date-time"},
    )
    recovered_at: str | None = Field(
        default=None,
        description="When the service was first found Ready after it. Left out: not yet.",
        json_schema_extra={"format": "date-time"},
    )


class DiffusionServiceStatus(Model):
    """What the operator last saw of a DiffusionService."""

    observed_generation: int = Field(default=0, description="Generation of the spec that was last reconciled.")
    conditions: tuple[Condition, ...] = Field(
        default=(),
        description="Ready, Reconciling, Stalled, Released, PlanFits, ResidencyVisible, PageOutEffective, "
        "PolicyResolved.",
        json_schema_extra=_CONDITIONS,
    )
    replicas: int = Field(default=0, description="Pods that exist.")
    ready_replicas: int = Field(default=0, description="Pods that serve.")
    updated_replicas: int = Field(default=0, description="Pods of the newest spec.")
    replicas_summary: str = Field(default="", description="Serving pods of wanted ones, for people.")
    selector: str = Field(default="", description="Label selector of the pods, for autoscalers.")
    endpoint: str = Field(default="", description="Address that clients call inside the cluster.")
    model: str = Field(default="", description="Name of the model that is served.")
    family: str = Field(default="", description="Its family.")
    memory_plan: tuple[MemoryPlanEntry, ...] = Field(
        default=(),
        description="Host memory that the settings ask for, held against the memory limit and the nodes by PlanFits, "
        "and what the model has planned from the headers of its checkpoint.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    residency: ResidencyStatus | None = Field(default=None, description="Where the weights are.")
    adaln: AdaLNStatus | None = Field(default=None, alias="adaLN", description="What the plan cache does.")
    last_failure: FailureStatus | None = Field(
        default=None,
        description="The last failure of a container. It stays when it is over, with recoveredAt, also when its pod is "
        "gone.",
    )
    release: ReleaseStatus | None = Field(default=None, description="The Helm release.")
    last_handled_reconcile_at: str = Field(
        default="", description="Value of the annotation sojourn.dev/reconcile-at that was last obeyed."
    )


class PolicyStatus(Model):
    """Who follows a policy."""

    observed_generation: int = Field(default=0, description="Generation that was last seen.")
    used_by: int = Field(default=0, description="DiffusionServices that refer to it.")
    users: Annotated[tuple[str, ...], Field(max_length=64)] = Field(
        default=(), description="Names of the first of them.", json_schema_extra={"x-kubernetes-list-type": "set"}
    )
    conditions: tuple[Condition, ...] = Field(default=(), description="InUse.", json_schema_extra=_CONDITIONS)
