"""Two lines of work on a device, computation and copies, and what orders them against each other.

Three rules keep weights whole, and each is one call here. Before memory is written by a copy, the copies wait for the
computation that may still read what was there (`copies_wait`). After the copies of a unit, a mark is set
behind them (`mark`). Before the unit is read, the computation waits for its mark (`compute_waits`). Memory is
taken by `allocate` on the line of the copies, so that its reuse obeys the first rule.

`CudaStreams` does this with streams and events. `InlineStreams` serves devices whose copies are synchronous.
`RecordingStreams` runs nowhere but in memory: copies happen as late as the rules allow, and whoever breaks a rule gets
a `RaceFound`, so that a forgotten wait fails a test on a machine without any device.
"""

import ctypes
import threading
import weakref
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """The computation's line of work and a second one for copies.

    Attributes:
        device: Where memory is allocated.
    """

    device: torch.device

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Uninitialised uint8 memory for copies to write into. It may have been read by the computation just now."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copies as part of the copies' line. `source` must not change until its mark is reached."""

    def copies_wait(self) -> None:
        """Later copies start when all computation issued so far has ended."""

    def mark(self) -> Any:
        """A point behind all copies issued so far."""

    def compute_waits(self, mark: Any) -> None:
        """Later computation starts when the copies before the mark have ended."""

    def host_waits_for(self, mark: Any) -> None:
        """Returns when the copies before the mark have ended."""

    def synchronize(self) -> None:
        """Returns when all copies issued so far have ended."""


class CudaStreams:
    """Streams and events of a CUDA device.

    Args:
        device: The device; its current stream is where computation happens.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = torch.cuda.Stream(device)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Memory of the copy stream's own pool: freed memory returns there at once and is ordered by the waits."""
        with torch.cuda.stream(self._copies):
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Asynchronous where the source is pinned."""
        with torch.cuda.stream(self._copies):
            destination.copy_(source, non_blocking=True)

    def copies_wait(self) -> None:
        """See `Streams`."""
        self._copies.wait_stream(torch.cuda.current_stream(self.device))

    def mark(self) -> Any:
        """See `Streams`."""
        return self._copies.record_event()

    def compute_waits(self, mark: Any) -> None:
        """See `Streams`."""
        torch.cuda.current_stream(self.device).wait_event(mark)

    def host_waits_for(self, mark: Any) -> None:
        """See `Streams`."""
        mark.synchronize()

    def synchronize(self) -> None:
        """See `Streams`."""
        self._copies.synchronize()


class InlineStreams:
    """A device without a second line of work: every copy has ended when the call returns.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """See `Streams`."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """See `Streams`."""
        destination.copy_(source)

    def copies_wait(self) -> None:
        """Nothing to wait for."""

    def mark(self) -> Any:
        """Nothing to mark."""
        return None

    def compute_waits(self, mark: Any) -> None:
        """Nothing to wait for."""

    def host_waits_for(self, mark: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class RaceFound(AssertionError):
    """Two accesses to the same memory, at least one of them a copy's write, with nothing that orders them."""


class _Block:
    """Memory of the recording device, and who touched it last."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = (ctypes.c_ubyte * size_bytes)()
        self.last_read = 0
        self.last_write = 0


class RecordingStreams:
    """A device in host memory that is as slow and as careless as the rules allow it to be.

    Copies are put off until something waits for them; memory that is given back is handed out again at once, filled
    with NaN. Reads are known through `read`, which whoever computes must call.

    Attributes:
        calls: Every call by name, in order.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.calls: list[str] = []
        self._pending: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._issued = 0  # copies so far
        self._computed = 0  # reads so far
        self._copies_know = 0  # reads that the next copy comes after
        self._compute_knows = 0  # copies that the next read comes after
        self._free: dict[int, list[_Block]] = {}
        self._blocks: dict[int, _Block] = {}
        self._lock = threading.RLock()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Memory full of NaN, by preference such as was given back last."""
        self.calls.append("allocate")
        free = self._free.setdefault(size_bytes, [])
        block = free.pop() if free else _Block(size_bytes)
        holder = (ctypes.c_ubyte * size_bytes).from_buffer(block.memory)
        weakref.finalize(holder, free.append, block)
        ctypes.memset(holder, 0xFF, size_bytes)
        self._blocks[ctypes.addressof(holder)] = block
        return torch.frombuffer(holder, dtype=torch.uint8)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Puts the copy off.

        Raises:
            RaceFound: The computation may still read what the copy overwrites.
        """
        self.calls.append("copy")
        with self._lock:
            self._issued += 1
            if (block := self._block(destination)) is not None:
                if block.last_read > self._copies_know:
                    raise RaceFound("a copy overwrites memory that the computation may still read")
                block.last_write = self._issued
            self._pending.append((self._issued, destination, source))

    def copies_wait(self) -> None:
        """See `Streams`."""
        self.calls.append("copies_wait")
        self._copies_know = self._computed

    def mark(self) -> Any:
        """See `Streams`."""
        self.calls.append("mark")
        return self._issued

    def compute_waits(self, mark: Any) -> None:
        """See `Streams`."""
        self.calls.append("compute_waits")
        self._compute_knows = max(self._compute_knows, mark)
        self._carry_out(mark)

    def host_waits_for(self, mark: Any) -> None:
        """See `Streams`."""
        self.calls.append("host_waits_for")
        self._carry_out(mark)

    def synchronize(self) -> None:
        """See `Streams`."""
        self.calls.append("synchronize")
        self._compute_knows = self._issued
        self._carry_out(self._issued)

    def read(self, tensor: torch.Tensor) -> None:
        """The computation reads a tensor now; those outside this device are none of its business.

        Raises:
            RaceFound: Nothing makes the computation wait for the copy that fills it.
        """
        block = self._block(tensor)
        if block is None:
            return
        self._computed += 1
        block.last_read = self._computed
        if block.last_write > self._compute_knows:
            raise RaceFound("the computation reads memory whose copy it does not wait for")

    def _carry_out(self, mark: int) -> None:
        with self._lock:
            due = [(destination, source) for number, destination, source in self._pending if number <= mark]
            self._pending = [entry for entry in self._pending if entry[0] > mark]
            for destination, source in due:
                destination.copy_(source)

    def _block(self, tensor: torch.Tensor) -> _Block | None:
        return self._blocks.get(tensor.untyped_storage().data_ptr())
