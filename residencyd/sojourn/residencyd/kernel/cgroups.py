"""How much memory the control groups leave, v1 and v2: the tightest of a process's cgroup and all above it.

Tightest means least room, not lowest limit: a parent with a larger limit may be nearly full of its other children.
The path in /proc/<pid>/cgroup is relative to a root that a container may not see: its mount shows the container's own
group as the root. So shorter and shorter suffixes of the path are tried; the first that exists is the leaf, or else
the mount itself.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sojourn.residencyd.kernel.errors import ParseFailed, SourceMissing
from sojourn.residencyd.kernel.process import PROC
from sojourn.residencyd.kernel.syscalls import read_bytes

CGROUP_ROOT = Path("/sys/fs/cgroup")

# v1 has no word for "no limit": it prints the largest multiple of the page size below 2^63.
UNLIMITED_FROM_BYTES = 1 << 62


@dataclass(frozen=True)
class Group:
    """Memory of one control group, its descendants included.

    Attributes:
        path: Its folder.
        limit_bytes: None if uncapped; 0 is a limit of nothing.
        usage_bytes: All memory charged to it, page cache too.
        reclaimable_bytes: Part of the usage that is file cache on the LRU lists: the kernel takes it back before it
            refuses. Shared memory and locked pages are not part of it.
        mapped_file_bytes: Part of the usage that is file cache mapped by some process.
    """

    path: Path
    limit_bytes: int | None
    usage_bytes: int
    reclaimable_bytes: int
    mapped_file_bytes: int

    @property
    def room_bytes(self) -> int | None:
        """What may still be charged to it: limit − usage + reclaimable file cache; None if uncapped."""
        if self.limit_bytes is None:
            return None
        return max(0, self.limit_bytes - self.usage_bytes + self.reclaimable_bytes)


def tightest(groups: tuple[Group, ...]) -> Group | None:
    """The capped group with the least room; None if none is capped."""
    capped = [(group.room_bytes, index) for index, group in enumerate(groups) if group.room_bytes is not None]
    return groups[min(capped)[1]] if capped else None


def available_bytes(machine_bytes: int, groups: tuple[Group, ...]) -> int:
    """What a process in these groups may still take.

    Args:
        machine_bytes: MemAvailable.
        groups: Its control groups, see `read_groups`.
    """
    rooms = [group.room_bytes for group in groups if group.room_bytes is not None]
    return max(0, min([machine_bytes, *rooms]))


def parse_membership(text: bytes) -> dict[int, PurePosixPath]:
    """Path by cgroup version out of /proc/<pid>/cgroup: 2 from its unified line, 1 from the line that lists memory."""
    paths = {}
    for line in text.decode(errors="surrogateescape").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths[2] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            paths[1] = PurePosixPath(path)
    return paths


def parse_limit(text: bytes) -> int | None:
    """The number in a limit file; None where it says that there is none.

    Raises:
        ParseFailed: Neither a number nor "max".
    """
    if text.strip() == b"max":
        return None
    limit = parse_number(text)
    return None if limit >= UNLIMITED_FROM_BYTES else limit


def parse_number(text: bytes) -> int:
    """The number in a file of one number.

    Raises:
        ParseFailed: It is none, or negative.
    """
    try:
        number = int(text)
    except ValueError as error:
        raise ParseFailed("cgroup", text) from error
    if number < 0:
        raise ParseFailed("cgroup", text)
    return number


def parse_memory_stat(text: bytes) -> dict[str, int]:
    """memory.stat as a table.

    Raises:
        ParseFailed: A value is no number.
    """
    try:
        words = text.decode("ascii", "replace").split()
        return dict(zip(words[0::2], map(int, words[1::2]), strict=True))
    except ValueError as error:
        raise ParseFailed("cgroup", text) from error


def reclaimable(stat: dict[str, int]) -> int:
    """File cache that the kernel takes back under pressure, from memory.stat.

    In v1 the plain figures leave children out, while the usage beside them does not: there the total_ ones count.
    """
    keys = ("inactive_file", "active_file")
    return sum(stat.get(f"total_{key}", stat.get(key, 0)) for key in keys)


def mapped_file(stat: dict[str, int]) -> int:
    """File cache mapped by some process, from memory.stat. What is shared memory among the mapped is taken off."""
    mapped = stat.get("total_mapped_file", stat.get("file_mapped", stat.get("mapped_file", 0)))
    return max(0, mapped - stat.get("total_shmem", stat.get("shmem", 0)))


@dataclass(frozen=True)
class _Files:
    """Names of a version's files."""

    limit: str
    usage: str


_FILES = {
    1: _Files(limit="memory.limit_in_bytes", usage="memory.usage_in_bytes"),
    2: _Files(limit="memory.max", usage="memory.current"),
}


def read_groups(*, pid: int | str = "self", proc: Path = PROC, root: Path = CGROUP_ROOT) -> tuple[Group, ...]:
    """The memory control groups that bind a process, leaf first, of whichever version governs memory there.

    Args:
        pid: Process id, or "self".
        proc: Root of the proc file system.
        root: Where the control groups are mounted.

    Returns:
        Empty where nothing groups memory: that machine is uncapped.

    Raises:
        SourceMissing: The process has no cgroup file.
        ParseFailed: A file holds no number.
    """
    try:
        paths = parse_membership(read_bytes(proc / str(pid) / "cgroup"))
    except (FileNotFoundError, ProcessLookupError) as error:
        raise SourceMissing("cgroup", proc / str(pid) / "cgroup") from error
    # Hybrid hosts mount both: memory is governed by v1 where v1 lists it.
    for version, mount in ((1, root / "memory"), (2, root), (2, root / "unified")):
        if version in paths and (groups := _read_upwards(mount, paths[version], _FILES[version])):
            return groups
    # Neither line leads anywhere: the mount that exists is this container's own group.
    return _read_upwards(root, PurePosixPath("/"), _FILES[2]) or _read_upwards(
        root / "memory", PurePosixPath("/"), _FILES[1]
    )


def leaf_folder(mount: Path, path: PurePosixPath, exists: Callable[[Path], bool] = Path.is_dir) -> Path:
    """The folder below `mount` that stands for `path`: the longest suffix that exists, or else the mount."""
    parts = [part for part in path.parts if part not in ("/", "..")]
    for first in range(len(parts)):
        if exists(folder := mount.joinpath(*parts[first:])):
            return folder
    return mount


def _read_upwards(mount: Path, path: PurePosixPath, files: _Files) -> tuple[Group, ...]:
    return tuple(group for folder in _upwards(mount, path) if (group := _read_group(folder, files)))


def _upwards(mount: Path, path: PurePosixPath) -> Iterator[Path]:
    folder = leaf_folder(mount, path)
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _read_group(folder: Path, files: _Files) -> Group | None:
    """None if the folder counts no memory, as the root of v2 does not, or vanished."""
    place = os.fspath(folder)  # joined as text: Path takes longer to join than the kernel to answer
    try:
        usage = parse_number(read_bytes(f"{place}/{files.usage}"))
        limit = parse_limit(read_bytes(f"{place}/{files.limit}"))
    except OSError:
        return None
    try:
        stat = parse_memory_stat(read_bytes(f"{place}/memory.stat"))
    except OSError:
        stat = {}
    return Group(folder, limit, usage, reclaimable(stat), mapped_file(stat))
