"""Metrics, made anew for every scrape out of one snapshot: no series survives what it speaks of.

No timestamps (with one a series that is gone lingers for five minutes), no pid in a label, no label whose sums mean
nothing. Whatever is known beforehand is there at 0; bytes of a process that cannot be read are absent, and the reason
stands in sojourn_residency_blind.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from sojourn.residencyd.attribution import DISAGREEMENTS
from sojourn.residencyd.claims import Tier
from sojourn.residencyd.headroom import STUCK_REASONS
from sojourn.residencyd.scanner import Scanner
from sojourn.residencyd.snapshots import BLIND_REASONS, ProcessReading, Snapshot
from sojourn.residencyd.sources import NAMES

Sample = tuple[tuple[str, ...], float]


class ResidencyCollector(Collector):
    """Scans when it is scraped.

    Args:
        scanner: Makes the snapshots, and keeps its own interval floor.
        clock: Unix time.
        lines: Log records by level since the start, see `logs`.
        version: Of this program.
        revision: Of its source.
    """

    def __init__(
        self,
        scanner: Scanner,
        *,
        clock: Callable[[], float] = time.time,
        lines: Callable[[], Iterable[tuple[str, int]]] = tuple,
        version: str = "",
        revision: str = "",
    ) -> None:
        self._scanner = scanner
        self._clock = clock
        self._lines = lines
        self._build = {"version": version, "revision": revision, "process": "residencyd"}

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not scan."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Every metric, from one snapshot."""
        snapshot = self._scanner.snapshot(self._clock())
        yield InfoMetricFamily("sojourn_build", "Which build runs.", value=self._build)
        yield _counter("log_lines", "Log records, also those below the print level.", ["level"], _lines(self._lines()))
        yield from components(snapshot.seen)
        yield from processes(snapshot)
        yield from headroom(snapshot)
        yield from machine(snapshot)
        yield from scans(snapshot, self._scanner.errors)


def components(seen: Sequence[ProcessReading]) -> Iterator[Metric]:
    """Per component. Processes that hold components of one name (ranks) add up."""
    parts = [(reading, part) for reading in seen for part in reading.components]
    tiers = [(part.name, tier, part.tiers.get(tier)) for _, part in parts for tier in Tier]
    yield _gauge(
        "residency_mapped_bytes",
        "Size of a component's address ranges, by the tier that the kernel sees.",
        ["component", "tier"],
        (((name, tier.value), held.mapped_bytes if held else 0) for name, tier, held in tiers),
    )
    yield _gauge(
        "residency_resident_bytes",
        "Of these, in memory.",
        ["component", "tier"],
        (((name, tier.value), held.resident_bytes if held else 0) for name, tier, held in tiers),
    )
    yield _gauge(
        "residency_swapped_bytes",
        "Of these, in swap.",
        ["component"],
        (((part.name,), part.swapped_bytes) for _, part in parts),
    )
    yield _gauge(
        "residency_disagreement_bytes",
        "What the process claims of a component and the kernel contradicts.",
        ["component", "kind"],
        (((part.name, kind), part.disagreements[kind]) for _, part in parts for kind in DISAGREEMENTS),
    )
    cached = [(name, found) for reading in seen for name, found in reading.cached.items()]
    yield _gauge(
        "checkpoint_cached_bytes",
        "What a component has mapped of its files, in the page cache.",
        ["component"],
        (((name,), found.size_bytes) for name, found in cached if not found.estimate),
    )
    yield _gauge(
        "checkpoint_cached_estimate_bytes",
        "The same by sampling, where the kernel refuses the exact count.",
        ["component"],
        (((name,), found.size_bytes) for name, found in cached if found.estimate),
    )


def processes(snapshot: Snapshot) -> Iterator[Metric]:
    """Of the model processes."""
    nobodys = [reading.unattributed for reading in snapshot.seen if reading.unattributed]
    kinds = [("file", [n.file_bytes for n in nobodys]), ("anonymous", [n.anonymous_bytes for n in nobodys])]
    kinds.append(("shared", [n.shared_bytes for n in nobodys]))
    yield _gauge(
        "residency_unattributed_bytes",
        "In memory, claimed by no component.",
        ["kind"],
        (((kind,), sum(sizes)) for kind, sizes in kinds if sizes),
    )
    blind = {reading.blind_reason for reading in snapshot.processes}
    yield _gauge(
        "residency_blind",
        "1 for each reason for which a process cannot be seen.",
        ["reason"],
        (((reason,), float(reason in blind)) for reason in BLIND_REASONS),
    )
    yield _counter(
        "target_major_faults",
        "Page faults of the model process that had to read from storage.",
        [],
        (((), reading.major_faults) for reading in snapshot.seen),
    )
    claims = [reading.claim for reading in snapshot.seen if reading.claim]
    yield _gauge(
        "component_map_timestamp_seconds",
        "When the component map was written; the oldest of several.",
        [],
        _one(min((claim.published_seconds for claim in claims), default=None)),
    )
    yield _gauge(
        "component_map_generation",
        "Number of the component map; the lowest of several.",
        [],
        _one(min((claim.generation for claim in claims), default=None)),
    )


