"""The dear part of a look: counting pages and the page cache, no more often than a share of one core allows.

How long it takes depends on the memory, not on us: 0.14 ms for 4 GiB of large folios, 1.3 ms a GiB of small pages. So
each deep look buys its successor a waiting time, and figures are carried over until then. Ranges that were not looked
at before never wait.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sojourn.residencyd.attribution import Piece
from sojourn.residencyd.files import FileReading, read_files
from sojourn.residencyd.kernel.pages import PageCounts, PageTable
from sojourn.residencyd.kernel.process import Status

Key = tuple[int, int]


@dataclass(frozen=True)
class Deep:
    """What counting found.

    Attributes:
        seconds: When, as Unix time.
        counts: By range of addresses.
        exclusive_bytes: Of cold mapped ranges that have file pages: those that nobody else maps.
        files: What the files behind them say.
    """

    seconds: float
    counts: Mapping[Key, PageCounts]
    exclusive_bytes: Mapping[Key, int]
    files: FileReading

    def covers(self, pieces: Iterable[Piece], cold: frozenset[str]) -> bool:
        """Whether these pieces, with these components cold, were all counted."""
        return all(
            _key(piece) in self.counts and (not _may_go(piece, cold) or self._knows_sharers(_key(piece)))
            for piece in pieces
        )

    def _knows_sharers(self, key: Key) -> bool:
        return key in self.exclusive_bytes or not self.counts[key].file_bytes

    def of(self, piece: Piece) -> PageCounts:
        """Pages of a piece that is covered."""
        return self.counts[_key(piece)]

    def exclusive_of(self, piece: Piece) -> int:
        """File pages of a piece that is covered and cold, which nobody else maps."""
        return self.exclusive_bytes.get(_key(piece), 0)


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

    Raises:
        ProcessGone, OtherUser, NotDumpable: The process cannot be read.
    """
    with PageTable(pid, proc=proc) as table:
        counts = {_key(piece): table.count(piece.start, piece.end) for piece in pieces}
        exclusive = {
            _key(piece): table.exclusive_file_bytes(piece.start, piece.end)
            for piece in pieces
            if _may_go(piece, cold) and counts[_key(piece)].file_bytes
        }
    return Deep(now, counts, exclusive, read_files(pid, status, pieces, file_systems, proc=proc))


def _may_go(piece: Piece, cold: frozenset[str]) -> bool:
    """Whether it matters who else maps its pages."""
    return piece.tier.is_droppable and piece.claimed.component in cold


def _key(piece: Piece) -> Key:
    return piece.start, piece.end


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
