"""Every metric of the inference process, and beside each event that moves one its line at DEBUG.

Rules: known label combinations start at 0; no request id, prompt or process id in a label; no label named like a
target label of Prometheus; what can be absent comes from a collector, without timestamps. One registry for each
`Telemetry`, so that tests read their own.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations_with_replacement

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from sojourn.inference.adaln.counters import (
    Description,
    RejectReason,
    Result,
    SkipReason,
    Snapshot,
    Source,
    Tier,
)
from sojourn.inference.adaln.refusals import RequestReason
from sojourn.inference.offload.observer import Fallback, Stuck
from sojourn.inference.quality.observer import Action, Part
from sojourn.inference.requests import QualityTier, Workflow
from sojourn.inference.watch import Stage

_logger = logging.getLogger(__name__)

PROCESS = "inference"
UNKNOWN_WORKFLOW = "unknown"

# Buckets in seconds.
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
STAGE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120, 600, 1800)
REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)

CODES = (
    "OK",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "FAILED_PRECONDITION",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
)
REFUSALS = ("queue_full", "deadline", "invalid", "not_ready", "unauthenticated", "too_large")
STATES = ("loading", "serving", "draining", "failed")
LEVELS = ("debug", "info", "warning", "error", "critical")


def _version() -> str:
    try:
        return version("sojourn")
    except PackageNotFoundError:  # a checkout on the path, not installed
        return ""


class _Late:
    """Series that are absent, or not final, until the model is loaded."""

    def __init__(self, model_name: str) -> None:
        self.model = {"model": model_name, "family": "", "dtype": "", "device": "", "fingerprint": ""}
        self.time_to_ready_seconds: float | None = None
        self.last_progress_timestamp_seconds: float | None = None

    def collect(self) -> Iterator[Metric]:
        model = GaugeMetricFamily("sojourn_model_info", "The one model that is served.", labels=list(self.model))
        model.add_metric(list(self.model.values()), 1.0)
        yield model
        if self.time_to_ready_seconds is not None:
            help_text = "Seconds from the start of the process to SERVING."
            yield GaugeMetricFamily("sojourn_time_to_ready_seconds", help_text, value=self.time_to_ready_seconds)
        if self.last_progress_timestamp_seconds is not None:
            help_text = "Unix time of the last step or stage boundary."
            at = self.last_progress_timestamp_seconds
            yield GaugeMetricFamily("sojourn_last_progress_timestamp_seconds", help_text, value=at)


class OffloadMetrics:
    """Where weights are and what moves them; offload's observer.

    Series of a component appear with it, its counters at 0 (in `planned`, before anything can move them).
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.layers = Gauge(
            "sojourn_offload_layers", "Layers by the tier that the host keeps them in.", ["component", "tier"],
            registry=registry,
        )  # fmt: skip
        self.pinned_bytes = Gauge("sojourn_offload_pinned_bytes", "Host memory that is locked.", registry=registry)
        self.pin_budget_bytes = Gauge(
            "sojourn_offload_pin_budget_bytes", "Host memory that may be locked.", registry=registry
        )
        self.fallbacks = Counter(
            "sojourn_offload_fallbacks_total", "Fast paths given up.", ["reason"], registry=registry
        )
        self.stage_read_bytes = Counter(
            "sojourn_stage_read_bytes_total", "Read from storage by the whole process while a stage ran.", ["stage"],
            registry=registry,
        )  # fmt: skip
        self._movement_metrics(registry)
        self._plan_metrics(registry)
        for reason in Fallback:
            self.fallbacks.labels(reason)
        for stage in Stage:
            self.stage_read_bytes.labels(stage)

    def _movement_metrics(self, registry: CollectorRegistry) -> None:
        self.wait_seconds = Counter(
            "sojourn_offload_wait_seconds_total", "Time that computation has waited for weights.", ["component"],
            registry=registry,
        )  # fmt: skip
        self.streamed_bytes = Gauge(
            "sojourn_offload_streamed_bytes", "What each pass over a component means to read from storage again.",
            ["component"], registry=registry,
        )  # fmt: skip
        self.copied_bytes = Counter(
            "sojourn_offload_copied_bytes_total", "Weights copied from host to device.", ["component"],
            registry=registry,
        )  # fmt: skip
        self.direct_read_bytes = Counter(
            "sojourn_offload_direct_read_bytes_total", "Weights read around the page cache, for one use.",
            ["component"], registry=registry,
        )  # fmt: skip
        self.pageout_requested_bytes = Counter(
            "sojourn_pageout_requested_bytes_total", "Resident bytes given to MADV_PAGEOUT.", ["component"],
            registry=registry,
        )  # fmt: skip
        self.pageout_verified_bytes = Counter(
            "sojourn_pageout_verified_bytes_total", "Of the requested bytes, those found gone afterwards.",
            ["component"], registry=registry,
        )  # fmt: skip
        self.pageout_stuck_bytes = Gauge(
            "sojourn_pageout_stuck_bytes", "Bytes that the last page-out left in memory.", ["component", "reason"],
            registry=registry,
        )  # fmt: skip

    def _plan_metrics(self, registry: CollectorRegistry) -> None:
        self.plan_bytes = Gauge(
            "sojourn_memory_plan_bytes", "Planned placement of weights.", ["component", "tier"], registry=registry
        )
        self.plan_peak_bytes = Gauge(
            "sojourn_memory_plan_peak_bytes", "The most that a stage is expected to take.", ["space"],
            registry=registry,
        )  # fmt: skip
        self.plan_budget_bytes = Gauge(
            "sojourn_memory_plan_budget_bytes", "What may be taken.", ["space"], registry=registry
        )

    def placed(self, *, component: str, layers_by_tier: Mapping[str, int]) -> None:
        """See `Observer`."""
        for tier, layers in layers_by_tier.items():
            self.layers.labels(component, tier).set(layers)

    def pinned(self, *, booked_bytes: int, budget_bytes: int) -> None:
        """See `Observer`."""
        self.pinned_bytes.set(booked_bytes)
        self.pin_budget_bytes.set(budget_bytes)

    def waited(self, *, component: str, seconds: float) -> None:
        """See `Observer`."""
        self.wait_seconds.labels(component).inc(seconds)

    def streams(self, *, component: str, size_bytes: int) -> None:
        """See `Observer`."""
        self.streamed_bytes.labels(component).set(size_bytes)

    def copied(self, *, component: str, size_bytes: int) -> None:
        """See `Observer`."""
        self.copied_bytes.labels(component).inc(size_bytes)

    def read_directly(self, *, component: str, size_bytes: int) -> None:
        """See `Observer`."""
        self.direct_read_bytes.labels(component).inc(size_bytes)

    def fell_back(self, *, reason: Fallback) -> None:
        """See `Observer`."""
        self.fallbacks.labels(reason).inc()
        _logger.debug("offload fast path given up", extra={"reason": reason})

    def paged_out(self, *, component: str, requested_bytes: int, verified_bytes: int) -> None:
        """See `Observer`."""
        self.pageout_requested_bytes.labels(component).inc(requested_bytes)
        self.pageout_verified_bytes.labels(component).inc(verified_bytes)
        if requested_bytes:
            extra = {"component": component, "requested_bytes": requested_bytes, "verified_bytes": verified_bytes}
            _logger.debug("page-out", extra=extra)

    def stuck(self, *, component: str, by_reason: Mapping[Stuck, int]) -> None:
        """See `Observer`."""
        for reason, size_bytes in by_reason.items():
            self.pageout_stuck_bytes.labels(component, reason).set(size_bytes)
        if stuck := {reason.value: size_bytes for reason, size_bytes in by_reason.items() if size_bytes}:
            _logger.debug("page-out stuck", extra={"component": component, **stuck})

    def stage_read(self, *, stage: str, size_bytes: int) -> None:
        """See `Observer`."""
        self.stage_read_bytes.labels(stage).inc(size_bytes)
        _logger.debug("stage read", extra={"stage": stage, "size_bytes": size_bytes})

    def planned(self, *, component: str, bytes_by_tier: Mapping[str, int]) -> None:
        """See `Observer`."""
        for tier, size_bytes in bytes_by_tier.items():
            self.plan_bytes.labels(component, tier).set(size_bytes)
        self.waited(component=component, seconds=0)
        self.streams(component=component, size_bytes=0)
        self.copied(component=component, size_bytes=0)
        self.read_directly(component=component, size_bytes=0)
        self.paged_out(component=component, requested_bytes=0, verified_bytes=0)
        self.stuck(component=component, by_reason=dict.fromkeys(Stuck, 0))

    def peak(self, *, space: str, expected_bytes: int, budget_bytes: int) -> None:
        """See `Observer`."""
        self.plan_peak_bytes.labels(space).set(expected_bytes)
        self.plan_budget_bytes.labels(space).set(budget_bytes)