def headroom(snapshot: Snapshot) -> Iterator[Metric]:
    """Each part by itself: room + cold is to be held against need."""
    cold = [(name, found) for reading in snapshot.seen for name, found in reading.cold.items()]
    total = snapshot.headroom
    yield _gauge(
        "headroom_room_bytes",
        "To be had without touching a component: the least of the control groups' room and MemAvailable, less the "
        "components' own mapped pages.",
        [],
        _one(total.room_bytes if total else None),
    )
    yield _gauge("headroom_need_bytes", "What the next stage will take.", [], _one(total.need_bytes if total else None))
    yield _gauge(
        "headroom_cold_bytes",
        "What a component that is not needed now or next could give back.",
        ["component"],
        (((name,), found.cold_bytes) for name, found in cold),
    )
    yield _gauge(
        "headroom_stuck_bytes",
        "As cold, but it would stay.",
        ["component", "reason"],
        (((name, reason), found.stuck_bytes[reason]) for name, found in cold for reason in STUCK_REASONS),
    )


def machine(snapshot: Snapshot) -> Iterator[Metric]:
    """Of the machine, its control groups and its accelerators."""
    memory, group = snapshot.memory, snapshot.tightest
    yield _gauge(
        "memory_available_bytes",
        "What the machine can still give: MemAvailable.",
        [],
        _one(memory.available_bytes if memory else None),
    )
    yield _gauge(
        "cgroup_limit_bytes",
        "Limit of the control group with the least room; absent where none is capped.",
        [],
        _one(group.limit_bytes if group else None),
    )
    yield _gauge("cgroup_usage_bytes", "What is charged to that group.", [], _one(group.usage_bytes if group else None))
    yield _gauge(
        "cgroup_reclaimable_bytes",
        "Part of the usage that is file cache.",
        [],
        _one(group.reclaimable_bytes if group else None),
    )
    pressure = list(snapshot.pressure.items())
    yield _counter(
        "pressure_waiting_seconds",
        "Time in which a task waited for a resource.",
        ["resource"],
        (((resource,), found.waiting_seconds) for resource, found in pressure),
    )
    yield _counter(
        "pressure_stalled_seconds",
        "Part of it in which all tasks did.",
        ["resource"],
        (((resource,), found.stalled_seconds) for resource, found in pressure),
    )
    present = [device for device in snapshot.devices if not device.absent_reason]
    yield _gauge(
        "device_memory_bytes",
        "Memory of an accelerator. Where it is the host's, free is MemAvailable.",
        ["device", "state"],
        (
            ((device.device, state), size)
            for device in present
            for state, size in (("used", device.used_bytes), ("free", device.free_bytes))
        ),
    )
    yield _gauge(
        "device_memory_absent",
        "1 for an accelerator whose memory cannot be had, by reason.",
        ["device", "reason"],
        (((device.device, device.absent_reason), 1) for device in snapshot.devices if device.absent_reason),
    )


def scans(snapshot: Snapshot, errors: Mapping[str, int]) -> Iterator[Metric]:
    """Of the looking itself."""
    oldest = min((reading.deep_seconds for reading in snapshot.seen), default=None)
    yield _gauge("scan_timestamp_seconds", "When pages were last counted.", [], _one(oldest))
    yield _gauge("scan_duration_seconds", "How long the last look took.", [], _one(snapshot.duration_seconds))
    mappings = sum(reading.mappings for reading in snapshot.seen)
    yield _gauge("scan_mappings", "Mappings that the last look met.", [], _one(mappings))
    yield _counter("scan_errors", "Sources that failed.", ["source"], (((name,), errors[name]) for name in NAMES))
    yield _gauge(
        "scan_source_usable",
        "Whether a source worked in the last look.",
        ["source"],
        (((name,), float(snapshot.sources.get(name) == "")) for name in NAMES),
    )


def _one(value: float | None) -> list[Sample]:
    """The only sample of a metric without labels; none for what is not known."""
    return [] if value is None else [((), value)]


def _lines(lines: Iterable[tuple[str, int]]) -> Iterator[Sample]:
    return (((level,), count) for level, count in lines)


def _gauge(name: str, text: str, labels: list[str], samples: Iterable[Sample]) -> Metric:
    return _filled(GaugeMetricFamily(f"sojourn_{name}", text, labels=labels), samples)


def _counter(name: str, text: str, labels: list[str], samples: Iterable[Sample]) -> Metric:
    return _filled(CounterMetricFamily(f"sojourn_{name}", text, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[Sample]) -> Metric:
    """Samples of equal labels add up: ranks that hold a component of the same name."""
    sums: dict[tuple[str, ...], float] = {}
    for labels, value in samples:
        sums[labels] = sums.get(labels, 0.0) + value
    for labels, value in sums.items():
        family.add_metric(list(labels), value)
    return family
