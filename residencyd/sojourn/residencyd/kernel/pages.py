"""How much of an address range is in memory: the page table of another process, asked without stalling it.

PAGEMAP_SCAN (Linux 6.7) walks in the kernel and returns ranges: 0.14 ms for 4 GiB of large folios, about 1.3 ms a GiB
of 4 KiB pages. Before, and where the ioctl is refused, the same file gives 8 bytes a page: about 4 ms per 4 GiB plus
the counting. Both need the right to read the process (the same uid) and no capability.

The sums equal the kernel's own Rss to the page. Two things are told apart that a page count would hide: the zero
page, which a read of untouched anonymous memory maps and which is nobody's memory; and pages of a private file
mapping that were written, which are anonymous.
"""

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from sojourn.residencyd.kernel.errors import NotSupported, ProcessGone
from sojourn.residencyd.kernel.process import PROC, asked
from sojourn.residencyd.kernel.syscalls import PAGE_BYTES, iowr


# A tuple, for one is made per range of a look: a frozen dataclass takes three times as long.
class PageCounts(NamedTuple):
    """Bytes of an address range by where they are.

    Attributes:
        file_bytes: In memory, backed by a file or shared memory.
        anonymous_bytes: In memory, the process's own.
        swapped_bytes: In swap.
        huge_bytes: Part of the first two that a huge page maps; 0 where only pagemap could be read.
    """

    file_bytes: int = 0
    anonymous_bytes: int = 0
    swapped_bytes: int = 0
    huge_bytes: int = 0

    @property
    def resident_bytes(self) -> int:
        """All that is in memory."""
        return self.file_bytes + self.anonymous_bytes

    def __add__(self, other: tuple[int, ...]) -> "PageCounts":  # type: ignore[override]
        return PageCounts(*map(int.__add__, self, other))


# PAGE_IS_* of linux/fs.h.
FILE, PRESENT, SWAPPED, ZERO, HUGE = 1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 6

# Places of PageCounts, and one for what counts nowhere.
_FILE, _ANONYMOUS, _SWAPPED, _HUGE, _NOWHERE = range(5)


def _place(flags: int) -> int:
    """Where pages of a category are counted."""
    if flags & SWAPPED:
        return _SWAPPED
    if flags & ZERO or not flags & PRESENT:
        return _NOWHERE
    return _FILE if flags & FILE else _ANONYMOUS


_PLACES = tuple(map(_place, range(1 + (FILE | PRESENT | SWAPPED | ZERO))))


class Content(Enum):
    """What pages of a mapping can be, as far as the mapping itself tells."""

    # Of a file, or written and so anonymous: a private mapping of a file.
    EITHER = "either"
    # Of a file or shared memory: a shared mapping.
    FILE = "file"
    # The process's own: a mapping without a file.
    ANONYMOUS = "anonymous"


# Starts, ends and flags of page ranges, in order.
Regions = tuple[Sequence[int], Sequence[int], Sequence[int]]

# struct pm_scan_arg of linux/fs.h: size, flags, start, end, walk_end, vec, vec_len, max_pages, inverted, mask,
# any of, returned.
_SCAN = struct.Struct("=12Q")
_SCAN_REQUEST = iowr(16, _SCAN.size)
# No more than the kernel's own buffer holds. With room for more it fills several times in one call and leaves a stale
# walk_end behind (seen on 6.18): whoever goes on from there counts up to 2 MiB of pages twice.
_REGIONS = 512
_RETURNED = PRESENT | SWAPPED | ZERO | HUGE
# Checked for by the kernel: an address above is refused as a whole.
_HIGHEST_ADDRESS = (1 << 47) - PAGE_BYTES if ctypes.sizeof(ctypes.c_void_p) == 8 else (1 << 32) - PAGE_BYTES

# The top byte of a pagemap entry: present, swapped, file or shared, mapped by this process alone.
_TOP_PRESENT, _TOP_SWAPPED, _TOP_FILE, _TOP_EXCLUSIVE = 0x80, 0x40, 0x20, 0x01
_ENTRIES_PER_READ = 1 << 16


