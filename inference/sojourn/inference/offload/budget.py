"""How much host memory may be taken, and a ledger of what is locked.

Locked memory is the one thing that neither the kernel nor we can take back under pressure. So a request that does
not fit is refused, never overrun, and what the ledger books is what the kernel really locks.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from sojourn.inference.offload.observer import Observer, silent

# Memory that is left alone, for what the process allocates besides weights: a share, but never less than 2 GiB.
RESERVE_SHARE = 0.05
MIN_RESERVE_BYTES = 2 << 30

# Copies of weights are made only where this much stays free besides them: the activations of the first request come
# after the copies.
COPY_RESERVE_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """What the host can give to this process.

    Attributes:
        available_bytes: The least of MemAvailable and the room of every cgroup from the leaf to the root.
        shares_device: Whether the device computes in this same memory (the CPU itself, or an integrated GPU).
        pinning: Whether anything may be locked.
    """

    available_bytes: int
    shares_device: bool
    pinning: bool = True

    @property
    def reserve_bytes(self) -> int:
        """What stays unspent."""
        return max(int(self.available_bytes * RESERVE_SHARE), MIN_RESERVE_BYTES)

    @property
    def pin_budget_bytes(self) -> int:
        """What may be locked: nothing where a lock would only take memory from the device itself."""
        return 0 if self.shares_device or not self.pinning else max(0, self.available_bytes - self.reserve_bytes)

    def copies_fit(self, size_bytes: int) -> bool:
        """Whether new anonymous memory of this size leaves the copy reserve free; nothing always fits."""
        return size_bytes == 0 or size_bytes < self.available_bytes - COPY_RESERVE_BYTES


class PinLease:
    """Permission to lock some bytes, given back once."""

    def __init__(self, ledger: "PinLedger", size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._ledger = ledger
        self._given_back = False

    def release(self) -> None:
        """Returns the allowance. Further calls do nothing."""
        if not self._given_back:
            self._given_back = True
            self._ledger.return_bytes(self.size_bytes)


class PinLedger:
    """Books locked bytes against the pin budget. May be used from any thread.

    Args:
        memory: Host memory when the ledger was opened.
        available_now: Reads available bytes anew: another process of the node may have taken its part meanwhile.
            What is booked here is already missing from that reading. None to trust `memory`.
        observer: Told of every change.
    """

    def __init__(
        self,
        memory: HostMemory,
        *,
        available_now: Callable[[], int] | None = None,
        observer: Observer = silent,
    ) -> None:
        self.memory = memory
        self.committed_bytes = 0
        self._available_now = available_now
        self._observer = observer
        self._lock = threading.Lock()

    @property
    def spendable_bytes(self) -> int:
        """What could be locked now."""
        unbooked = self.memory.pin_budget_bytes - self.committed_bytes
        if self._available_now is not None and unbooked > 0:
            unbooked = min(unbooked, self._available_now() - self.memory.reserve_bytes)
        return max(0, unbooked)

    def request(self, size_bytes: int) -> PinLease | None:
        """A lease on so many bytes, or None if they do not fit. Zero bytes are always granted."""
        with self._lock:
            if size_bytes and size_bytes > self.spendable_bytes:
                return None
            self.committed_bytes += size_bytes
        self._tell()
        return PinLease(self, size_bytes)

    def return_bytes(self, size_bytes: int) -> None:
        """Called by a lease, once."""
        with self._lock:
            self.committed_bytes -= size_bytes
        self._tell()

    def _tell(self) -> None:
        self._observer.pinned(booked_bytes=self.committed_bytes, budget_bytes=self.memory.pin_budget_bytes)


def pin_benefit(weight_bytes: int, uses_per_request: int) -> int:
    """Rank of a component among those that want pinned memory: bytes that a request copies.

    A pin on the transformer pays in every denoising step, one on an encoder once per request.
    """
    return weight_bytes * max(1, uses_per_request)
