"""What the plan cache tells whoever counts.

Every event is one call; the metrics of the process and the plain counters below listen alike. All events of one
cache come from under its lock, gauges are read as a `Snapshot`.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Protocol

from sojourn.inference.adaln.refusals import RequestReason


class Result(StrEnum):
    """How a transaction ended; the dearest source that it needed."""

    HIT = "hit"
    HOST = "host"
    STORE = "store"
    BUILT = "built"
    REFUSED = "refused"
    FAILED = "failed"


class Source(StrEnum):
    """Where a plan was served from."""

    GPU = "gpu"
    HOST = "host"
    STORE = "store"
    BUILT = "built"


class Tier(StrEnum):
    """Where plans are held."""

    GPU = "gpu"
    HOST = "host"


class SkipReason(StrEnum):
    """Why a group was not stored in the host tier."""

    PRESSURE = "pressure"
    TOO_LARGE = "too_large"
    COPY_FAILED = "copy_failed"


class RejectReason(StrEnum):
    """Why a file of the plan store was not used or not written."""

    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    UNREADABLE = "unreadable"
    UNWRITABLE = "unwritable"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The gauges of a cache at one moment.

    Attributes:
        slots_published, slots_reserved, slots_free: Their sum is the slab's capacity.
        pages_used, pages_free: Their sum is the host tier's capacity.
        device_bytes: The slab.
        host_bytes: Pages of the host tier that are in memory: all where they are locked, else those ever written.
        host_kind: "pinned", "pageable" or "none".
        weight_bytes: Projections that were never loaded.
        store_bytes: Size of the plan store's directory; 0 without one.
    """

    slots_published: int
    slots_reserved: int
    slots_free: int
    pages_used: int
    pages_free: int
    device_bytes: int
    host_bytes: int
    host_kind: str
    weight_bytes: int
    store_bytes: int

    @classmethod
    def sum(cls, parts: "Iterable[Snapshot]") -> "Snapshot":
        """The gauges of several caches together; they share one store."""
        found = list(parts)
        numbers = {
            gauge.name: sum(getattr(part, gauge.name) for part in found)
            for gauge in fields(cls)
            if gauge.name not in {"host_kind", "store_bytes"}
        }
        kinds = sorted({part.host_kind for part in found if part.host_kind != "none"})
        store_bytes = max((part.store_bytes for part in found), default=0)
        return cls(host_kind=kinds[0] if kinds else "none", store_bytes=store_bytes, **numbers)


@dataclass(frozen=True, kw_only=True)
class Description:
    """How the caches of a process are set up, as the info metric says it.

    Attributes:
        mode, precision: As set.
        host_kind: "pinned", "pageable" or "none".
        off_reason: Why there is no cache; empty while there is one.
    """

    mode: str
    precision: str
    host_kind: str
    off_reason: str


class Observer(Protocol):
    """Counts what a cache does."""

    def opened(self, description: Description, gauges: Callable[[], Snapshot]) -> None:
        """The caches of the process are set up, or it is settled that there are none."""

    def request(self, result: Result) -> None:
        """A transaction has ended."""

    def served(self, source: Source, plans: int) -> None:
        """Distinct plans were served from a source."""

    def built(self, seconds: float) -> None:
        """A build has succeeded."""

    def read(self, nbytes: int) -> None:
        """Bytes of projections were read from the checkpoint."""

    def evicted(self, tier: Tier, plans: int) -> None:
        """Plans lost their place in a tier."""

    def host_skipped(self, reason: SkipReason) -> None:
        """A group was not stored in the host tier."""

    def refused(self, reason: RequestReason) -> None:
        """A request was refused."""

    def store_rejected(self, reason: RejectReason) -> None:
        """A file of the plan store was not used or not written."""


@dataclass
class Counters:
    """The observer of tests, benchmarks and processes without metrics."""

    requests: Counter[Result] = field(default_factory=Counter)
    plans: Counter[Source] = field(default_factory=Counter)
    evicted_plans: Counter[Tier] = field(default_factory=Counter)
    host_skips: Counter[SkipReason] = field(default_factory=Counter)
    refusals: Counter[RequestReason] = field(default_factory=Counter)
    store_rejects: Counter[RejectReason] = field(default_factory=Counter)
    builds: int = 0
    build_seconds: float = 0.0
    read_bytes: int = 0
    description: Description | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def opened(self, description: Description, gauges: Callable[[], Snapshot]) -> None:
        """The caches of the process are set up, or it is settled that there are none."""
        self.description = description

    def request(self, result: Result) -> None:
        """A transaction has ended."""
        with self._lock:
            self.requests[result] += 1

    def served(self, source: Source, plans: int) -> None:
        """Distinct plans were served from a source."""
        with self._lock:
            self.plans[source] += plans

    def built(self, seconds: float) -> None:
        """A build has succeeded."""
        with self._lock:
            self.builds += 1
            self.build_seconds += seconds

    def read(self, nbytes: int) -> None:
        """Bytes of projections were read from the checkpoint."""
        with self._lock:
            self.read_bytes += nbytes

    def evicted(self, tier: Tier, plans: int) -> None:
        """Plans lost their place in a tier."""
        with self._lock:
            self.evicted_plans[tier] += plans

    def host_skipped(self, reason: SkipReason) -> None:
        """A group was not stored in the host tier."""
        with self._lock:
            self.host_skips[reason] += 1

    def refused(self, reason: RequestReason) -> None:
        """A request was refused."""
        with self._lock:
            self.refusals[reason] += 1

    def store_rejected(self, reason: RejectReason) -> None:
        """A file of the plan store was not used or not written."""
        with self._lock:
            self.store_rejects[reason] += 1