class _PlanCacheGauges:
    """Gauges of the plan caches, read when they are scraped; absent until the caches are set up."""

    def __init__(self) -> None:
        self.description: Description | None = None
        self.read: Callable[[], Snapshot] | None = None

    def collect(self) -> Iterator[Metric]:
        if self.description is None or self.read is None:
            return
        labels = asdict(self.description)
        info = GaugeMetricFamily("sojourn_plan_cache_info", "How the AdaLN plan cache is set up.", labels=list(labels))
        info.add_metric(list(labels.values()), 1.0)
        yield info
        now = self.read()
        yield _parts(
            "sojourn_plan_cache_slots", "Slots of the slab by state; the sum is its capacity.", "state",
            published=now.slots_published, reserved=now.slots_reserved, free=now.slots_free,
        )  # fmt: skip
        yield _parts(
            "sojourn_plan_cache_host_pages", "Pages of the host tier by state; the sum is its capacity.", "state",
            used=now.pages_used, free=now.pages_free,
        )  # fmt: skip
        yield _parts(
            "sojourn_plan_cache_allocated_bytes", "The slab, and pages of the host tier that are in memory.", "tier",
            gpu=now.device_bytes, host=now.host_bytes,
        )  # fmt: skip
        yield GaugeMetricFamily(
            "sojourn_plan_cache_unloaded_weight_bytes", "Projections that were never loaded.", value=now.weight_bytes
        )
        yield GaugeMetricFamily(
            "sojourn_plan_store_size_bytes", "Size of the plan store, which the processes of a node share.",
            value=now.store_bytes,
        )  # fmt: skip


