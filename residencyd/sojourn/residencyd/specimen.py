"""A snapshot in which every metric has a series: what docs/metrics.md is generated from."""

from prometheus_client import CollectorRegistry
from sojourn.residencyd.attribution import DISAGREEMENTS, ComponentBytes, TierBytes, Unattributed
from sojourn.residencyd.claims import ComponentClaim, ComponentMap, Tier
from sojourn.residencyd.collector import ResidencyCollector
from sojourn.residencyd.devices import NOT_SUPPORTED, DeviceMemory
from sojourn.residencyd.files import Cached
from sojourn.residencyd.headroom import STUCK_REASONS, Cold, Headroom
from sojourn.residencyd.kernel.cgroups import CGROUP_ROOT, Group
from sojourn.residencyd.kernel.meminfo import MemInfo
from sojourn.residencyd.kernel.pressure import RESOURCES, Pressure
from sojourn.residencyd.logs import LEVELS
from sojourn.residencyd.scanner import Scanner
from sojourn.residencyd.settings import Settings
from sojourn.residencyd.snapshots import ProcessReading, Snapshot
from sojourn.residencyd.sources import NAMES


def snapshot() -> Snapshot:
    """A look at a process with two components, on a machine that has everything."""
    claims = (ComponentClaim("transformer"), ComponentClaim("vae"))
    cold = Cold(0, dict.fromkeys(STUCK_REASONS, 0))
    reading = ProcessReading(
        pid=1,
        claim=ComponentMap(generation=1, pid=1, start_ticks=1, components=claims),
        components=tuple(
            ComponentBytes(claim, {Tier.HOST_MAPPED: TierBytes()}, 0, dict.fromkeys(DISAGREEMENTS, 0))
            for claim in claims
        ),
        cold={claim.name: cold for claim in claims},
        cached={"transformer": Cached(0, estimate=False), "vae": Cached(0, estimate=True)},
        unattributed=Unattributed(),
    )
    return Snapshot(
        scanned_seconds=0.0,
        processes=(reading,),
        memory=MemInfo(0, 0, 0, 0),
        groups=(Group(CGROUP_ROOT, 0, 0, 0, 0),),
        pressure={resource: Pressure(0.0, 0.0) for resource in RESOURCES},
        headroom=Headroom(0, 0, 0, 0),
        devices=(DeviceMemory("0"), DeviceMemory("1", absent_reason=NOT_SUPPORTED)),
        sources=dict.fromkeys(NAMES, ""),
    )


class _Still(Scanner):
    """Looks at nothing."""

    def snapshot(self, now: float) -> Snapshot:
        """The specimen."""
        return snapshot()


def registry() -> CollectorRegistry:
    """Every metric of residencyd, each with a series."""
    found = CollectorRegistry()
    lines = [(level, 0) for level in LEVELS]
    found.register(ResidencyCollector(_Still(Settings()), lines=lambda: lines))
    return found
