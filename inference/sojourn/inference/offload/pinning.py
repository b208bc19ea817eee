"""Page-locked host memory of exactly the size that was asked for.

torch's own pinned allocator rounds every block up to a power of two (34 layers booked at 40.9 GiB locked 53 GB). So
a store takes an anonymous file (memfd) of the size in whole pages, fills it, and has the driver lock it in place. The
file's name shows in /proc/<pid>/maps, and tells a reader outside the process what the memory is.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from sojourn.inference.offload.budget import PinLease, PinLedger
from sojourn.inference.offload.layout import aligned
from sojourn.residencyd.kernel.maps import PINNED_STORE_NAME


class RegisterFailed(Exception):
    """The driver would not lock the memory."""


class PinDriver(Protocol):
    """Locks memory for a device's copy engine."""

    def register(self, address: int, size_bytes: int) -> None:
        """Locks it.

        Raises:
            RegisterFailed: The driver refused.
        """

    def unregister(self, address: int) -> None:
        """Unlocks what `register` locked."""


class CudaPinDriver:
    """Locks by cudaHostRegister."""

    def register(self, address: int, size_bytes: int) -> None:
        """Locks it.

        Raises:
            RegisterFailed: The driver refused.
        """
        status = torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)
        if int(status) != 0:
            raise RegisterFailed(f"cudaHostRegister of {size_bytes} bytes answered {status}")

    def unregister(self, address: int) -> None:
        """Unlocks what `register` locked."""
        torch.cuda.cudart().cudaHostUnregister(address)


class RecordingPinDriver:
    """Stands in for a driver where there is none: keeps the books that a driver would.

    Attributes:
        locked: Size by address of what is locked now.
        refuse_from_bytes: Registrations of this size and above fail; None for none.
    """

    def __init__(self, *, refuse_from_bytes: int | None = None) -> None:
        self.locked: dict[int, int] = {}
        self.refuse_from_bytes = refuse_from_bytes

    def register(self, address: int, size_bytes: int) -> None:
        """Books it.

        Raises:
            RegisterFailed: It is as large as `refuse_from_bytes`.
        """
        if self.refuse_from_bytes is not None and size_bytes >= self.refuse_from_bytes:
            raise RegisterFailed(f"{size_bytes} bytes are refused on purpose")
        self.locked[address] = size_bytes

    def unregister(self, address: int) -> None:
        """Takes it off the books."""
        del self.locked[address]


def pinned_size_bytes(size_bytes: int) -> int:
    """What locking a store of this size really takes: whole pages."""
    return aligned(size_bytes, mmap.PAGESIZE)


def pin_filled(
    size_bytes: int, fill: Callable[[torch.Tensor], None], *, driver: PinDriver, ledger: PinLedger
) -> torch.Tensor | None:
    """A locked buffer with content, or None if the budget does not grant it.

    It is filled before it is locked, since locking populates pages one by one and a copy does so in parallel. The lock,
    the lease and the memory are given back when the last tensor that views the buffer dies.

    Args:
        size_bytes: Length of the buffer, above 0.
        fill: Writes the content into the uint8 buffer that it is given.
        driver: Who locks.
        ledger: Who grants; books `pinned_size_bytes`.

    Raises:
        RegisterFailed: The budget granted it, the driver did not; the lease has been given back.
    """
    lease = ledger.request(pinned_size_bytes(size_bytes))
    if lease is None:
        return None
    try:
        holder = _anonymous_file(lease.size_bytes)
        buffer = torch.frombuffer(holder, dtype=torch.uint8)[:size_bytes]
        fill(buffer)
        driver.register(buffer.data_ptr(), lease.size_bytes)
    except BaseException:
        lease.release()
        raise
    weakref.finalize(holder, _give_back, driver, buffer.data_ptr(), lease).atexit = False
    return buffer


def _anonymous_file(size_bytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    """A mapping of a new memfd.

    torch.frombuffer keeps the array alive as long as a tensor views it, and the array keeps the mapping: its finaliser
    runs while the memory is still there, which that of the mmap object itself would not.
    """
    descriptor = os.memfd_create(PINNED_STORE_NAME, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size_bytes)
        return (ctypes.c_ubyte * size_bytes).from_buffer(mmap.mmap(descriptor, size_bytes))
    finally:
        os.close(descriptor)


def _give_back(driver: PinDriver, address: int, lease: PinLease) -> None:
    driver.unregister(address)
    lease.release()
