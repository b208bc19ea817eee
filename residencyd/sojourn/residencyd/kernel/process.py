"""Who a process is: identity by start time, users, and the totals that the kernel keeps for free.

A process id alone names nobody: it is reused. Identity is the pair of id and start time in clock ticks since boot,
field 22 of /proc/<pid>/stat.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sojourn.residencyd.kernel.errors import KernelError, NotDumpable, OtherUser, ParseFailed, PidReused, ProcessGone
from sojourn.residencyd.kernel.syscalls import read_bytes

PROC = Path("/proc")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Stat:
    """What /proc/<pid>/stat says.

    Attributes:
        pid: Process id.
        name: The command's name, at most 15 characters; may hold spaces and brackets.
        state: One letter; "Z" and "X" have no memory any more.
        parent: Process id of the parent.
        minor_faults: Page faults served from memory since the start.
        major_faults: Page faults that had to read from storage since the start.
        cpu_ticks: User and system time in clock ticks.
        start_ticks: Start in clock ticks since boot.
    """

    pid: int
    name: str
    state: str
    parent: int
    minor_faults: int
    major_faults: int
    cpu_ticks: int
    start_ticks: int

    @property
    def ended(self) -> bool:
        """Whether its memory has been given back already."""
        return self.state in "ZXx"


@dataclass(frozen=True)
class Status:
    """What /proc/<pid>/status says. A field that this kernel does not print is 0, or empty.

    Attributes:
        uids: Real, effective, saved and file-system user.
        gids: Likewise for groups.
        groups: Supplementary groups.
        effective_capabilities: Bit mask.
        rss_anonymous_bytes: Resident anonymous memory, written pages of private file mappings included.
        rss_file_bytes: Resident pages of regular files.
        rss_shared_bytes: Resident shared memory: memfd, /dev/shm, System V, shared anonymous, CUDA's pinned pages.
        swapped_bytes: Anonymous memory in swap.
        locked_bytes: mlock'ed address space.
        pinned_bytes: Address space pinned by a driver that accounts for it; CUDA does not.
        hugetlb_bytes: Resident pages of hugetlbfs, which the kernel leaves out of the figures above.
        namespace_pids: Its id in each pid namespace that it is in, outermost first.
    """

    uids: tuple[int, ...]
    gids: tuple[int, ...]
    groups: tuple[int, ...]
    effective_capabilities: int
    rss_anonymous_bytes: int
    rss_file_bytes: int
    rss_shared_bytes: int
    swapped_bytes: int
    locked_bytes: int
    pinned_bytes: int
    hugetlb_bytes: int
    namespace_pids: tuple[int, ...] = ()

    @property
    def rss_bytes(self) -> int:
        """All that is resident, hugetlbfs apart."""
        return self.rss_anonymous_bytes + self.rss_file_bytes + self.rss_shared_bytes


def parse_stat(text: bytes) -> Stat:
    """Reads the text of /proc/<pid>/stat.

    The name stands in brackets and may hold brackets and blanks itself, so it ends at the last closing one.

    Raises:
        ParseFailed: The text is cut or not of this form.
    """
    try:
        head, tail = text.rsplit(b")", 1)
        pid, name = head.split(b"(", 1)
        fields = tail.split()
        return Stat(
            pid=int(pid),
            name=name.decode(errors="replace"),
            state=fields[0].decode(),
            parent=int(fields[1]),
            minor_faults=int(fields[7]),
            major_faults=int(fields[9]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            start_ticks=int(fields[19]),
        )
    except (ValueError, IndexError) as error:
        raise ParseFailed("stat", text) from error


def parse_status(text: bytes) -> Status:
    """Reads the text of /proc/<pid>/status.

    Raises:
        ParseFailed: A line that is there holds no number.
    """
    lines = dict(line.split(b":", 1) for line in text.splitlines() if b":" in line)
    return Status(
        uids=_numbers(lines, b"Uid"),
        gids=_numbers(lines, b"Gid"),
        groups=_numbers(lines, b"Groups"),
        effective_capabilities=_first(_numbers(lines, b"CapEff", base=16)),
        rss_anonymous_bytes=_kilobytes(lines, b"RssAnon"),
        rss_file_bytes=_kilobytes(lines, b"RssFile"),
        rss_shared_bytes=_kilobytes(lines, b"RssShmem"),
        swapped_bytes=_kilobytes(lines, b"VmSwap"),
        locked_bytes=_kilobytes(lines, b"VmLck"),
        pinned_bytes=_kilobytes(lines, b"VmPin"),
        hugetlb_bytes=_kilobytes(lines, b"HugetlbPages"),
        namespace_pids=_numbers(lines, b"NSpid"),
    )


def _numbers(lines: dict[bytes, bytes], key: bytes, *, base: int = 10) -> tuple[int, ...]:
    try:
        return tuple(int(word, base) for word in lines.get(key, b"").split())
    except ValueError as error:
        raise ParseFailed("status", lines[key]) from error


def _first(numbers: tuple[int, ...]) -> int:
    return numbers[0] if numbers else 0


def _kilobytes(lines: dict[bytes, bytes], key: bytes) -> int:
    value = lines.get(key, b"").removesuffix(b"kB").strip()
    try:
        return int(value) * 1024 if value else 0
    except ValueError as error:
        raise ParseFailed("status", lines[key]) from error


def read_stat(pid: int, *, proc: Path = PROC) -> Stat:
    """Identity and counters of a process. World-readable.

    Raises:
        ProcessGone: It is not there.
        ParseFailed: The text is not of the documented form.
    """
    return parse_stat(asked(pid, lambda: read_bytes(proc / str(pid) / "stat"), proc=proc))


def read_status(pid: int, *, proc: Path = PROC) -> Status:
    """Users and totals of a process. World-readable.

    Raises:
        ProcessGone: It is not there.
        ParseFailed: The text is not of the documented form.
    """
    return parse_status(asked(pid, lambda: read_bytes(proc / str(pid) / "status"), proc=proc))


def require_same_process(pid: int, start_ticks: int, *, proc: Path = PROC) -> Stat:
    """The process of this id if it still is the one that started then.

    Args:
        pid: Process id.
        start_ticks: Start of the process that is meant, in clock ticks since boot.
        proc: Root of the proc file system.

    Raises:
        ProcessGone: Nobody has this id, or what is left of it is a zombie.
        PidReused: Somebody else has it now.
    """
    stat = read_stat(pid, proc=proc)
    if stat.ended:
        raise ProcessGone(pid)
    if stat.start_ticks != start_ticks:
        raise PidReused(pid, expected_ticks=start_ticks, found_ticks=stat.start_ticks)
    return stat


def children(pid: int, *, proc: Path = PROC) -> tuple[int, ...]:
    """All descendants of a process that exist now, sorted.

    Reads every process's stat: /proc/<pid>/task/*/children is not in every kernel.
    """
    parents = {stat.pid: stat.parent for stat in all_stats(proc=proc)}
    found: set[int] = set()
    edge = {pid}
    while edge:
        edge = {child for child, parent in parents.items() if parent in edge} - found
        found |= edge
    return tuple(sorted(found - {pid}))


def all_stats(*, proc: Path = PROC) -> list[Stat]:
    """Every process that is there; those that end meanwhile are left out."""
    stats = []
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            try:
                stats.append(read_stat(int(folder.name), proc=proc))
            except KernelError:  # ended between the listing and the reading
                continue
    return stats


def asked(pid: int, call: Callable[[], Result], *, proc: Path = PROC) -> Result:
    """The result of a call about a process, its refusals turned into typed errors.

    Raises:
        ProcessGone: There is no such process (any more), or it has no memory (any more).
        OtherUser: It belongs to another user.
        NotDumpable: It belongs to our user and still is not to be read.
        OSError: Anything else.
    """
    try:
        return call()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessGone(pid) from error
    except PermissionError as error:
        raise _refusal(pid, proc) from error


def _refusal(pid: int, proc: Path) -> KernelError:
    try:
        uids = parse_status(read_bytes(proc / str(pid) / "status")).uids
    except (OSError, ParseFailed):
        return ProcessGone(pid)
    own = os.geteuid()
    if any(uid != own for uid in uids[:3]):
        return OtherUser(pid, uid=next(uid for uid in uids if uid != own), own_uid=own)
    return NotDumpable(pid)
