"""Cold-page advice when a component's use ends, and the proof of what became of it.

Asked for room, a component gives back its mapped pages in a fixed order until what is left of it fits; the rest is
marked cold, first in line should memory run short. The kernel answers 0 to MADV_PAGEOUT whether it did anything or
not, so every page-out is verified against the page table, and what stays has a reason.
"""

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sojourn.inference.offload.adviser import PageAdvice
from sojourn.inference.offload.observer import Stuck
from sojourn.inference.offload.spans import Span, divided, merged, size_of, whole_pages, without
from sojourn.residencyd.kernel.maps import DELETED, MapsTable, read_maps
from sojourn.residencyd.kernel.maps import Mapping as MappedRange
from sojourn.residencyd.kernel.pages import PageTable
from sojourn.residencyd.kernel.syscalls import PAGE_BYTES


@dataclass(frozen=True, kw_only=True)
class ColdAdvice:
    """What to tell the kernel about a component's mapped bytes.

    Attributes:
        page_out: To give back now, in this order.
        cold: To mark as first in line.
    """

    page_out: tuple[Span, ...]
    cold: tuple[Span, ...]


def plan_cold(spans: Sequence[Span], *, room_bytes: int | None) -> ColdAdvice:
    """Divides a component's bytes.

    Args:
        spans: Mapped whole pages, in the order in which they may go.
        room_bytes: What may stay; None if nothing presses, and then all is only marked cold.
    """
    excess = 0 if room_bytes is None else max(0, size_of(spans) - room_bytes)
    # Rounded up to a page: what stays must fit.
    page_out, cold = divided(spans, -(-excess // PAGE_BYTES) * PAGE_BYTES)
    return ColdAdvice(page_out=page_out, cold=cold)


@dataclass(frozen=True, kw_only=True)
class PageOutcome:
    """What a page-out did.

    Attributes:
        requested_bytes: In memory before, and given to MADV_PAGEOUT. What was out already is not asked for again.
        verified_bytes: Of these, gone afterwards.
        stuck: The others by reason; every reason, zeros included.
    """

    requested_bytes: int = 0
    verified_bytes: int = 0
    stuck: Mapping[Stuck, int] = field(default_factory=lambda: dict.fromkeys(Stuck, 0))

    @property
    def reason(self) -> Stuck | None:
        """What holds most of the stuck bytes; None if none are stuck."""
        worst = max(self.stuck, key=lambda reason: self.stuck[reason])
        return worst if self.stuck[worst] else None

    def __add__(self, other: "PageOutcome") -> "PageOutcome":
        return PageOutcome(
            requested_bytes=self.requested_bytes + other.requested_bytes,
            verified_bytes=self.verified_bytes + other.verified_bytes,
            stuck={reason: self.stuck[reason] + other.stuck[reason] for reason in Stuck},
        )


def page_out_verified(
    spans: Sequence[Span], *, in_use: Sequence[Span] = (), advice: PageAdvice | None = None
) -> PageOutcome:
    """Pages spans of this process out, and finds out what that did.

    Args:
        spans: Address ranges; only their whole pages go, in this order.
        in_use: Parts of them that a component in use needs too: not touched, and reported as stuck for that reason.
        advice: The kernel calls.

    Raises:
        KernelError: The page table or the mappings of this very process cannot be read.
    """
    calls = advice or PageAdvice()
    table = MapsTable(read_maps(os.getpid()))
    outcome = PageOutcome()
    with PageTable(os.getpid()) as pages:
        for start, end in _kept_from(spans, in_use):
            for mapping in table.overlapping(start, end):
                part = Span(max(start, mapping.start), min(end, mapping.end))
                outcome += _page_out_part(part, mapping, pages, calls)
        held = sum(pages.count(start, end).resident_bytes for start, end in merged(in_use))
    return outcome + PageOutcome(stuck={**dict.fromkeys(Stuck, 0), Stuck.IN_USE: held}) if held else outcome


def _kept_from(spans: Sequence[Span], in_use: Sequence[Span]) -> list[Span]:
    """The whole pages of each span, in order, but for what is in use."""
    return [page for span in spans for page in whole_pages(without([span], in_use))]


def _page_out_part(part: Span, mapping: MappedRange, pages: PageTable, calls: PageAdvice) -> PageOutcome:
    """One advice within one mapping, so that an error is about this mapping alone."""
    before = pages.count(*part).resident_bytes
    if not before:
        return PageOutcome()
    advised = calls.page_out(part.start, part.size_bytes)
    after = pages.count(*part).resident_bytes
    stuck = dict.fromkeys(Stuck, 0)
    if after:
        stuck |= _reasons(part, mapping, pages, after, error=advised.error)
    return PageOutcome(requested_bytes=before, verified_bytes=max(0, before - after), stuck=stuck)


def _reasons(part: Span, mapping: MappedRange, pages: PageTable, left_bytes: int, *, error: int) -> Mapping[Stuck, int]:
    """Why bytes are left. The first reason that holds for them, from the most general to the most particular."""
    if error == errno.EINVAL:
        return {Stuck.LOCKED: left_bytes}
    if mapping.inode and not may_page_out(mapping):
        return {Stuck.NOT_OWNER: left_bytes}
    file_bytes = pages.count(*part).file_bytes
    shared_bytes = min(left_bytes, max(0, file_bytes - pages.exclusive_file_bytes(*part)))
    return {Stuck.SHARED: shared_bytes, Stuck.OTHER: left_bytes - shared_bytes}


def may_page_out(mapping: MappedRange) -> bool:
    """Whether the kernel lets this user page a file out: its owner, who may write it, or root over it.

    A file that has no path any more cannot be asked; then the kernel is given the benefit of the doubt.
    """
    if os.geteuid() == 0:
        return True
    path = Path(mapping.name.removesuffix(DELETED))
    try:
        found = path.stat()
    except OSError:
        return True
    if found.st_ino != mapping.inode:
        return True
    return found.st_uid == os.geteuid() or os.access(path, os.W_OK, effective_ids=True)
