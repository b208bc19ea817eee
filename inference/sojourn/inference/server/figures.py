"""What GetInfo says of the plan cache and the memory plan: the very figures of the metrics."""

from collections.abc import Iterator

from prometheus_client import Gauge
from sojourn.inference.telemetry import OffloadMetrics, PlanCacheMetrics, Telemetry
from sojourn.v1 import inference_pb2 as pb


def add_figures(response: pb.GetInfoResponse, telemetry: Telemetry) -> None:
    """Adds what is known; what is not there stays absent."""
    _add_plan_cache(response, telemetry.plan_cache)
    _add_memory_plan(response, telemetry.offload)


def _add_plan_cache(response: pb.GetInfoResponse, metrics: PlanCacheMetrics) -> None:
    now = metrics.snapshot()
    if now is None:
        return
    info = response.plan_cache
    info.requests.update(metrics.requests())
    info.unloaded_weight_bytes = now.weight_bytes
    info.device_bytes, info.host_bytes = now.device_bytes, now.host_bytes


def _add_memory_plan(response: pb.GetInfoResponse, metrics: OffloadMetrics) -> None:
    budgets = {labels["space"]: value for labels, value in _samples(metrics.plan_budget_bytes)}
    for labels, value in _samples(metrics.plan_peak_bytes):
        space = labels["space"]
        response.memory_plan.spaces.add(space=space, peak_bytes=value, budget_bytes=budgets.get(space, 0))
    tiers: dict[str, dict[str, int]] = {}
    for labels, value in _samples(metrics.plan_bytes):
        tiers.setdefault(labels["component"], {})[labels["tier"]] = value
    for name in sorted(tiers):
        response.memory_plan.components.add(name=name, tier_bytes=tiers[name])


def _samples(gauge: Gauge) -> Iterator[tuple[dict[str, str], int]]:
    """Labels and value of each child of a gauge of bytes."""
    return ((sample.labels, int(sample.value)) for metric in gauge.collect() for sample in metric.samples)
