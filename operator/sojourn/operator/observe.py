"""What the answers of a service's pods amount to: summed, rounded, with a word on whether they can be believed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sojourn.operator.conditions import Status
from sojourn.operator.plan import Space, human
from sojourn.operator.pods import Health, PodView
from sojourn.operator.resources.status import AdaLNStatus, ComponentResidency, ResidencyStatus
from sojourn.v1 import inference_pb2, residency_pb2
from sojourn.v1.inference_pb2 import Workflow
from sojourn.v1.residency_pb2 import Tier

# Results of transactions that have served a request.
_SERVED = ("hit", "host", "store", "built")


@dataclass(frozen=True)
class View:
    """A service, over its pods.

    Attributes:
        serving: "True" where every model that could be asked is SERVING; "Unknown" where one does not answer.
        health: why not, in one word.
        health_message: why not, for people.
        visible: whether every sidecar answered and sees its process.
        reason: why not.
        message: for people.
        workflows: that every model serves; None where none could be asked.
        spaces: the model's own memory plan, the largest over the pods.
        not_owned: bytes that are cold but stay, since the checkpoint's files belong to another user; None: unknown.
    """

    serving: Status
    health: str
    health_message: str
    visible: bool
    reason: str
    message: str
    model: str = ""
    family: str = ""
    workflows: frozenset[str] | None = None
    residency: ResidencyStatus | None = None
    adaln: AdaLNStatus | None = None
    spaces: tuple[Space, ...] = ()
    not_owned: float | None = None


def summarise(pods: Sequence[PodView], *, obstacle: str = "") -> View:
    """The view of a service over the answers of its pods.

    Args:
        pods: their answers.
        obstacle: why the models could not be asked, or not all; empty if they could.
    """
    infos = [pod.info for pod in pods if pod.info]
    sidecars = [pod.residency for pod in pods if pod.residency]
    serving, health, health_message = _health(pods)
    visible, reason, message = _visibility(pods)
    if obstacle:
        message += f"; the model itself is not asked: {obstacle}"
    return View(
        serving=serving,
        health=health,
        health_message=health_message,
        visible=visible,
        reason=reason,
        message=message,
        model=next((info.model for info in infos if info.model), ""),
        family=next((info.family for info in infos if info.family), ""),
        workflows=_workflows(infos),
        residency=_residency(sidecars),
        adaln=_adaln(infos),
        spaces=_spaces(infos),
        not_owned=_not_owned(sidecars) if visible else None,
    )


def _health(pods: Sequence[PodView]) -> tuple[Status, str, str]:
    for pod in pods:
        if pod.health is Health.NOT_SERVING:
            why = pod.info.state_reason if pod.info else ""
            return "False", "NotServing", f"the model of {pod.name} says NOT_SERVING" + (f": {why}" if why else "")
    silent = [pod.name for pod in pods if pod.health is Health.SILENT]
    if silent or not pods:
        who = ", ".join(silent) or "no pod"
        return "Unknown", "HealthUnreachable", f"the operator asks for health and gets no answer: {who}"
    return "True", "Serving", ""


def _visibility(pods: Sequence[PodView]) -> tuple[bool, str, str]:
    silent = sum(pod.residency is None for pod in pods)
    if silent or not pods:
        return False, "Unreachable", f"the residencyd of {silent} of {len(pods)} pods does not answer the operator"
    processes = [process for pod in pods if pod.residency for process in pod.residency.processes]
    blind = sorted({process.blind_reason for process in processes if process.blind_reason})
    if blind:
        return False, "Blind", f"residencyd cannot see the model process: {', '.join(blind)}"
    return True, "Visible", f"{len(pods)} pods report where their weights are"


@dataclass
class _Tiers:
    """Bytes of one component by tier."""

    mapped: dict[int, int] = field(default_factory=dict)
    resident: dict[int, int] = field(default_factory=dict)

    def add(self, tier: residency_pb2.TierBytes) -> None:
        self.mapped[tier.tier] = self.mapped.get(tier.tier, 0) + tier.mapped_bytes
        self.resident[tier.tier] = self.resident.get(tier.tier, 0) + tier.resident_bytes


def _components(sidecars: Sequence[residency_pb2.Residency]) -> Iterator[residency_pb2.ComponentResidency]:
    return (component for residency in sidecars for process in residency.processes for component in process.components)


def _residency(sidecars: Sequence[residency_pb2.Residency]) -> ResidencyStatus | None:
    """Bytes by component and in all; None where nobody reports any, which is not the same as zero bytes."""
    components: dict[str, _Tiers] = {}
    for component in _components(sidecars):
        tiers = components.setdefault(component.name, _Tiers())
        for tier in component.tiers:
            tiers.add(tier)
    if not components:
        return None
    rows = tuple(_component(name, tiers) for name, tiers in sorted(components.items()))
    host = sum(row.pinned_bytes + row.mapped_resident_bytes + row.pageable_bytes for row in rows)
    return ResidencyStatus(
        vram=human(rounded(sum(row.vram_bytes for row in rows))), host=human(rounded(host)), components=rows
    )


def _component(name: str, tiers: _Tiers) -> ComponentResidency:
    return ComponentResidency(
        component=name,
        vram_bytes=rounded(tiers.mapped.get(Tier.TIER_VRAM, 0)),
        pinned_bytes=rounded(tiers.resident.get(Tier.TIER_HOST_PINNED, 0)),
        mapped_bytes=rounded(tiers.mapped.get(Tier.TIER_HOST_MAPPED, 0)),
        mapped_resident_bytes=rounded(tiers.resident.get(Tier.TIER_HOST_MAPPED, 0)),
        pageable_bytes=rounded(tiers.resident.get(Tier.TIER_HOST_PAGEABLE, 0)),
    )


def _adaln(infos: Sequence[inference_pb2.GetInfoResponse]) -> AdaLNStatus | None:
    """What the plan cache does; None where there is none."""
    caches = [info.plan_cache for info in infos if info.HasField("plan_cache")]
    if not caches:
        return None
    served = sum(cache.requests.get(result, 0) for cache in caches for result in _SERVED)
    builds = sum(cache.requests.get("built", 0) for cache in caches)
    # The rows of the host tier lie in another memory than the weights would: they are told beside, not taken off.
    saved = sum(cache.unloaded_weight_bytes - cache.device_bytes for cache in caches)
    return AdaLNStatus(
        hit_ratio=f"{100 * (served - builds) / served:.0f}" if served else "",
        builds=builds,
        saved=human(rounded(saved)),
        host_tier=human(rounded(sum(cache.host_bytes for cache in caches))),
    )


def _workflows(infos: Sequence[inference_pb2.GetInfoResponse]) -> frozenset[str] | None:
    served = [
        frozenset(Workflow.Name(workflow).removeprefix("WORKFLOW_") for workflow in info.workflows) for info in infos
    ]
    return frozenset.intersection(*served) if served else None


def _spaces(infos: Sequence[inference_pb2.GetInfoResponse]) -> tuple[Space, ...]:
    """The memory plan of the pod that needs most, space by space."""
    found: dict[str, Space] = {}
    for info in infos:
        for space in info.memory_plan.spaces:
            known = found.get(space.space)
            if known is None or space.peak_bytes > known.peak_bytes:
                found[space.space] = Space(space.space, space.peak_bytes, space.budget_bytes)
    return tuple(found[name] for name in sorted(found))


def _not_owned(sidecars: Sequence[residency_pb2.Residency]) -> float:
    return sum(
        stuck.size_bytes
        for component in _components(sidecars)
        for stuck in component.stuck
        if stuck.reason == "not_owner"
    )


def rounded(size: float) -> int:
    """Bytes to two significant digits, so that small movements are no reason to write a status."""
    return int(float(f"{size:.2g}"))
