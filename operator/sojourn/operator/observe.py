"""What the pods of a service say of themselves: read from the metrics of both processes, summed, rounded.

Metrics need neither a certificate nor a token, so that the operator holds no secret of a service. Whoever does not
answer in time is left out; that the operator cannot see is a condition, never zeros.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from sojourn.operator.plan import human
from sojourn.operator.resources.status import AdaLNStatus, ComponentResidency, ResidencyStatus

TIMEOUT_SECONDS = 3.0
# More pods than this are summed up from the first ones: status is a summary, the metrics are the whole.
MAX_PODS = 32
# As the chart of a service sets them.
INFERENCE_PORT, RESIDENCYD_PORT = 9464, 9465

_MAPPED = "sojourn_residency_mapped_bytes"
_RESIDENT = "sojourn_residency_resident_bytes"
_REQUESTS = "sojourn_plan_cache_requests_total"

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Scrape:
    """Samples of one process: name, labels, value."""

    samples: tuple[tuple[str, Labels, float], ...] = ()

    def of(self, name: str) -> Iterable[tuple[Labels, float]]:
        """Labels and value of each sample of a metric."""
        return ((labels, value) for found, labels, value in self.samples if found == name)


@dataclass(frozen=True)
class PodView:
    """One pod; None for a process that did not answer."""

    inference: Scrape | None
    residencyd: Scrape | None


@dataclass(frozen=True)
class View:
    """A service, over its pods.

    Attributes:
        visible: whether every sidecar answered and sees its process.
        reason: why not.
        not_owned: bytes that are cold but stay, since the checkpoint's files belong to another user; None: unknown.
    """

    visible: bool
    reason: str
    message: str
    model: str = ""
    family: str = ""
    residency: ResidencyStatus | None = None
    adaln: AdaLNStatus | None = None
    not_owned: float | None = None


def summarise(pods: Sequence[PodView]) -> View:
    """The view of a service over the answers of its pods."""
    inference = [pod.inference for pod in pods if pod.inference]
    sidecars = [pod.residencyd for pod in pods if pod.residencyd]
    visible, reason, message = _visibility(pods)
    info = next((labels for scrape in inference for labels, _ in scrape.of("sojourn_model_info")), {})
    return View(
        visible=visible,
        reason=reason,
        message=message,
        model=info.get("model", ""),
        family=info.get("family", ""),
        residency=_residency(sidecars),
        adaln=_adaln(inference),
        not_owned=_not_owned(sidecars) if visible else None,
    )


def _visibility(pods: Sequence[PodView]) -> tuple[bool, str, str]:
    silent = sum(pod.residencyd is None for pod in pods)
    if silent:
        return False, "Unreachable", f"the residencyd of {silent} of {len(pods)} pods does not answer the operator"
    blind = [
        labels["reason"]
        for pod in pods
        for labels, value in (pod.residencyd or Scrape()).of("sojourn_residency_blind")
        if value and "reason" in labels
    ]
    if blind:
        return False, "Blind", f"residencyd cannot see the model process: {', '.join(sorted(set(blind)))}"
    return True, "Visible", f"{len(pods)} pods report where their weights are"


@dataclass
class _Tiers:
    """Bytes of one component by tier."""

    mapped: dict[str, float] = field(default_factory=dict)
    resident: dict[str, float] = field(default_factory=dict)


def _residency(sidecars: Sequence[Scrape]) -> ResidencyStatus | None:
    """Bytes by component and in all; None where nobody reports any, which is not the same as zero bytes."""
    components: dict[str, _Tiers] = {}
    for scrape in sidecars:
        for name, part in ((_MAPPED, "mapped"), (_RESIDENT, "resident")):
            for labels, value in scrape.of(name):
                tiers = getattr(components.setdefault(labels["component"], _Tiers()), part)
                tiers[labels["tier"]] = tiers.get(labels["tier"], 0.0) + value
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
        vram_bytes=rounded(tiers.mapped.get("vram", 0)),
        pinned_bytes=rounded(tiers.resident.get("host_pinned", 0)),
        mapped_bytes=rounded(tiers.mapped.get("host_mapped", 0)),
        mapped_resident_bytes=rounded(tiers.resident.get("host_mapped", 0)),
        pageable_bytes=rounded(tiers.resident.get("host_pageable", 0)),
    )


def _adaln(scrapes: Sequence[Scrape]) -> AdaLNStatus | None:
    """What the plan cache does; None where there is none."""
    by_result: dict[str, float] = {}
    for scrape in scrapes:
        for labels, value in scrape.of(_REQUESTS):
            by_result[labels["result"]] = by_result.get(labels["result"], 0.0) + value
    if not by_result:
        return None
    served = sum(by_result.get(result, 0.0) for result in ("hit", "host", "store", "built"))
    builds = by_result.get("built", 0.0)
    unloaded = _sum(scrapes, "sojourn_plan_cache_unloaded_weight_bytes")
    allocated = _sum(scrapes, "sojourn_plan_cache_allocated_bytes")
    return AdaLNStatus(
        hit_ratio=f"{100 * (served - builds) / served:.0f}" if served else "",
        builds=int(builds),
        saved=human(rounded(max(0.0, unloaded - allocated))),
    )


def _not_owned(sidecars: Sequence[Scrape]) -> float:
    stuck = (found for scrape in sidecars for found in scrape.of("sojourn_headroom_stuck_bytes"))
    return sum(value for labels, value in stuck if labels.get("reason") == "not_owner")


def _sum(scrapes: Sequence[Scrape], name: str) -> float:
    return sum(value for scrape in scrapes for _, value in scrape.of(name))


def rounded(size: float) -> int:
    """Bytes to two significant digits, so that small movements are no reason to write a status."""
    return int(float(f"{size:.2g}"))


def parse(text: str) -> Scrape:
    """Samples of a metrics page in the text format."""
    return Scrape(
        tuple(
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        )
    )


async def look(session: aiohttp.ClientSession, addresses: Sequence[str]) -> View:
    """Asks the pods with these addresses."""
    return summarise(await asyncio.gather(*(_pod(session, address) for address in addresses[:MAX_PODS])))


async def _pod(session: aiohttp.ClientSession, address: str) -> PodView:
    inference, residencyd = await asyncio.gather(
        _scrape(session, address, INFERENCE_PORT), _scrape(session, address, RESIDENCYD_PORT)
    )
    return PodView(inference, residencyd)


async def _scrape(session: aiohttp.ClientSession, address: str, port: int) -> Scrape | None:
    host = f"[{address}]" if ":" in address else address
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    try:
        async with session.get(f"http://{host}:{port}/metrics", timeout=timeout) as answer:
            return parse(await answer.text()) if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None
