"""What a pass over mapped layers keeps in memory and what it streams. Pure.

Whatever is kept, a pass reads what is not; so as much is kept as leaves room for what is in use and on its way.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sojourn.inference.offload.settings import ResidentPolicy
from sojourn.inference.offload.spans import Span, divided, size_of


@dataclass(frozen=True, kw_only=True)
class PassPlan:
    """What a pass keeps and what it streams.

    Attributes:
        kept_bytes: Stay in memory from pass to pass.
        streamed: Spans to give back after use, by index of the piece; empty for pieces that stay.
        window_bytes: Left free for the streamed pieces that are in use or on their way.
    """

    kept_bytes: int
    streamed: tuple[tuple[Span, ...], ...]
    window_bytes: int = 0

    @property
    def streamed_bytes(self) -> int:
        """What every pass reads again."""
        return sum(map(size_of, self.streamed))


def plan_pass(
    pieces: Sequence[tuple[Span, ...]],
    order: Sequence[int],
    *,
    room_bytes: int,
    read_ahead_bytes: int,
    policy: ResidentPolicy = ResidentPolicy.STRIDED,
    buffered: bool = False,
) -> PassPlan:
    """Keeps as many bytes as leave room for the window; everything if everything fits.

    Leading keeps a prefix, so that all the reading comes at the end of a pass. Strided spreads the streamed pieces
    evenly, so that the disk has the computation of the kept ones to hide behind; and it streams small ones rather than
    large ones, since the window must hold the largest of them, at the cost of what is kept.

    Args:
        pieces: Spans of each piece.
        order: Indices of the pieces in the order of their use; those that are missing stream first.
        room_bytes: What may be in memory of these pieces.
        read_ahead_bytes: On its way besides the piece in use.
        policy: Which ones are kept.
        buffered: Whether what streams goes into buffers of one size.
    """

    def window(largest: int) -> int:
        return buffers(largest, read_ahead_bytes) * largest if buffered else read_ahead_bytes + largest

    sizes = [size_of(spans) for spans in pieces]
    total = sum(sizes)
    if total <= room_bytes:
        return PassPlan(kept_bytes=total, streamed=((),) * len(pieces))
    used = list(dict.fromkeys(order))
    unused = [i for i in range(len(pieces)) if i not in set(used)]
    largest, excess = _cut_off(sizes, lambda largest: total - max(0, room_bytes - window(largest)), policy)
    eligible = [i for i in used if sizes[i] <= largest]
    streamed: list[tuple[Span, ...]] = [()] * len(pieces)
    left = excess
    for index in [*unused, *_victims(eligible, sizes, excess, policy), *used]:
        if left <= 0:
            break
        if not streamed[index]:
            kept, streamed[index] = divided(pieces[index], sizes[index] - left)
            left -= sizes[index] - size_of(kept)
    return PassPlan(
        kept_bytes=total - sum(map(size_of, streamed)),
        streamed=tuple(streamed),
        window_bytes=window(largest),
    )


def buffers(largest_bytes: int, read_ahead_bytes: int) -> int:
    """How many buffers it takes: one for the module that computes, and as many as the read-ahead fills, but one."""
    return 1 + max(1, read_ahead_bytes // max(1, largest_bytes))


def _cut_off(sizes: Sequence[int], excess: Callable[[int], int], policy: ResidentPolicy) -> tuple[int, int]:
    """The largest piece that may stream, and how many bytes then have to: the fewest bytes that suffice.

    Args:
        sizes: Of the pieces.
        excess: Bytes that have to stream if the largest piece that does has so many.
        policy: Which ones are kept.
    """
    if policy is ResidentPolicy.STRIDED:
        for largest in sorted(set(sizes)):
            if excess(largest) <= sum(size for size in sizes if size <= largest):
                return largest, excess(largest)
    return max(sizes), excess(max(sizes))


def _victims(order: Sequence[int], sizes: Sequence[int], excess_bytes: int, policy: ResidentPolicy) -> Iterator[int]:
    """Pieces in the order in which they are to stream until the excess is met; all of them, in the end."""
    if policy is ResidentPolicy.LEADING:
        yield from reversed(order)
        return
    share = excess_bytes / max(1, sum(sizes[i] for i in order))
    due, passed_over = 0.0, []
    for index in order:
        due += share * sizes[index]
        if due >= sizes[index] / 2:
            due -= sizes[index]
            yield index
        else:
            passed_over.append(index)
    yield from passed_over
