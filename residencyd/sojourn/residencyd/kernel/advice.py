"""Page advice to the kernel on this process's own memory: bring it in, or let it go.

A return of 0 says that the kernel took the advice, not that anything happened. MADV_PAGEOUT does nothing, and says
nothing, for a file that the caller neither owns nor may write, and for pages that another process maps too (both
measured on Linux 6.18); MADV_COLD only moves pages to the head of the queue for reclaim. So a result counts what was
*accepted*; what was done is for `pages.PageTable` to say, before and after.
"""

import errno
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from sojourn.residencyd.kernel import syscalls
from sojourn.residencyd.kernel.syscalls import PAGE_BYTES

# One MADV_WILLNEED call reads no further than the device's read-ahead limit allows, in practice a few MiB; larger
# ranges are silently cut. 8 MiB is the chunk that still came in whole.
WILLNEED_CHUNK_BYTES = 8 << 20


class Advice(IntEnum):
    """What to ask of the kernel; the values are madvise(2)'s."""

    # Start reading the file range, in the background.
    WILLNEED = mmap.MADV_WILLNEED
    # First in line when memory is short; nothing happens until then.
    COLD = 20
    # Give the pages back now.
    PAGEOUT = 21
    # Read and map the range now, in the foreground (Linux 5.14).
    POPULATE_READ = 22


@dataclass(frozen=True)
class Advised:
    """What came of one piece of advice.

    Attributes:
        advice: Which.
        requested_bytes: Whole pages of the range.
        accepted_bytes: Of these, bytes in chunks for which the kernel returned 0.
        error: errno of the first chunk refused, 0 if none was.
    """

    advice: Advice
    requested_bytes: int
    accepted_bytes: int
    error: int = 0

    @property
    def reason(self) -> str:
        """Why the kernel refused, as one word for labels; empty if it did not."""
        if not self.error:
            return ""
        return _REASONS.get(self.error, errno.errorcode.get(self.error, "other").lower())


_REASONS = {
    errno.EINVAL: "locked",  # mlock'ed or hugetlb pages; or advice that this kernel does not know
    errno.ENOMEM: "not_mapped",
    errno.EFAULT: "truncated",  # POPULATE_READ beyond the end of the file
    errno.EIO: "io_error",
}


def inner_pages(address: int, length_bytes: int, *, page_bytes: int = PAGE_BYTES) -> tuple[int, int]:
    """Start and length of the whole pages within a range: what may be given away without a neighbour's bytes."""
    start = -(-address // page_bytes) * page_bytes
    return start, max(0, (address + length_bytes) // page_bytes * page_bytes - start)


def outer_pages(address: int, length_bytes: int, *, page_bytes: int = PAGE_BYTES) -> tuple[int, int]:
    """Start and length of the pages that cover a range: what has to be brought in to have it."""
    if length_bytes <= 0:
        return address // page_bytes * page_bytes, 0
    start = address // page_bytes * page_bytes
    return start, -(-(address + length_bytes) // page_bytes) * page_bytes - start


def chunks(start: int, length_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Cuts a range into (start, length) of at most chunk_bytes."""
    for offset in range(0, length_bytes, chunk_bytes):
        yield start + offset, min(chunk_bytes, length_bytes - offset)


def will_need(address: int, length_bytes: int) -> Advised:
    """Starts reading a mapped file range in the background, in chunks of at most 8 MiB, covering pages."""
    return _advise(Advice.WILLNEED, *outer_pages(address, length_bytes), chunk_bytes=WILLNEED_CHUNK_BYTES)


def populate_read(address: int, length_bytes: int, *, chunk_bytes: int = WILLNEED_CHUNK_BYTES) -> Advised:
    """Reads and maps a range now, covering pages. Blocks for the disk; a large range is cut into chunks."""
    return _advise(Advice.POPULATE_READ, *outer_pages(address, length_bytes), chunk_bytes=chunk_bytes)


def cold(address: int, length_bytes: int) -> Advised:
    """Puts the whole pages within a range first in line for reclaim. Nothing is dropped until memory is short."""
    return _advise(Advice.COLD, *inner_pages(address, length_bytes))


def page_out(address: int, length_bytes: int) -> Advised:
    """Asks for the whole pages within a range back now; see the module's note on what that is worth."""
    return _advise(Advice.PAGEOUT, *inner_pages(address, length_bytes))


def _advise(advice: Advice, start: int, length_bytes: int, *, chunk_bytes: int = 1 << 62) -> Advised:
    accepted = error = 0
    for chunk_start, chunk_length in chunks(start, length_bytes, chunk_bytes):
        try:
            syscalls.madvise(chunk_start, chunk_length, advice)
            accepted += chunk_length
        except OSError as refusal:
            error = error or refusal.errno or errno.EINVAL
    return Advised(advice, length_bytes, accepted, error)
