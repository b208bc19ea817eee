"""What offload has to tell: one method per fact, implemented by the process's metrics.

A small protocol keeps the metrics library out of the mechanism, and lets a test ask what was told.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol


class Fallback(StrEnum):
    """Fast paths that can be given up; the values are those of the metric label `reason`."""

    PREFETCH = "prefetch"
    DIRECT = "direct"
    PIN = "pin"
    REGISTER = "register"


class Stuck(StrEnum):
    """Why pages stay in memory after a page-out; the values are those of the metric label `reason`."""

    NOT_OWNER = "not_owner"
    SHARED = "shared"
    LOCKED = "locked"
    IN_USE = "in_use"
    OTHER = "other"


class Observer(Protocol):
    """Receives facts from any thread; must neither block nor raise."""

    def placed(self, *, component: str, layers_by_tier: Mapping[str, int]) -> None:
        """A component's layers have been given their tiers."""

    def pinned(self, *, booked_bytes: int, budget_bytes: int) -> None:
        """So much is locked now, of so much that may be."""

    def waited(self, *, component: str, seconds: float) -> None:
        """The computation stood still for weights."""

    def streams(self, *, component: str, size_bytes: int) -> None:
        """Each pass over a component means to read so much from storage again."""

    def copied(self, *, component: str, size_bytes: int) -> None:
        """Weights went from the host to the device."""

    def read_directly(self, *, component: str, size_bytes: int) -> None:
        """Weights were read around the page cache for one use."""

    def fell_back(self, *, reason: Fallback) -> None:
        """A fast path was given up."""

    def paged_out(self, *, component: str, requested_bytes: int, verified_bytes: int) -> None:
        """Resident bytes were given to MADV_PAGEOUT, and so many of them are gone."""

    def stuck(self, *, component: str, by_reason: Mapping[Stuck, int]) -> None:
        """What the last page-out of a component left in memory; all reasons, zeros included."""

    def stage_read(self, *, stage: str, size_bytes: int) -> None:
        """The process read so much from storage during a stage."""

    def planned(self, *, component: str, bytes_by_tier: Mapping[str, int]) -> None:
        """The memory plan places a component so."""

    def peak(self, *, space: str, expected_bytes: int, budget_bytes: int) -> None:
        """The memory plan expects such a peak in a space, `device` or `host`."""


class Silent:
    """The observer of a process without metrics."""

    def placed(self, *, component: str, layers_by_tier: Mapping[str, int]) -> None:
        """Ignored."""

    def pinned(self, *, booked_bytes: int, budget_bytes: int) -> None:
        """Ignored."""

    def waited(self, *, component: str, seconds: float) -> None:
        """Ignored."""

    def streams(self, *, component: str, size_bytes: int) -> None:
        """Ignored."""

    def copied(self, *, component: str, size_bytes: int) -> None:
        """Ignored."""

    def read_directly(self, *, component: str, size_bytes: int) -> None:
        """Ignored."""

    def fell_back(self, *, reason: Fallback) -> None:
        """Ignored."""

    def paged_out(self, *, component: str, requested_bytes: int, verified_bytes: int) -> None:
        """Ignored."""

    def stuck(self, *, component: str, by_reason: Mapping[Stuck, int]) -> None:
        """Ignored."""

    def stage_read(self, *, stage: str, size_bytes: int) -> None:
        """Ignored."""

    def planned(self, *, component: str, bytes_by_tier: Mapping[str, int]) -> None:
        """Ignored."""

    def peak(self, *, space: str, expected_bytes: int, budget_bytes: int) -> None:
        """Ignored."""


silent = Silent()