def _bytes_without(*, bits: int, value: int) -> bytes:
    """All top bytes whose `bits` are not `value`: what `bytes.translate` has to drop to count the others."""
    return bytes(top for top in range(256) if top & bits != value)


_NOT_FILE = _bytes_without(bits=_TOP_PRESENT | _TOP_FILE, value=_TOP_PRESENT | _TOP_FILE)
_NOT_ANONYMOUS = _bytes_without(bits=_TOP_PRESENT | _TOP_FILE, value=_TOP_PRESENT)
_NOT_SWAPPED = _bytes_without(bits=_TOP_PRESENT | _TOP_SWAPPED, value=_TOP_SWAPPED)
_NOT_EXCLUSIVE_FILE = _bytes_without(
    bits=_TOP_PRESENT | _TOP_FILE | _TOP_EXCLUSIVE, value=_TOP_PRESENT | _TOP_FILE | _TOP_EXCLUSIVE
)


# Wanted ranges with no more than this between them are walked as one: a call takes as long as walking about 4 MiB of
# small pages, and a hole takes nothing.
SPAN_GAP_BYTES = 4 << 20


def spans_of(wanted: Sequence[tuple[int, int]], *, gap_bytes: int = SPAN_GAP_BYTES) -> Iterator[slice]:
    """Cuts ordered ranges into runs of neighbours: slices of `wanted`."""
    first = 0
    for index in range(1, len(wanted) + 1):
        if index == len(wanted) or wanted[index][0] - wanted[index - 1][1] > gap_bytes:
            if index > first:
                yield slice(first, index)
            first = index


def count_within(
    wanted: Sequence[tuple[int, int]], found: Regions, content: Content = Content.EITHER
) -> list[PageCounts]:
    """Sums up, for each of some ordered ranges, what of the found regions lies in it.

    Args:
        wanted: Starts and ends, in order, none overlapping.
        found: Likewise, with the flags of each. The zero page counts nowhere.
        content: What present pages are, where their flags were not asked for it.
    """
    starts, ends, flags = found
    implied = FILE if content is Content.FILE else 0
    counts, index, last = [], 0, len(starts)
    for start, end in wanted:
        while index < last and ends[index] <= start:
            index += 1
        sums = [0, 0, 0, 0, 0]
        while index < last and starts[index] < end:
            low, high, flag = starts[index], ends[index], flags[index] | implied
            size = (end if high > end else high) - (start if low < start else low)
            place = _PLACES[flag & (FILE | PRESENT | SWAPPED | ZERO)]
            sums[place] += size
            if flag & HUGE and place < _SWAPPED:
                sums[_HUGE] += size
            if high > end:
                break
            index += 1
        counts.append(PageCounts(*sums[:_NOWHERE]))
    return counts


def count_entries(entries: bytes, *, page_bytes: int = PAGE_BYTES) -> PageCounts:
    """Sums pagemap entries up, 8 bytes each, little endian.

    An entry does not tell the zero page from the process's own, so never-written memory that was read counts as
    anonymous here; PAGEMAP_SCAN knows better.
    """
    tops = entries[7::8]
    return PageCounts(
        file_bytes=page_bytes * len(tops.translate(None, _NOT_FILE)),
        anonymous_bytes=page_bytes * len(tops.translate(None, _NOT_ANONYMOUS)),
        swapped_bytes=page_bytes * len(tops.translate(None, _NOT_SWAPPED)),
    )


def count_exclusive(entries: bytes, *, page_bytes: int = PAGE_BYTES) -> int:
    """Bytes of file pages that no other mapping of any process holds, from pagemap entries."""
    return page_bytes * len(entries[7::8].translate(None, _NOT_EXCLUSIVE_FILE))


