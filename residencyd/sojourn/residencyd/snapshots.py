"""What one look at everything found: frozen, and the only thing that metrics, gRPC and tables are made from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sojourn.residencyd.attribution import ComponentBytes, Unattributed
from sojourn.residencyd.claims import ComponentMap
from sojourn.residencyd.devices import DeviceMemory
from sojourn.residencyd.files import Cached
from sojourn.residencyd.headroom import Cold, Headroom
from sojourn.residencyd.kernel.cgroups import Group, tightest
from sojourn.residencyd.kernel.meminfo import MemInfo
from sojourn.residencyd.kernel.pressure import Pressure

# Why a process cannot be seen. All of them are exported at all times, so that an alert finds the series.
BLIND_REASONS = (
    "no_map",
    "map_torn",
    "map_schema",
    "other_uid",
    "not_dumpable",
    "gone",
    "pid_reused",
    "sandboxed",
    "unreadable",
)


@dataclass(frozen=True)
class ProcessReading:
    """One process.

    Attributes:
        pid: In our pid namespace; 0 where there is none.
        start_ticks: Its identity, with the pid.
        blind_reason: One of BLIND_REASONS; empty if it was read. All below is empty otherwise.
        blind_message: The same in a sentence.
        claim: The map that was read; None if none was.
        components: In order of name.
        cold: By component.
        cached: By component; components are left out whose files cannot be known.
        unattributed: Of nobody; None where the totals could not be read.
        mappings: That were looked at.
        major_faults: Since it began.
        mapped_resident_bytes: File pages of the components' mappings in memory.
        groups: Its control groups, leaf first.
        deep_seconds: When its pages were last counted, as Unix time.
    """

    pid: int = 0
    start_ticks: int = 0
    blind_reason: str = ""
    blind_message: str = ""
    claim: ComponentMap | None = None
    components: tuple[ComponentBytes, ...] = ()
    cold: Mapping[str, Cold] = field(default_factory=dict)
    cached: Mapping[str, Cached] = field(default_factory=dict)
    unattributed: Unattributed | None = None
    mappings: int = 0
    major_faults: int = 0
    mapped_resident_bytes: int = 0
    groups: tuple[Group, ...] = ()
    deep_seconds: float = 0.0

    @property
    def seen(self) -> bool:
        """Whether it was read."""
        return not self.blind_reason


@dataclass(frozen=True)
class Snapshot:
    """One look.

    Attributes:
        scanned_seconds: When, as Unix time.
        duration_seconds: How long it took.
        processes: One per map, and one for a place without.
        memory: Of the machine; None where it could not be read.
        groups: The control groups that bind the first process, leaf first.
        pressure: By resource; only those that the kernel keeps account of.
        headroom: None while no process was read.
        devices: Accelerators.
        sources: Every source that was asked: empty if it worked, else why not.
    """

    scanned_seconds: float
    processes: tuple[ProcessReading, ...]
    memory: MemInfo | None
    groups: tuple[Group, ...]
    pressure: Mapping[str, Pressure]
    headroom: Headroom | None
    devices: tuple[DeviceMemory, ...]
    sources: Mapping[str, str]
    duration_seconds: float = 0.0

    @property
    def seen(self) -> tuple[ProcessReading, ...]:
        """Processes that were read."""
        return tuple(process for process in self.processes if process.seen)

    @property
    def tightest(self) -> Group | None:
        """The control group with the least room; the process's own where none is capped; None without groups."""
        return tightest(self.groups) or (self.groups[0] if self.groups else None)
