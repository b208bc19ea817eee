"""Arithmetic on address ranges. Pure; addresses and lengths in bytes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sojourn.residencyd.kernel.advice import inner_pages
from sojourn.residencyd.kernel.syscalls import PAGE_BYTES


class Span(NamedTuple):
    """Addresses from `start` to before `end`."""

    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Its length."""
        return self.end - self.start


def size_of(spans: Iterable[Span]) -> int:
    """Their lengths together; they must not overlap."""
    return sum(span.end - span.start for span in spans)


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same addresses as few spans in order, none touching another."""
    result: list[Span] = []
    for span in sorted(spans):
        if span.start >= span.end:
            continue
        if result and span.start <= result[-1].end:
            result[-1] = Span(result[-1].start, max(result[-1].end, span.end))
        else:
            result.append(span)
    return tuple(result)


def whole_pages(spans: Iterable[Span], *, page_bytes: int = PAGE_BYTES) -> tuple[Span, ...]:
    """The pages that lie wholly within: what can be given away without taking a byte of a neighbour along."""
    pages = (inner_pages(start, end - start, page_bytes=page_bytes) for start, end in merged(spans))
    return tuple(Span(start, start + length) for start, length in pages if length)


def all_pages(spans: Iterable[Span], *, page_bytes: int = PAGE_BYTES) -> tuple[Span, ...]:
    """The pages that hold any byte of them."""
    return merged(
        Span(start // page_bytes * page_bytes, -(-end // page_bytes) * page_bytes) for start, end in merged(spans)
    )


def without(spans: Iterable[Span], others: Iterable[Span]) -> tuple[Span, ...]:
    """The addresses of `spans` that are in none of `others`."""
    result: list[Span] = []
    holes = merged(others)
    for start, end in merged(spans):
        for hole in holes:
            if hole.end <= start or hole.start >= end:
                continue
            if hole.start > start:
                result.append(Span(start, hole.start))
            start = min(end, hole.end)
        if start < end:
            result.append(Span(start, end))
    return tuple(result)


def divided(
    spans: Sequence[Span], size_bytes: int, *, page_bytes: int = PAGE_BYTES
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """The first `size_bytes` of a sequence, rounded down to a page within the span that is cut, and the rest."""
    first: list[Span] = []
    for i, span in enumerate(spans):
        if span.size_bytes > size_bytes:
            cut = span.start + max(0, size_bytes) // page_bytes * page_bytes
            if cut > span.start:
                first.append(Span(span.start, cut))
            return tuple(first), (Span(cut, span.end), *spans[i + 1 :])
        first.append(span)
        size_bytes -= span.size_bytes
    return tuple(first), ()
