"""The dear part of a look: counting pages and the page cache, no more often than a share of one core allows.

How long it takes depends on the memory, not on us: 0.14 ms for 4 GiB of large folios, 1.3 ms a GiB of small pages. So
each deep look buys its successor a waiting time, and figures are carried over until then. Ranges that were not looked
at before never wait.

Whether a page of a private file mapping was written stands in its descriptor, and a look at each of those takes longer
than all the rest. A mapping that may not be written to and was found to have no written page has none at the next
look either, unless its process changes its rights back and forth; so that is asked again at every tenth look only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sojourn.residencyd.attribution import Piece
from sojourn.residencyd.claims import Tier
from sojourn.residencyd.files import FileReading, read_files
from sojourn.residencyd.kernel.pages import Content, PageCounts, PageTable
from sojourn.residencyd.kernel.process import Status

# Looks that a mapping without written pages is believed to have none, the one that found it included.
UNWRITTEN_LOOKS = 10

# Start, end, inode and permissions of what was counted: another mapping at the same address is another shape.
Shape = tuple[int, int, int, str]


@dataclass(frozen=True)
class Deep:
    """What counting found.

    Attributes:
        seconds: When, as Unix time.
        shapes: Of each piece that was counted, in order.
        counts: The pages of each.
        cold: Components of which it was looked at who else maps their pages.
        exclusive_bytes: File pages that nobody else maps, by the start of a piece of those components.
        files: What the files behind them say.
        unwritten: Shapes of private, read-only file mappings that have no written page.
        looks: How many deep looks ago that was found, this one included.
    """

    seconds: float
    shapes: tuple[Shape, ...]
    counts: Sequence[PageCounts]
    cold: frozenset[str]
    exclusive_bytes: Mapping[int, int]
    files: FileReading
    unwritten: frozenset[Shape] = frozenset()
    looks: int = 1

    def covers(self, pieces: Sequence[Piece], cold: frozenset[str]) -> bool:
        """Whether these very pieces were counted, with no less cold."""
        return cold <= self.cold and shapes_of(pieces) == self.shapes


def look_deep(
    pid: int,
    pieces: Sequence[Piece],
    cold: frozenset[str],
    *,
    status: Status,
    file_systems: Mapping[tuple[int, int], str],
    now: float,
    proc: Path,
    before: Deep | None = None,
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
        before: The look before, if there was one.

    Raises:
        ProcessGone, OtherUser, NotDumpable: The process cannot be read.
    """
    believes = before is not None and before.looks < UNWRITTEN_LOOKS
    believed = before.unwritten if before and believes else frozenset()
    shapes = shapes_of(pieces)
    with PageTable(pid, proc=proc) as table:
        counts = count_pieces(table, pieces, shapes, believed)
        exclusive = {
            piece.start: table.exclusive_file_bytes(piece.start, piece.end)
            for piece, counted in zip(pieces, counts, strict=True)
            if counted.file_bytes and piece.lot.component in cold and piece.lot.tier is Tier.HOST_MAPPED
        }
    return Deep(
        seconds=now,
        shapes=shapes,
        counts=counts,
        cold=cold,
        exclusive_bytes=exclusive,
        files=read_files(pid, status, pieces, file_systems, proc=proc),
        unwritten=believed or unwritten_of(pieces, shapes, counts),
        looks=before.looks + 1 if before and believes else 1,
    )


def count_pieces(
    table: PageTable, pieces: Sequence[Piece], shapes: Sequence[Shape], believed: frozenset[Shape]
) -> list[PageCounts]:
    """The pages of each piece, each asked about no more than is open.

    Args:
        table: Where to count.
        pieces: In order of address.
        shapes: Of the pieces.
        believed: Shapes that need not be asked for written pages.
    """
    contents = [
        Content.FILE if shape in believed else piece.lot.content for piece, shape in zip(pieces, shapes, strict=True)
    ]
    counts: list[PageCounts] = [PageCounts()] * len(pieces)
    for content in Content:
        alike = [place for place, found in enumerate(contents) if found is content]
        spans = [(pieces[place].start, pieces[place].end) for place in alike]
        for place, counted in zip(alike, table.count_all(spans, content), strict=True):
            counts[place] = counted
    return counts


def unwritten_of(pieces: Sequence[Piece], shapes: Sequence[Shape], counts: Sequence[PageCounts]) -> frozenset[Shape]:
    """Shapes of private file mappings that may not be written to, and were not."""
    return frozenset(
        shape
        for piece, shape, counted in zip(pieces, shapes, counts, strict=True)
        if piece.lot.content is Content.EITHER
        and "w" not in piece.mapping.permissions
        and not counted.anonymous_bytes
        and not counted.swapped_bytes
    )


def shapes_of(pieces: Sequence[Piece]) -> tuple[Shape, ...]:
    """What tells pieces apart from others at the same addresses."""
    return tuple((start, end, mapping.inode, mapping.permissions) for _, mapping, start, end in pieces)


class Budget:
    """Lets something happen for a share of the time.

    Args:
        share: CPU seconds a second, above 0; 1 or more for no limit that matters.
        timer: CPU seconds of the calling thread.
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
