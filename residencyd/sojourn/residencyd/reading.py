"""One process: its map's claims against its mappings, pages and files.

The order matters. Identity is checked first and last: a process id that belongs to the same process at both moments
belonged to it in between, so nothing that was read came from another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sojourn.residencyd import attribution
from sojourn.residencyd.attribution import Piece
from sojourn.residencyd.claims import ComponentMap, Range, Tier
from sojourn.residencyd.deep import Budget, Deep, look_deep
from sojourn.residencyd.errors import Sandboxed
from sojourn.residencyd.headroom import Cold, ColdPiece, cold_of, mapped_resident_bytes
from sojourn.residencyd.kernel import cgroups, mounts, process
from sojourn.residencyd.kernel.cgroups import CGROUP_ROOT, Group
from sojourn.residencyd.kernel.errors import KernelError, NotSupported, PidReused, ProcessGone
from sojourn.residencyd.kernel.maps import MapsQuery, MapsTable, read_maps
from sojourn.residencyd.kernel.pages import PageCounts
from sojourn.residencyd.kernel.process import Stat, Status
from sojourn.residencyd.kernel.syscalls import read_bytes
from sojourn.residencyd.kinds import is_sandbox
from sojourn.residencyd.map_shelf import ShelvedMap
from sojourn.residencyd.settings import Settings
from sojourn.residencyd.snapshots import ProcessReading
from sojourn.residencyd.sources import Sources

# Up to so many ranges are asked for one by one, at about 2 µs each. Beyond, it is cheaper to have all mappings
# printed and to parse them, at about 1 µs each.
QUERY_RANGES_LIMIT = 2000

# What /proc/version says in a gVisor sandbox, whatever the host runs. Maps are made up by the sandbox there.
_SANDBOX_VERSION = b"Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016"


@dataclass
class Memory:
    """What is kept of one process between looks.

    Attributes:
        budget: Of deep looks.
        deep: The last one; None before the first.
    """

    budget: Budget
    deep: Deep | None = None


def read_process(
    shelved: ShelvedMap, memory: Memory, *, now: float, settings: Settings, sources: Sources
) -> ProcessReading:
    """Reads the process that a map speaks of.

    Args:
        shelved: The map.
        memory: What is kept of this process; brought up to date.
        now: Unix time.
        settings: Where to look.
        sources: Notes failures of what the reading can do without.

    Raises:
        KernelError: The process cannot be read, or is another; `reason` says which.
        Sandboxed: Nothing can be told apart in it.
        OSError: Anything else that the kernel refuses.
    """
    proc, claim = settings.proc, shelved.claim
    _refuse_sandbox(proc)
    stat = find_process(claim, proc=proc, host_pids=settings.host_pids)
    status = process.read_status(stat.pid, proc=proc)
    if not shelved.file_systems:
        shelved.file_systems = sources.ask("process", lambda: mounts.read_mounts(stat.pid, proc=proc), otherwise={})
    pieces = look_up(stat.pid, shelved.ranges, shelved.file_systems, proc=proc)
    cold = frozenset(component.name for component in claim.components if component.is_cold)
    if not (memory.deep and memory.deep.covers(pieces, cold)) or memory.budget.allows(now):
        memory.deep = memory.budget.spend(
            lambda: look_deep(
                stat.pid,
                pieces,
                cold,
                status=status,
                file_systems=shelved.file_systems,
                now=now,
                proc=proc,
                before=memory.deep,
            ),
            now,
        )
    groups = read_target_groups(stat.pid, settings, sources)
    process.require_same_process(stat.pid, stat.start_ticks, proc=proc)
    if memory.deep.files.failed:
        sources.failed("files", memory.deep.files.failed)
    return conclude(shelved, stat, status, pieces, memory.deep, groups)


def conclude(
    shelved: ShelvedMap,
    stat: Stat,
    status: Status,
    pieces: Sequence[Piece],
    deep: Deep,
    groups: tuple[Group, ...],
) -> ProcessReading:
    """Sums up what was read of a process. Pure."""
    claim, counted = shelved.claim, list(zip(pieces, deep.counts, strict=True))
    return ProcessReading(
        pid=stat.pid,
        start_ticks=stat.start_ticks,
        claim=claim,
        components=attribution.attribute(claim.components, shelved.claimed_bytes, counted),
        cold=_cold(claim, counted, deep, status),
        cached=deep.files.cached,
        unattributed=attribution.unattributed(status, counted),
        mappings=len({piece.mapping.start for piece in pieces}),
        major_faults=stat.major_faults,
        mapped_resident_bytes=mapped_resident_bytes(counted),
        groups=groups,
        deep_seconds=deep.seconds,
    )


def _cold(
    claim: ComponentMap, counted: Sequence[tuple[Piece, PageCounts]], deep: Deep, status: Status
) -> Mapping[str, Cold]:
    found: dict[str, list[ColdPiece]] = {component.name: [] for component in claim.components}
    for piece, counts in counted:
        lot = piece.lot
        if lot.component in deep.cold and lot.file and lot.tier is Tier.HOST_MAPPED:
            exclusive = deep.exclusive_bytes.get(piece.start, 0)
            owned = deep.files.owned.get(lot.file)
            found[lot.component].append(ColdPiece(lot.component, counts.file_bytes, exclusive, owned))
    return {
        component.name: cold_of(component, found[component.name], locked_bytes=status.locked_bytes)
        for component in claim.components
    }


def look_up(
    pid: int, ranges: Sequence[Range], file_systems: Mapping[tuple[int, int], str], *, proc: Path
) -> tuple[Piece, ...]:
    """The mappings that ranges meet: by query where there are few, else from the whole text.

    Raises:
        KernelError: The process cannot be read.
        Sandboxed: Its memory is one file.
    """
    pieces = _by_query(pid, ranges, file_systems, proc=proc) if len(ranges) <= QUERY_RANGES_LIMIT else None
    if pieces is None:
        pieces = attribution.pieces_of(ranges, MapsTable(read_maps(pid, proc=proc)), file_systems)
    if is_sandbox({piece.mapping.name for piece in pieces}):
        raise Sandboxed(f"process {pid} is a sandbox: all its memory is one file, so nothing can be told apart")
    return pieces


def _by_query(
    pid: int, ranges: Sequence[Range], file_systems: Mapping[tuple[int, int], str], *, proc: Path
) -> tuple[Piece, ...] | None:
    """None where the kernel answers no queries."""
    try:
        with MapsQuery(pid, proc=proc) as query:
            return attribution.pieces_of(ranges, query, file_systems)
    except NotSupported:
        return None


def _refuse_sandbox(proc: Path) -> None:
    try:
        version = read_bytes(proc / "version")
    except OSError:
        return
    if version.startswith(_SANDBOX_VERSION):
        raise Sandboxed("this is a gVisor sandbox: its maps do not show what memory is")


def find_process(claim: ComponentMap, *, proc: Path, host_pids: bool) -> Stat:
    """The process that wrote a map.

    Args:
        claim: Its map.
        proc: Root of the proc file system.
        host_pids: The map's pid may be that of another pid namespace.

    Raises:
        ProcessGone, PidReused: It is no more.
    """
    try:
        return process.require_same_process(claim.pid, claim.start_ticks, proc=proc)
    except (ProcessGone, PidReused):
        if host_pids and (stat := _in_another_namespace(claim, proc)):
            return stat
        raise


def _in_another_namespace(claim: ComponentMap, proc: Path) -> Stat | None:
    for stat in process.all_stats(proc=proc):
        if stat.start_ticks == claim.start_ticks and not stat.ended:
            try:
                inner = process.read_status(stat.pid, proc=proc).namespace_pids
            except KernelError:
                continue
            if inner[-1:] == (claim.pid,):
                return stat
    return None


def read_target_groups(pid: int, settings: Settings, sources: Sources) -> tuple[Group, ...]:
    """The control groups of a process, as it sees them itself: a sidecar's own mount shows another container's."""
    own_view = settings.proc / str(pid) / "root" / CGROUP_ROOT.relative_to("/")
    root = settings.cgroup_root or (own_view if _is_dir(own_view) else CGROUP_ROOT)
    return sources.ask("cgroup", lambda: cgroups.read_groups(pid=pid, proc=settings.proc, root=root), otherwise=())


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False