def _parts(name: str, documentation: str, label: str, **values: float) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=[label])
    for value, amount in values.items():
        family.add_metric([value], amount)
    return family


class PlanCacheMetrics:
    """The observer of the plan caches; see `sojourn.inference.adaln.counters.Observer`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauges = _PlanCacheGauges()
        registry.register(self._gauges)
        self._requests = _counted(
            registry, "sojourn_plan_cache_requests_total", "Transactions of the plan cache.", "result", Result
        )
        self._plans = _counted(
            registry, "sojourn_plan_cache_plans_total", "Distinct plans served, by where they were.", "source", Source
        )
        self._evicted = _counted(
            registry, "sojourn_plan_cache_evicted_plans_total", "Plans that lost their place.", "tier", Tier
        )
        self._skipped = _counted(
            registry, "sojourn_plan_cache_host_skipped_groups_total", "Groups that the host tier did not store.",
            "reason", SkipReason,
        )  # fmt: skip
        self._refused = _counted(
            registry, "sojourn_plan_cache_refused_requests_total", "Requests that the plan cache refused.", "reason",
            RequestReason,
        )  # fmt: skip
        self._rejected = _counted(
            registry, "sojourn_plan_store_rejected_files_total", "Files of the plan store not used or not written.",
            "reason", RejectReason,
        )  # fmt: skip
        self._read = Counter(
            "sojourn_plan_cache_read_bytes_total", "Bytes of AdaLN projections read for builds.", registry=registry
        )
        self._build = Histogram(
            "sojourn_plan_cache_build_duration_seconds", "One build, all ranks together.", buckets=STAGE_BUCKETS,
            registry=registry,
        )  # fmt: skip

    def opened(self, description: Description, gauges: Callable[[], Snapshot]) -> None:
        """The caches of the process are set up, or it is settled that there are none."""
        self._gauges.description, self._gauges.read = description, gauges

    def snapshot(self) -> Snapshot | None:
        """The gauges now; None where there is no plan cache."""
        description, read = self._gauges.description, self._gauges.read
        return None if description is None or read is None or description.off_reason else read()

    def requests(self) -> dict[str, int]:
        """Transactions so far by result."""
        return {
            str(result): int(sample.value)
            for result, counter in self._requests.items()
            for metric in counter.collect()
            for sample in metric.samples
        }

    def request(self, result: Result) -> None:
        """A transaction has ended."""
        self._requests[result].inc()
        _logger.debug("plan cache transaction", extra={"result": result})

    def served(self, source: Source, plans: int) -> None:
        """Distinct plans were served from a source."""
        self._plans[source].inc(plans)
        _logger.debug("plan cache served", extra={"source": source, "plans": plans})

    def built(self, seconds: float) -> None:
        """A build has succeeded."""
        self._build.observe(seconds)
        _logger.debug("plan cache built", extra={"seconds": round(seconds, 6)})

    def read(self, nbytes: int) -> None:
        """Bytes of projections were read from the checkpoint."""
        self._read.inc(nbytes)

    def evicted(self, tier: Tier, plans: int) -> None:
        """Plans lost their place in a tier."""
        self._evicted[tier].inc(plans)
        _logger.debug("plan cache evicted", extra={"tier": tier, "plans": plans})

    def host_skipped(self, reason: SkipReason) -> None:
        """A group was not stored in the host tier."""
        self._skipped[reason].inc()
        _logger.debug("plan cache host tier skipped a group", extra={"reason": reason})

    def refused(self, reason: RequestReason) -> None:
        """A request was refused."""
        self._refused[reason].inc()
        _logger.debug("plan cache refused", extra={"reason": reason})

    def store_rejected(self, reason: RejectReason) -> None:
        """A file of the plan store was not used or not written."""
        self._rejected[reason].inc()
        _logger.debug("plan store file not used", extra={"reason": reason})


def _counted(
    registry: CollectorRegistry, name: str, documentation: str, label: str, values: type[StrEnum]
) -> dict[StrEnum, Counter]:
    """A counter's children by the value of its one label, all of them at 0."""
    counter = Counter(name, documentation, [label], registry=registry)
    return {value: counter.labels(value.value) for value in values}


