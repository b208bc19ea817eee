"""Every metric of the operator.

Label combinations that are known beforehand exist at 0 from the start: a counter that is born at 1 fires no alert.
States of resources are built per scrape from what is cached, so that nothing outlives its object.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

RECONCILE_RESULTS = ("unchanged", "applied", "retried", "failed")
ADMISSION_RESULTS = ("allowed", "refused")
RESYNC_RESULTS = ("completed", "failed")
HELM_VERBS = ("template", "upgrade", "rollback", "uninstall")
WRITES = ("status", "metadata", "event", "object", "dry_run")
KINDS = ("DiffusionService", "AdaLNCache", "LayerwiseOffload")
MAX_PROBLEMS = 100
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


@dataclass(frozen=True)
class Problem:
    """A condition that is not as it should be."""

    kind: str
    namespace: str
    name: str
    condition: str
    reason: str


@dataclass(frozen=True)
class Snapshot:
    """What is cached about the custom resources.

    Attributes:
        ready: number of resources by kind and Ready's status.
        problems: conditions that are not as they should be.
    """

    ready: dict[tuple[str, str], int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


class Telemetry:
    """The metrics, bound to a registry of their own."""

    def __init__(self, *, version: str, registry: CollectorRegistry | None = None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry or CollectorRegistry()
        Info("sojourn_build", "Which build this is.", registry=self.registry).info(
            {"version": version, "revision": "", "process": "operator"}
        )
        self.reconciles = Counter(
            "sojourn_operator_reconciles", "Passes over a resource.", ("kind", "result"), registry=self.registry
        )
        self.reconcile_seconds = Histogram(
            "sojourn_operator_reconcile_duration_seconds",
            "Duration of one pass.",
            ("kind",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.resyncs = Counter(
            "sojourn_operator_resyncs",
            "Listings of everything after the first one.",
            ("result",),
            registry=self.registry,
        )
        self.helm_calls = Counter("sojourn_operator_helm_calls", "Helm processes.", ("verb",), registry=self.registry)
        self.helm_failures = Counter(
            "sojourn_operator_helm_failures", "Helm processes that failed.", ("verb",), registry=self.registry
        )
        self.helm_seconds = Histogram(
            "sojourn_operator_helm_duration_seconds",
            "Duration of one helm process.",
            ("verb",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.drifted = Counter(
            "sojourn_operator_drifted_objects", "Objects that others changed.", ("kind",), registry=self.registry
        )
        self.recoveries = Counter(
            "sojourn_operator_release_recoveries",
            "Releases brought out of a cut-off operation.",
            registry=self.registry,
        )
        self.writes = Counter(
            "sojourn_operator_api_writes", "Writes to the API server.", ("what",), registry=self.registry
        )
        self.admissions = Counter(
            "sojourn_operator_admission_reviews", "Answers of the webhook.", ("result",), registry=self.registry
        )
        self.log_lines = Counter("sojourn_log_lines", "Log records.", ("level",), registry=self.registry)
        self.queue_depth = Gauge(
            "sojourn_operator_queue_depth", "Resources waiting for a pass.", registry=self.registry
        )
        self.last_event = Gauge(
            "sojourn_operator_last_event_timestamp_seconds",
            "Last event of a watch, or completed resync.",
            registry=self.registry,
        )
        self._start_at_zero()

    def _start_at_zero(self) -> None:
        for kind in KINDS:
            self.reconcile_seconds.labels(kind)
            for result in RECONCILE_RESULTS:
                self.reconciles.labels(kind, result)
        for verb in HELM_VERBS:
            self.helm_calls.labels(verb)
            self.helm_failures.labels(verb)
            self.helm_seconds.labels(verb)
        for result in RESYNC_RESULTS:
            self.resyncs.labels(result)
        for result in ADMISSION_RESULTS:
            self.admissions.labels(result)
        for what in WRITES:
            self.writes.labels(what)
        for level in ("debug", "info", "warning", "error", "critical"):
            self.log_lines.labels(level)

    def helm_call(self, verb: str, seconds: float, error: Exception | None) -> None:
        """Counts a helm process that ended."""
        self.helm_calls.labels(verb).inc()
        self.helm_seconds.labels(verb).observe(seconds)
        if error is not None:
            self.helm_failures.labels(verb).inc()

    def written(self, what: str) -> None:
        """Counts a write to the API server."""
        self.writes.labels(what if what in WRITES else "object").inc()

    def watch_resources(self, snapshot: Callable[[], Snapshot], oldest_pending: Callable[[], float | None]) -> None:
        """Exports the states of resources, asked for at each scrape."""
        self.registry.register(_States(snapshot, oldest_pending))


class _States(Collector):
    def __init__(self, snapshot: Callable[[], Snapshot], oldest_pending: Callable[[], float | None]) -> None:
        self._snapshot = snapshot
        self._oldest_pending = oldest_pending

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        yield _resources(snapshot.ready)
        yield from _problems(snapshot.problems)
        pending = GaugeMetricFamily(
            "sojourn_operator_oldest_pending_timestamp_seconds", "Since when the first waiting resource waits."
        )
        if (oldest := self._oldest_pending()) is not None:
            pending.add_metric([], oldest)
        yield pending


def _resources(ready: dict[tuple[str, str], int]) -> Metric:
    family = GaugeMetricFamily("sojourn_operator_resources", "Custom resources.", labels=("kind", "ready"))
    for kind in KINDS:
        for status in ("True", "False", "Unknown"):
            family.add_metric([kind, status], ready.get((kind, status), 0))
    return family


def _problems(problems: Iterable[Problem]) -> Iterator[Metric]:
    listed = sorted(problems, key=lambda problem: (problem.namespace, problem.name, problem.condition))
    family = GaugeMetricFamily(
        "sojourn_operator_resource_problem",
        "Conditions that are not as they should be; at most 100.",
        labels=("kind", "resource_namespace", "resource_name", "condition", "reason"),
    )
    for problem in listed[:MAX_PROBLEMS]:
        family.add_metric([problem.kind, problem.namespace, problem.name, problem.condition, problem.reason], 1)
    yield family
    omitted = max(0, len(listed) - MAX_PROBLEMS)
    yield GaugeMetricFamily("sojourn_operator_resource_problems_omitted", "How many more there are.", value=omitted)
