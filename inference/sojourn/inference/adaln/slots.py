"""Which plan holds which slot: host state alone, no tensor in it.

A slot is free, reserved or published, and exactly one of them. A plan that a request in flight uses is pinned, and no
pinned plan is evicted.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from sojourn.inference.adaln.plans import PlanKey
from sojourn.inference.adaln.refusals import PlansRefused, RequestReason


class Slots:
    """Free list, reservations, the ordered index of published plans (oldest first) and pins."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity))[::-1]
        self._reserved: set[int] = set()
        self._published: OrderedDict[PlanKey, int] = OrderedDict()
        self._pins: Counter[PlanKey] = Counter()

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many are published, reserved and free; may be asked for from any thread, also while a build runs."""
        return len(self._published), len(self._reserved), len(self._free)

    @property
    def free(self) -> frozenset[int]:
        """Slots that hold nothing."""
        return frozenset(self._free)

    @property
    def reserved(self) -> frozenset[int]:
        """Slots that a build is filling."""
        return frozenset(self._reserved)

    @property
    def published(self) -> dict[PlanKey, int]:
        """Plans that may be looked up, least recently used first."""
        return dict(self._published)

    @property
    def pinned(self) -> frozenset[PlanKey]:
        """Plans of requests in flight."""
        return frozenset(self._pins)

    def slot_of(self, key: PlanKey) -> int | None:
        """The slot of a published plan."""
        return self._published.get(key)

    def refresh(self, keys: Iterable[PlanKey]) -> None:
        """Marks published plans as the most recently used, in this order."""
        for key in keys:
            if key in self._published:
                self._published.move_to_end(key)

    def victims(self, count: int, *, keep: Iterable[PlanKey]) -> list[PlanKey]:
        """The oldest plans to evict so that `count` slots become free; changes nothing.

        Args:
            count: Slots needed.
            keep: Plans that the request itself uses.

        Raises:
            PlansRefused: Other requests in flight hold too many plans.
        """
        kept = set(keep) | self._pins.keys()
        short = count - len(self._free)
        candidates = [key for key in self._published if key not in kept]
        if short > len(candidates):
            raise PlansRefused(
                RequestReason.TOO_MANY_PLANS,
                f"{count} more plans are needed, {len(self._free)} slots are free, and requests in flight hold all but "
                f"{len(candidates)} of the other plans; raise --adaln-plans above {self.capacity} or send fewer "
                "requests at a time",
            )
        return candidates[: max(0, short)]

    def evict(self, key: PlanKey) -> None:
        """Takes a published plan's slot away; the caller has hidden it."""
        self._free.append(self._published.pop(key))

    def reserve(self, count: int) -> list[int]:
        """Takes free slots to fill them, in ascending order: rows of neighbours are written in one copy."""
        slots = sorted(self._free.pop() for _ in range(count))
        self._reserved.update(slots)
        return slots

    def publish(self, plans: dict[PlanKey, int]) -> None:
        """Makes reserved slots findable under their plans' keys."""
        self._reserved.difference_update(plans.values())
        self._published.update(plans)

    def give_back(self, slots: Sequence[int]) -> None:
        """Frees reserved slots: their build has failed."""
        self._reserved.difference_update(slots)
        self._free.extend(slots)

    def clear(self) -> None:
        """Frees every published slot; pins stay with the requests that took them."""
        self._free.extend(self._published.values())
        self._published.clear()

    def pin(self, keys: Iterable[PlanKey]) -> None:
        """Protects plans from eviction, once more each."""
        self._pins.update(keys)

    def unpin(self, keys: Iterable[PlanKey]) -> None:
        """Takes one protection of each plan back."""
        for key in keys:
            self._pins[key] -= 1
            if self._pins[key] <= 0:
                del self._pins[key]