class QualityMetrics:
    """What quality tiers put on the transformers; see `sojourn.inference.quality.observer.Observer`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._changes = Counter(
            "sojourn_fusion_changes_total", "Parts of quality tiers mounted, unmounted, and failed to mount.",
            ["family", "action"], registry=registry,
        )  # fmt: skip
        self._sites = Gauge(
            "sojourn_fusion_mounted_sites", "Sites of the transformers that run on a part of a quality tier.",
            ["family"], registry=registry,
        )  # fmt: skip
        self._evaluations = Counter(
            "sojourn_step_cache_evaluations_total", "Transformer evaluations under the step cache of tier high.",
            ["result"], registry=registry,
        )  # fmt: skip
        for part in Part:
            self._sites.labels(part)
            for action in Action:
                self._changes.labels(part, action)
        for result in ("computed", "skipped"):
            self._evaluations.labels(result)

    def changed(self, *, part: Part, action: Action) -> None:
        """See `Observer`."""
        self._changes.labels(part, action).inc()

    def mounted(self, *, part: Part, sites: int) -> None:
        """See `Observer`."""
        self._sites.labels(part).set(sites)

    def evaluated(self, *, skipped: bool) -> None:
        """See `Observer`."""
        self._evaluations.labels("skipped" if skipped else "computed").inc()


class Telemetry:
    """The metrics, and the few verbs that move them.

    Attributes:
        registry: What the exporter reads.
        offload: Where weights are and what moves them.
        plan_cache: Hears of what the plan caches do.
        quality: Hears of what quality tiers mount.
    """

    def __init__(
        self, *, model_name: str = "", max_waiting: int = 0, registry: CollectorRegistry | None = None
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = registry or CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self._late = _Late(model_name)
        registry.register(self._late)
        self._build_metrics(registry)
        self._request_metrics(registry)
        self._work_metrics(registry)
        self.offload = OffloadMetrics(registry)
        self.plan_cache = PlanCacheMetrics(registry)
        self.quality = QualityMetrics(registry)
        self.requests_waiting_limit.set(max_waiting)
        self.state("loading")

    def _build_metrics(self, registry: CollectorRegistry) -> None:
        build = Info("sojourn_build", "Which build runs.", registry=registry)
        build.info({"version": _version(), "revision": "", "process": PROCESS})
        self.log_lines = Counter(
            "sojourn_log_lines_total", "Log records by level, those below the print level too.", ["level"],
            registry=registry,
        )  # fmt: skip
        self.service_state = Gauge(
            "sojourn_service_state", "1 for the state that the service is in.", ["state"], registry=registry
        )
        for level in LEVELS:
            self.log_lines.labels(level)

    def _request_metrics(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "sojourn_requests_total", "Ended calls, refused ones too.", ["workflow", "code"], registry=registry
        )
        self.requests_refused = Counter(
            "sojourn_requests_refused_total", "Those of the ended calls that were refused before work.", ["reason"],
            registry=registry,
        )  # fmt: skip
        self.requests_running = Gauge("sojourn_requests_running", "Requests in the pipeline.", registry=registry)
        self.requests_waiting = Gauge("sojourn_requests_waiting", "Requests in the queue.", registry=registry)
        self.requests_waiting_limit = Gauge("sojourn_requests_waiting_limit", "Places in the queue.", registry=registry)
        self.quality_requests = Counter(
            "sojourn_quality_requests_total", "Requests whose clips are made, by the tier asked for and used.",
            ["asked", "used"], registry=registry,
        )  # fmt: skip
        for workflow in (*Workflow, UNKNOWN_WORKFLOW):
            for code in CODES:
                self.requests.labels(workflow, code)
        for reason in REFUSALS:
            self.requests_refused.labels(reason)
        for used, asked in combinations_with_replacement(QualityTier, 2):  # a tier is never replaced by a lossier one
            self.quality_requests.labels(asked, used)

    def _work_metrics(self, registry: CollectorRegistry) -> None:
        self.request_queue = Histogram(
            "sojourn_request_queue_seconds", "Time in the queue.", buckets=REQUEST_BUCKETS, registry=registry
        )
        self.request_duration = Histogram(
            "sojourn_request_duration_seconds", "Accepted to last byte, of calls that ended OK.", ["workflow"],
            buckets=REQUEST_BUCKETS, registry=registry,
        )  # fmt: skip
        self.stage_duration = Histogram(
            "sojourn_stage_duration_seconds", "One use of a stage.", ["stage"], buckets=STAGE_BUCKETS,
            registry=registry,
        )  # fmt: skip
        self.step_duration = Histogram(
            "sojourn_step_duration_seconds", "One denoising step.", buckets=STEP_BUCKETS, registry=registry
        )
        self.cancel_latency = Histogram(
            "sojourn_cancel_latency_seconds", "From a running request's cancel or deadline to its place being free.",
            buckets=STEP_BUCKETS, registry=registry,
        )  # fmt: skip
        self.nonfinite_outputs = Counter(
            "sojourn_nonfinite_outputs_total", "Requests that failed for a NaN or infinity.", ["stage"],
            registry=registry,
        )  # fmt: skip
        for workflow in Workflow:
            self.request_duration.labels(workflow)
        for stage in Stage:
            self.stage_duration.labels(stage)
            self.nonfinite_outputs.labels(stage)

    def log_line(self, level: str) -> None:
        """A record of `level` was logged."""
        self.log_lines.labels(level).inc()

    def state(self, state: str) -> None:
        """The service is in `state` now, and in no other."""
        for name in STATES:
            self.service_state.labels(name).set(name == state)

    def ready(self, *, seconds: float, family: str, dtype: str, device: str, model_name: str) -> None:
        """The model is loaded, `seconds` after the start of the process."""
        self._late.time_to_ready_seconds = seconds
        self._late.model.update(model=model_name, family=family, dtype=dtype, device=device)

    def fingerprint(self, fingerprint: str) -> None:
        """What the weights are."""
        self._late.model["fingerprint"] = fingerprint

    def progressed(self, *, at: float) -> None:
        """A step or stage has ended or begun at the Unix time `at`."""
        self._late.last_progress_timestamp_seconds = at

    def queue_changed(self, running: int, waiting: int) -> None:
        """That many requests run and wait."""
        self.requests_running.set(running)
        self.requests_waiting.set(waiting)

    def ended(self, *, workflow: str, code: str, refused: str | None) -> None:
        """A call has ended; `refused` is the reason where it was refused before work."""
        self.requests.labels(workflow, code).inc()
        if refused is not None:
            self.requests_refused.labels(refused).inc()
