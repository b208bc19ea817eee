"""The dear part of a look: counting pages and the page cache, no more often than a share of one core allows.

How long it takes depends on the memory, not on us: 0.14 ms for 4 GiB of large folios, 1.3 ms a GiB of small pages. So
each deep look buys its successor a waiting time, and figures are carried over until then. Ranges that were not looked
at before never wait.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sojourn.residencyd.attribution import Piece
from sojourn.residencyd.claims import Tier
from sojourn.residencyd.files import FileReading, read_files
from sojourn.residencyd.kernel.pages import Content, PageCounts, PageTable
from sojourn.residencyd.kernel.process import Status


@dataclass(frozen=True)
class Deep:
    """What counting found.

    Attributes:
        seconds: When, as Unix time.
        spans: The address range of each piece that was counted, in order.
        counts: The pages of each.
        cold: Components of which it was looked at who else maps their pages.
        exclusive_bytes: File pages that nobody else maps, by the start of a piece of those components.
        files: What the files behind them say.
    """

    seconds: float
    spans: tuple[tuple[int, int], ...]
    counts: Sequence[PageCounts]
    cold: frozenset[str]
    exclusive_bytes: Mapping[int, int]
    files: FileReading

    def covers(self, pieces: Sequence[Piece], cold: frozenset[str]) -> bool:
        """Whether these very pieces were counted, with no less cold."""
        return cold <= self.cold and _spans(pieces) == self.spans


def look_deep(
    pid: int,
    pieces: Sequence[Piece],
    cold: frozenset[str],
    *,
    status: Status,
    file_systems: Mapping[tuple[int, int], str],
    now: float,
    proc: Path,
) -> Deep:
    """Counts everything that pieces refer to.

    Args:
        pid: Process id.
        pieces: In order of address.
        cold: Components of which it matters who else maps their pages.
        status: Whose process it is.
        file_systems: Types by device number.
        now: Unix time.
        proc: Root of the proc file system.

    Raises:
        ProcessGone, OtherUser, NotDumpable: The process cannot be read.
    """
    with PageTable(pid, proc=proc) as table:
        counts = count_pieces(table, pieces)
        exclusive = {
            piece.start: table.exclusive_file_bytes(piece.start, piece.end)
            for piece, counted in zip(pieces, counts, strict=True)
            if counted.file_bytes and piece.lot.component in cold and piece.lot.tier is Tier.HOST_MAPPED
        }
    files = read_files(pid, status, pieces, file_systems, proc=proc)
    return Deep(now, _spans(pieces), counts, cold, exclusive, files)


def count_pieces(table: PageTable, pieces: Sequence[Piece]) -> list[PageCounts]:
    """The pages of each piece, each asked about no more than its mapping leaves open."""
    counts: list[PageCounts] = [PageCounts()] * len(pieces)
    for content in Content:
        alike = [place for place, piece in enumerate(pieces) if piece.lot.content is content]
        spans = [(pieces[place].start, pieces[place].end) for place in alike]
        for place, counted in zip(alike, table.count_all(spans, content), strict=True):
            counts[place] = counted
    return counts


def _spans(pieces: Sequence[Piece]) -> tuple[tuple[int, int], ...]:
    return tuple((piece.start, piece.end) for piece in pieces)


class Budget:
    """Lets something happen for a share of the time.

    Args:
        share: Seconds of work a second, above 0; 1 or more for no limit that matters.
        timer: Seconds, monotonic.
    """

    def __init__(self, share: float, timer: Callable[[], float]) -> None:
        self._share = share
        self._timer = timer
        self._next_at = 0.0

    def allows(self, now: float) -> bool:
        """Whether what was spent has been waited for."""
        return now >= self._next_at

    def spend(self, work: Callable[[], Deep], now: float) -> Deep:
        """Works, and books the time it took."""
        begun = self._timer()
        try:
            return work()
        finally:
            self._next_at = now + (self._timer() - begun) / self._share
