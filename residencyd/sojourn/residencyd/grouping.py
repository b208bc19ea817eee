"""Any process without a component map: its memory by mapped file. Pure, but for `read_groups`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sojourn.residencyd.claims import File, Tier
from sojourn.residencyd.errors import Sandboxed
from sojourn.residencyd.kernel import maps, mounts, process
from sojourn.residencyd.kernel.maps import DELETED, read_maps
from sojourn.residencyd.kernel.pages import PageCounts, PageTable
from sojourn.residencyd.kinds import Kind, is_sandbox, kind_of, tier_of, uses_driver

ANONYMOUS_NAME = "[anonymous]"


@dataclass(frozen=True)
class FileGroup:
    """All mappings of one file, or of one name where there is no file.

    Attributes:
        name: The file's, or a word in brackets.
        tier: What the kernel can do with it.
        mappings: How many there are.
        mapped_bytes: Their size.
        resident_bytes: Of these, in memory.
        written_bytes: Of those, the process's own: anonymous, or written pages of a private file mapping.
        swapped_bytes: In swap.
        deleted: The file has no name any more.
    """

    name: str
    tier: Tier
    mappings: int
    mapped_bytes: int
    resident_bytes: int
    written_bytes: int
    swapped_bytes: int
    deleted: bool = False


@dataclass(frozen=True)
class ProcessGroups:
    """One process.

    Attributes:
        pid: Its id.
        name: Its command.
        rss_bytes: By the kernel's own account.
        groups: Most resident first.
    """

    pid: int
    name: str
    rss_bytes: int
    groups: tuple[FileGroup, ...]


@dataclass(frozen=True)
class _Key:
    """What makes mappings one group. A name is no part of it where there is a file."""

    file: File | None
    name: str
    tier: Tier


def group(
    counted: Iterable[tuple[maps.Mapping, PageCounts]],
    file_systems: Mapping[tuple[int, int], str],
    *,
    live: frozenset[File] = frozenset(),
) -> tuple[FileGroup, ...]:
    """Groups mappings, most resident first.

    Args:
        counted: Every mapping and its pages.
        file_systems: Types by device number.
        live: Files that have a name still, of those that look deleted.
    """
    counted = list(counted)
    # A process that drives an accelerator has its shared anonymous memory pinned.
    claimed = Tier.HOST_PINNED if uses_driver(mapping.name for mapping, _ in counted) else None
    found: dict[_Key, list[tuple[maps.Mapping, PageCounts]]] = {}
    for mapping, counts in counted:
        found.setdefault(_key(mapping, file_systems, claimed), []).append((mapping, counts))
    groups = (_group(key, members, live) for key, members in found.items())
    return tuple(sorted(groups, key=lambda made: (-made.resident_bytes, -made.mapped_bytes, made.name)))


def _key(mapping: maps.Mapping, file_systems: Mapping[tuple[int, int], str], claimed: Tier | None) -> _Key:
    kind = kind_of(mapping, file_systems)
    # A file of tmpfs or a memfd has been put there by somebody: only nameless shared memory is a driver's.
    nameless = kind is Kind.ANONYMOUS or mapping.name.startswith("/dev/zero")
    tier = tier_of(kind, mapping, claimed if nameless else None)
    file = File(mapping.device, mapping.inode) if mapping.inode else None
    return _Key(file, "" if file else mapping.name or ANONYMOUS_NAME, tier)


def _group(key: _Key, members: list[tuple[maps.Mapping, PageCounts]], live: frozenset[File]) -> FileGroup:
    name = key.name or members[0][0].name
    counts = sum((pages for _, pages in members), PageCounts())
    mapped = sum(mapping.size_bytes for mapping, _ in members)
    driver = key.tier is Tier.HOST_PINNED and not counts.resident_bytes
    return FileGroup(
        name=name,
        tier=key.tier,
        mappings=len(members),
        mapped_bytes=mapped,
        resident_bytes=mapped if driver and name.startswith("/dev/") else counts.resident_bytes,
        written_bytes=counts.anonymous_bytes,
        swapped_bytes=counts.swapped_bytes,
        deleted=name.endswith(DELETED) and key.file not in live,
    )


def read_groups(pid: int, *, proc: Path = process.PROC) -> ProcessGroups:
    """Reads any process of one's own. Walks all its page tables: about 1.3 ms a GiB of small pages.

    Raises:
        KernelError: It cannot be read.
        Sandboxed: Nothing can be told apart in it.
    """
    stat = process.read_stat(pid, proc=proc)
    process.require_same_process(pid, stat.start_ticks, proc=proc)
    mappings = read_maps(pid, proc=proc)
    if is_sandbox(mapping.name for mapping in mappings):
        raise Sandboxed(f"process {pid} is a sandbox: all its memory is one file, so nothing can be told apart")
    with PageTable(pid, proc=proc) as table:
        counts = table.count_all([(mapping.start, mapping.end) for mapping in mappings])
    file_systems = mounts.read_mounts(pid, proc=proc)
    status = process.read_status(pid, proc=proc)
    process.require_same_process(pid, stat.start_ticks, proc=proc)
    live = frozenset(_still_named(pid, mappings, proc))
    return ProcessGroups(
        pid, stat.name, status.rss_bytes, group(zip(mappings, counts, strict=True), file_systems, live=live)
    )


def _still_named(pid: int, mappings: Iterable[maps.Mapping], proc: Path) -> Iterable[File]:
    """Files that look deleted and are not: their real name ends so."""
    for mapping in mappings:
        if mapping.looks_deleted and mapping.inode:
            try:
                inode = Path(f"{proc}/{pid}/root{mapping.name}").stat().st_ino
            except (OSError, ValueError):
                continue
            if inode == mapping.inode:
                yield File(mapping.device, mapping.inode)
