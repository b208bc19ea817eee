"""Whether a service fits: what is asked for against limit and nodes before a start, the model's own plan after it."""

from collections.abc import Sequence
from dataclasses import dataclass

from sojourn.operator.desired import Policies, shm_size
from sojourn.operator.nodes import Node
from sojourn.operator.resources import DiffusionServiceSpec
from sojourn.operator.resources.base import quantity_value


@dataclass(frozen=True)
class Space:
    """One space of memory as the model has planned it, from the headers of its checkpoint.

    Attributes:
        name: "host" or "device".
        peak_bytes: the most that any stage takes; on the host only what cannot be dropped.
        budget_bytes: what it may take.
    """

    name: str
    peak_bytes: int
    budget_bytes: int


@dataclass(frozen=True)
class HostPlan:
    """Host memory that settings ask for.

    Attributes:
        parts: name and quantity of each.
        limit: the memory limit; None where there is none.
        budget: what the model was told to take of the host; None where it takes what is there.
        node: the largest node that may run it; None where that is not known.
    """

    parts: tuple[tuple[str, str], ...]
    limit: str | None
    budget: str | None = None
    node: Node | None = None

    @property
    def needed_bytes(self) -> float:
        """Sum of the parts."""
        return sum(quantity_value(size) for _, size in self.parts)

    @property
    def fits(self) -> bool:
        """Whether the parts leave room for the model within the limit, and on the largest node."""
        return not self.obstacle

    @property
    def obstacle(self) -> str:
        """What is too small, with what to change; empty if nothing is."""
        return self._over_limit() or self._over_node()

    def _over_limit(self) -> str:
        if self.limit is None:
            return ""
        if self.needed_bytes >= quantity_value(self.limit):
            return f"the memory limit of {self.limit}: raise resources.limits.memory, or lower what is asked for"
        if self.budget is not None and quantity_value(self.budget) > quantity_value(self.limit):
            return (
                f"the memory limit of {self.limit} beside hostMemory {self.budget}, which the model would take and be "
                "killed for: raise resources.limits.memory, or lower hostMemory in the LayerwiseOffload"
            )
        return ""

    def _over_node(self) -> str:
        if self.node and self.needed_bytes >= quantity_value(self.node.memory):
            return (
                f"the {human(quantity_value(self.node.memory))} allocatable on {self.node.name}, the largest node "
                "that scheduling.nodeSelector allows: lower what is asked for, or add a larger node"
            )
        return ""

    @property
    def message(self) -> str:
        """Needed against available, for people."""
        parts = ", ".join(f"{name} {size}" for name, size in self.parts)
        if obstacle := self.obstacle:
            return f"{parts} ({human(self.needed_bytes)} in all) do not fit {obstacle}"
        if self.limit is None:
            return f"no memory limit is set; asked for: {parts}"
        return f"{parts} ({human(self.needed_bytes)} in all) fit the memory limit of {self.limit}"


def host_plan(spec: DiffusionServiceSpec, policies: Policies, *, node: Node | None = None) -> HostPlan:
    """The host memory that a service is asked to use besides its weights.

    A host tier whose size nobody chose is not asked for: the engine gives it what the weights leave free.

    Args:
        spec: of the service.
        policies: that it follows.
        node: the largest that may run it.
    """
    parts = [("sharedHostMemory", shm_size(spec))]
    if policies.adaln.host_tier_size and policies.adaln.mode != "Disabled":
        parts.append(("hostTier", policies.adaln.host_tier_size))
    if policies.offload.next_stage_headroom:
        parts.append(("nextStageHeadroom", policies.offload.next_stage_headroom))
    return HostPlan(tuple(parts), spec.resources.limits.get("memory"), policies.offload.host_memory, node)


def overdrawn(spaces: Sequence[Space]) -> str:
    """What the model itself has planned beyond its budget, for people; empty where all is within."""
    return "; ".join(
        f"the model needs {human(space.peak_bytes)} of {space.name} memory and may take {human(space.budget_bytes)}"
        for space in spaces
        if space.peak_bytes > space.budget_bytes > 0
    )


def human(size: float) -> str:
    """Bytes for people, with three significant digits at most."""
    if size < 0:
        return f"-{human(-size)}"
    for unit in ("", "Ki", "Mi", "Gi"):
        if size < 1000:
            return f"{size:.3g}{unit}"
        size /= 1024
    return f"{size:.4g}Ti" if size >= 1000 else f"{size:.3g}Ti"
