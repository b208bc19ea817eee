"""Rows of whole requests in host memory, to swap in without reading weights.

One slab of pages, a page holding one row of one plan over all projections (MiniMax-H3: 9.25 MiB). The plans of one
request are a group: groups are stored, refreshed and evicted as wholes, and a plan that several groups use is kept
until the last of them goes.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from sojourn.inference.adaln.counters import SkipReason
from sojourn.inference.adaln.host_memory import allocate_pages
from sojourn.inference.adaln.plans import PlanKey
from sojourn.inference.adaln.table import Table

_log = logging.getLogger(__name__)

Group = tuple[PlanKey, ...]
Allocate = Callable[[int, int, torch.dtype, bool], torch.Tensor]
CopyIn = Callable[[dict[PlanKey, list[int]]], None]

RESERVE_BYTES = 2 * 1024**3
"""Kept free for the rest of the host: what page cache and other processes need to make progress."""
RESERVE_SHARE = 0.05


def host_budget_bytes(available_bytes: int, *, ranks: int = 1) -> int:
    """What the host tier of one rank may take of the available host memory."""
    reserve = max(int(RESERVE_SHARE * available_bytes), RESERVE_BYTES)
    return max(0, available_bytes - reserve) // max(1, ranks)


def page_capacity(table: Table, *, configured_bytes: int, budget_bytes: int) -> int:
    """How many pages fit in the configured bytes and in the budget, whichever is less."""
    return max(0, min(configured_bytes, budget_bytes)) // table.row_bytes


@dataclass
class _Stored:
    pages: list[int]
    users: int = 0


@dataclass
class HostTier:
    """Pages, the plans in them, and the groups that use the plans, oldest first.

    Attributes:
        table: Layout of a row.
        capacity: Pages; after construction those that could be allocated.
        pinned: Whether the pages are page-locked; after construction whether they really are.
        allocate: Allocates one buffer; raises RuntimeError or MemoryError where it cannot.
        evicted: Hears how many plans an eviction has cost.
        available_bytes: Free memory of the host now; None where nobody measures it.
    """

    table: Table
    capacity: int
    pinned: bool = False
    allocate: Allocate = allocate_pages
    evicted: Callable[[int], None] = lambda plans: None
    available_bytes: Callable[[], int] | None = None
    _buffers: dict[torch.dtype, torch.Tensor] = field(init=False, default_factory=dict)
    _plans: dict[PlanKey, _Stored] = field(init=False, default_factory=dict)
    _groups: OrderedDict[Group, None] = field(init=False, default_factory=OrderedDict)
    _free: list[int] = field(init=False, default_factory=list)
    _touched: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        if self.capacity > 0:
            self._buffers = self._allocate_ladder()
        self._free = list(range(self.capacity))[::-1]

    def _allocate_ladder(self) -> dict[torch.dtype, torch.Tensor]:
        """Page-locked at full size, at half, at a quarter, …, then pageable at full size."""
        asked = self.capacity
        pages = asked if self.pinned else 0
        while pages > 0:
            try:
                buffers = self._allocate_all(pages, pinned=True)
            except (RuntimeError, MemoryError) as error:
                _log.warning("the plan cache's host tier cannot lock %d pages (%s); halving", pages, error)
                pages //= 2
                continue
            if pages < asked:
                _log.warning("the plan cache's host tier shrank to %d of %d pages", pages, asked)
            self.capacity = pages
            return buffers
        if self.pinned:
            _log.warning("the plan cache's host tier of %d pages is pageable: copies to the device block", asked)
            self.pinned = False
        return self._allocate_all(asked, pinned=False)

    def _allocate_all(self, pages: int, *, pinned: bool) -> dict[torch.dtype, torch.Tensor]:
        return {
            dtype: self.allocate(pages, elements, dtype, pinned) for dtype, elements in self.table.row_elements.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes that are in memory: all pages where they are locked, else those that were ever written."""
        return (self.capacity if self.pinned else len(self._touched)) * self.table.row_bytes

    @property
    def kind(self) -> str:
        """How the pages are held: "pinned", "pageable" or "none"."""
        return "none" if self.capacity == 0 else "pinned" if self.pinned else "pageable"

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def plans(self) -> frozenset[PlanKey]:
        """Plans whose rows are held."""
        return frozenset(self._plans)

    @property
    def groups(self) -> list[Group]:
        """Groups, least recently used first."""
        return list(self._groups)

    def holds(self, keys: Iterable[PlanKey]) -> bool:
        """Whether the rows of all these plans are held."""
        return all(key in self._plans for key in keys)

    @property
    def rows(self) -> dict[torch.dtype, torch.Tensor]:
        """All pages, [pages, R] by dtype."""
        return self._buffers

    def pages(self, key: PlanKey) -> list[int]:
        """The pages of a held plan, one for each of its rows in order."""
        return list(self._plans[key].pages)

    def refresh(self, group: Group) -> bool:
        """Marks a group as the most recently used; adds it if all its plans are held. False if they are not."""
        if group not in self._groups:
            if not self.holds(group):
                return False
            for key in group:
                self._plans[key].users += 1
            self._groups[group] = None
        self._groups.move_to_end(group)
        return True

    def store(self, lengths: dict[PlanKey, int], copy_in: CopyIn, settle: Callable[[], None]) -> SkipReason | None:
        """Stores the plans of a request as a group.

        Args:
            lengths: Distinct rows of each plan, in the group's order.
            copy_in: Copies plans' rows into the pages given.
            settle: Returns when all copies have ended, or raises what went wrong with them.

        Returns:
            Why the group was not stored, and nothing has changed but evictions; None if it was.
        """
        group = tuple(lengths)
        if self.refresh(group):
            return None
        if sum(lengths.values()) > self.capacity:
            return SkipReason.TOO_LARGE
        shared = [key for key in group if key in self._plans]
        for key in shared:
            self._plans[key].users += 1
        try:
            return self._store({key: length for key, length in lengths.items() if key not in shared}, copy_in, settle)
        finally:
            self.refresh(group)
            self._release(shared)

    def _store(self, missing: dict[PlanKey, int], copy_in: CopyIn, settle: Callable[[], None]) -> SkipReason | None:
        """Takes pages for the missing plans and fills them; plans of the group that are held are safe from eviction."""
        pages = sum(missing.values())
        if self._short_of_memory(pages):
            return SkipReason.PRESSURE
        while self.free_pages < pages:
            self._evict_oldest_group()
        taken = {key: [self._free.pop() for _ in range(length)] for key, length in missing.items()}
        self._touched.update(index for indices in taken.values() for index in indices)
        try:
            copy_in(taken)
            settle()
        except BaseException as error:
            self._free.extend(index for indices in taken.values() for index in indices)
            if not isinstance(error, Exception):
                raise
            _log.debug("the host tier could not store a group", exc_info=True)
            return SkipReason.COPY_FAILED
        self._plans.update({key: _Stored(indices) for key, indices in taken.items()})
        return None

    def _short_of_memory(self, pages: int) -> bool:
        """Whether the host lacks memory for pages that were never written: page-locked ones are there already."""
        if self.pinned or self.available_bytes is None:
            return False
        untouched = [index for index in self._free[-pages:] if index not in self._touched] if pages else []
        return host_budget_bytes(self.available_bytes()) < len(untouched) * self.table.row_bytes

    def _evict_oldest_group(self) -> None:
        group, _ = self._groups.popitem(last=False)
        self.evicted(self._release(group))

    def _release(self, keys: Iterable[PlanKey]) -> int:
        """Takes one use of each plan back and frees those without any; returns how many."""
        gone = 0
        for key in keys:
            stored = self._plans[key]
            stored.users -= 1
            if stored.users == 0:
                self._free.extend(self._plans.pop(key).pages)
                gone += 1
        return gone

    def clear(self) -> None:
        """Forgets everything; the caller has waited for copies in flight."""
        self._plans.clear()
        self._groups.clear()
        self._free = list(range(self.capacity))[::-1]
