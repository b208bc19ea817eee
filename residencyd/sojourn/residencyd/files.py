"""The checkpoint files behind a process's mappings: whose they are, and what of them is in the page cache.

A file is opened through the process's own root (`/proc/<pid>/root`), for its path means something in its container
only, and is what it should be only if its inode is the mapped one. A deleted file cannot be opened at all, short of
a capability that a sidecar does not have; its mappings are still counted.
"""

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sojourn.residencyd.attribution import Lot, Piece
from sojourn.residencyd.claims import File, Tier
from sojourn.residencyd.kernel import page_cache
from sojourn.residencyd.kernel.errors import KernelError, NotOwner, NotSupported
from sojourn.residencyd.kernel.process import Status
from sojourn.residencyd.kernel.syscalls import PAGE_BYTES

_CAP_DAC_OVERRIDE, _CAP_FOWNER = 1 << 1, 1 << 3


@dataclass(frozen=True)
class Extent:
    """Bytes of a file that a component has mapped."""

    offset: int
    length: int


@dataclass(frozen=True)
class Cached:
    """Bytes of a component's files in the page cache.

    Attributes:
        size_bytes: How many.
        estimate: By sampling; at least one file refused the exact count.
    """

    size_bytes: int
    estimate: bool


@dataclass(frozen=True)
class MappedFile:
    """One file as the mappings show it.

    Attributes:
        file: Device and inode.
        name: As maps print it.
        file_system: Its type; empty where not known.
    """

    file: File
    name: str
    file_system: str


def extents_of(pieces: Iterable[Piece]) -> dict[tuple[str, File], tuple[Extent, ...]]:
    """Which parts of which file each component has mapped, neighbours joined, each byte once."""
    spans: dict[Lot, list[tuple[int, int]]] = {}
    for lot, mapping, start, end in pieces:
        if lot.tier is Tier.HOST_MAPPED:
            ahead = mapping.offset - mapping.start
            spans.setdefault(lot, []).append((start + ahead, end + ahead))
    found: dict[tuple[str, File], list[tuple[int, int]]] = {}
    for lot, parts in spans.items():
        if lot.file:
            found.setdefault((lot.component, lot.file), []).extend(parts)
    return {key: tuple(_joined(sorted(parts))) for key, parts in found.items()}


def _joined(spans: Sequence[tuple[int, int]]) -> Iterator[Extent]:
    start, end = spans[0]
    for low, high in spans[1:]:
        if low > end:
            yield Extent(start, end - start)
            start = low
        end = max(end, high)
    yield Extent(start, end - start)


def files_of(pieces: Iterable[Piece], file_systems: Mapping[tuple[int, int], str]) -> tuple[MappedFile, ...]:
    """The files that pieces are mapped from."""
    mapped = {piece.lot: piece.mapping for piece in pieces if piece.lot.tier is Tier.HOST_MAPPED}
    names = {lot.file: mapping.name for lot, mapping in mapped.items() if lot.file}
    return tuple(MappedFile(file, name, file_systems.get(file.device, "")) for file, name in names.items())


@contextlib.contextmanager
def opened(pid: int, mapped: MappedFile, *, proc: Path) -> Iterator[int]:
    """A descriptor of the very file that a process has mapped.

    Raises:
        NotSupported: It is deleted, replaced by another, or not to be opened.
    """
    path = os.fspath(proc / str(pid) / "root") + mapped.name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", None) or 0
        raise NotSupported("files", why=f"cannot open {mapped.name}", number=number) from error
    try:
        found = os.fstat(descriptor)
        # Device numbers differ between stat and maps on layered file systems, inode numbers do not.
        if found.st_ino != mapped.file.inode or not stat.S_ISREG(found.st_mode):
            raise NotSupported("files", why=f"{mapped.name} is another file than the one mapped")
        yield descriptor
    finally:
        os.close(descriptor)


def owned_by(status: Status, file: os.stat_result) -> bool:
    """Whether a process's page-out of this file does anything: it owns it, or may write it."""
    return page_cache.is_own(
        file,
        uid=status.uids[-1] if status.uids else -1,
        gids={*status.gids[-1:], *status.groups},
        privileged=bool(status.effective_capabilities & (_CAP_FOWNER | _CAP_DAC_OVERRIDE)),
    )


def cached(descriptor: int, extents: Iterable[Extent], *, file_system: str) -> Cached:
    """What of a file's extents is in the page cache: exactly if the kernel tells, else by sampling.

    Raises:
        NotSupported: Neither way works on this file.
    """
    size = os.fstat(descriptor).st_size
    within = [Extent(e.offset, min(e.length, size - e.offset)) for e in extents if e.offset < size]
    if file_system.startswith("overlay"):
        total = sum(page_cache.mincore(descriptor, offset=e.offset, length=e.length) for e in within)
        return Cached(total, estimate=False)
    try:
        return Cached(sum(_counted(descriptor, extent) for extent in within), estimate=False)
    except NotOwner:
        estimates = page_cache.sample_all(descriptor, [(extent.offset, extent.length) for extent in within])
        return Cached(sum(estimate.cached_bytes for estimate in estimates), estimate=True)


def _counted(descriptor: int, extent: Extent) -> int:
    length = -(-extent.length // PAGE_BYTES) * PAGE_BYTES
    return page_cache.cachestat(descriptor, offset=extent.offset, length=length).cached_bytes


@dataclass(frozen=True)
class FileReading:
    """What the files of one process say.

    Attributes:
        cached: By component; components are left out whose files cannot be known.
        owned: By file, whether the process may drop its pages; files are left out that cannot be looked at.
        failed: Why, for the last one left out; None if none was.
    """

    cached: Mapping[str, Cached]
    owned: Mapping[File, bool]
    failed: Exception | None = None


def read_files(
    pid: int, status: Status, pieces: Sequence[Piece], file_systems: Mapping[tuple[int, int], str], *, proc: Path
) -> FileReading:
    """Looks at every checkpoint file that pieces are mapped from, each in its own right."""
    extents = extents_of(pieces)
    found: dict[tuple[str, File], Cached] = {}
    owned: dict[File, bool] = {}
    failed: Exception | None = None
    for mapped in files_of(pieces, file_systems):
        try:
            with opened(pid, mapped, proc=proc) as descriptor:
                owned[mapped.file] = owned_by(status, os.fstat(descriptor))
                for key in [key for key in extents if key[1] == mapped.file]:
                    found[key] = cached(descriptor, extents[key], file_system=mapped.file_system)
        except (KernelError, OSError) as error:
            failed = error
    components = {component for component, _ in extents}
    return FileReading({name: total for name in components if (total := _total(name, extents, found))}, owned, failed)


def _total(name: str, wanted: Iterable[tuple[str, File]], found: Mapping[tuple[str, File], Cached]) -> Cached | None:
    """Of all files of a component; None if one of them is not known, for half an answer would look like eviction."""
    keys = [key for key in wanted if key[0] == name]
    if not all(key in found for key in keys):
        return None
    parts = [found[key] for key in keys]
    return Cached(sum(part.size_bytes for part in parts), any(part.estimate for part in parts))
