"""Whether what the policies ask for fits the memory limit: arithmetic over quantities, before anything is started."""

from dataclasses import dataclass

from sojourn.operator.desired import Policies
from sojourn.operator.resources import DiffusionServiceSpec
from sojourn.operator.resources.base import quantity_value


@dataclass(frozen=True)
class HostPlan:
    """Host memory that settings ask for.

    Attributes:
        parts: name and quantity of each.
        limit: the memory limit; None where there is none.
    """

    parts: tuple[tuple[str, str], ...]
    limit: str | None

    @property
    def needed_bytes(self) -> float:
        """Sum of the parts."""
        return sum(quantity_value(size) for _, size in self.parts)

    @property
    def fits(self) -> bool:
        """Whether the parts leave room for the model within the limit."""
        return self.limit is None or self.needed_bytes < quantity_value(self.limit)

    @property
    def message(self) -> str:
        """Needed against available, for people."""
        parts = ", ".join(f"{name} {size}" for name, size in self.parts)
        if self.limit is None:
            return f"no memory limit is set; asked for: {parts}"
        verb = "fit" if self.fits else "do not fit"
        cure = "" if self.fits else ": raise resources.limits.memory, or lower what the policies ask for"
        return f"{parts} ({human(self.needed_bytes)} in all) {verb} the memory limit of {self.limit}{cure}"


def host_plan(spec: DiffusionServiceSpec, policies: Policies, *, adaln_given: bool) -> HostPlan:
    """The host memory that a service is asked to use besides its weights.

    Args:
        spec: of the service.
        policies: that it follows.
        adaln_given: whether somebody chose the host tier's size. The engine shrinks the default to what is there.
    """
    parts = [("sharedHostMemory", spec.shared_host_memory.size)]
    if adaln_given and policies.adaln.mode != "Disabled":
        parts.append(("hostTier", policies.adaln.host_tier_size))
    if policies.offload.next_stage_headroom:
        parts.append(("nextStageHeadroom", policies.offload.next_stage_headroom))
    return HostPlan(tuple(parts), spec.resources.limits.get("memory"))


def human(size: float) -> str:
    """Bytes for people, with three significant digits at most."""
    for unit in ("", "Ki", "Mi", "Gi"):
        if size < 1000:
            return f"{size:.3g}{unit}"
        size /= 1024
    return f"{size:.4g}Ti" if size >= 1000 else f"{size:.3g}Ti"