class PageTable:
    """The page table of a process. A context manager.

    Args:
        pid: Process id.
        proc: Root of the proc file system.
        scan: False to read pagemap entries even where PAGEMAP_SCAN works.

    Raises:
        ProcessGone, OtherUser, NotDumpable: The process cannot be read.
    """

    def __init__(self, pid: int, *, proc: Path = PROC, scan: bool = True) -> None:
        self.pid = pid
        path = proc / str(pid) / "pagemap"
        self._descriptor = asked(pid, lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC), proc=proc)
        self._argument = bytearray(_SCAN.size)
        self._regions = (ctypes.c_uint64 * (3 * _REGIONS))()
        self._regions_address = ctypes.addressof(self._regions)
        self.scans = scan

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the file descriptor back."""
        os.close(self._descriptor)

    def count(self, start: int, end: int, content: Content = Content.EITHER) -> PageCounts:
        """Bytes in [start, end) by where they are. Both are widened to whole pages.

        Args:
            start: First address.
            end: Address after the last.
            content: What is mapped there, see `count_all`.

        Raises:
            ProcessGone: It has ended meanwhile.
        """
        return self.count_all([_page_aligned(start, end)], content)[0]

    def count_all(self, wanted: Sequence[tuple[int, int]], content: Content = Content.EITHER) -> list[PageCounts]:
        """Bytes of each range by where they are, in as few calls as it takes.

        Args:
            wanted: Starts and ends on pages, in order, none overlapping.
            content: What is mapped in all of them. Knowing it saves the kernel a look at each page's descriptor,
                which is five sixths of the time where pages are small and scattered (measured on 6.18).

        Raises:
            ProcessGone: It has ended meanwhile.
        """
        if self.scans:
            try:
                return [counts for run in spans_of(wanted) for counts in self._count_span(wanted[run], content)]
            except NotSupported:
                self.scans = False  # an older kernel; ask no more
        return [sum(map(count_entries, self._entries(start, end)), PageCounts()) for start, end in wanted]

    def _count_span(self, wanted: Sequence[tuple[int, int]], content: Content) -> list[PageCounts]:
        regions: tuple[list[int], list[int], list[int]] = ([], [], [])
        start, end = wanted[0][0], min(wanted[-1][1], _HIGHEST_ADDRESS)
        while start < end:
            found, start = self._scan(start, end, content)
            values = self._regions[: 3 * found]
            for part, column in zip(regions, (values[0::3], values[1::3], values[2::3]), strict=True):
                part.extend(column)
        return count_within(wanted, regions, content)

    def exclusive_file_bytes(self, start: int, end: int) -> int:
        """Bytes of file pages in [start, end) that no other mapping holds: what a page-out can really drop.

        Reads 8 bytes a page, so about 1 ms a GiB.

        Raises:
            ProcessGone: It has ended meanwhile.
        """
        return sum(count_exclusive(entries) for entries in self._entries(*_page_aligned(start, end)))

    def _scan(self, start: int, end: int, content: Content = Content.EITHER) -> tuple[int, int]:
        """One ioctl; how many regions it filled in, and where the next one goes on."""
        _SCAN.pack_into(
            self._argument,
            0,
            *(_SCAN.size, 0, start, end, 0, self._regions_address, _REGIONS, 0),
            *(0, 0, PRESENT | SWAPPED, _RETURNED | (FILE if content is Content.EITHER else 0)),
        )
        try:
            found = fcntl.ioctl(self._descriptor, _SCAN_REQUEST, self._argument)
        except OSError as error:
            if error.errno == errno.ESRCH:
                raise ProcessGone(self.pid) from error
            raise NotSupported("pagemap_scan", why="needs Linux 6.7", number=error.errno or 0) from error
        walked_to: int = _SCAN.unpack(self._argument)[4]
        # A walk that stands still would never end: trust it only if it moved.
        return found, walked_to if walked_to > start else end

    def _entries(self, start: int, end: int) -> Iterator[bytes]:
        offset, stop = start // PAGE_BYTES * 8, min(end, _HIGHEST_ADDRESS) // PAGE_BYTES * 8
        while offset < stop:
            try:
                entries = os.pread(self._descriptor, min(stop - offset, 8 * _ENTRIES_PER_READ), offset)
            except OSError as error:
                if error.errno in (errno.ESRCH, errno.EIO):
                    raise ProcessGone(self.pid) from error
                raise
            if not entries:  # never zero bytes in silence: the address space behind the descriptor is gone
                raise ProcessGone(self.pid)
            yield entries
            offset += len(entries)


def _page_aligned(start: int, end: int) -> tuple[int, int]:
    return start // PAGE_BYTES * PAGE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES
