"""The C library, the numbers of calls it has no name for, and files read in one gulp.

Everything here raises OSError as the kernel meant it; the modules beside it turn that into typed errors.
"""

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE_BYTES = os.sysconf("SC_PAGESIZE")

# Same number on every architecture that Linux added it to (6.5; the unified range from 424 on).
SYS_CACHESTAT = 451

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int
_libc.syscall.restype = ctypes.c_long
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.mmap.restype = ctypes.c_ssize_t
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def _checked(call: Callable[..., int], *arguments: Any) -> int:
    result = call(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def madvise(address: int, length_bytes: int, advice: int) -> None:
    """Gives the kernel advice about memory of this process.

    Raises:
        OSError: As the kernel answered.
    """
    _checked(_libc.madvise, address, length_bytes, advice)


def cachestat(descriptor: int, range_address: int, result_address: int) -> None:
    """Asks for the page cache of a file; takes the addresses of the call's two structures.

    Raises:
        OSError: As the kernel answered; ENOSYS before Linux 6.5.
    """
    _checked(
        _libc.syscall,
        ctypes.c_long(SYS_CACHESTAT),
        ctypes.c_uint(descriptor),
        ctypes.c_void_p(range_address),
        ctypes.c_void_p(result_address),
        ctypes.c_uint(0),
    )


def mincore(descriptor: int, offset: int, length_bytes: int) -> bytes:
    """One byte a page of a file range, its lowest bit set for a page in memory. The range is mapped for it only.

    Raises:
        OSError: As the kernel answered.
    """
    address = _checked(_libc.mmap, None, length_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, offset)
    try:
        pages = ctypes.create_string_buffer(-(-length_bytes // PAGE_BYTES))
        _checked(_libc.mincore, address, length_bytes, pages)
        return pages.raw
    finally:
        _libc.munmap(address, length_bytes)


def iowr(number: int, size_bytes: int) -> int:
    """The ioctl request _IOWR('f', number, size), the family of /proc's own ioctls."""
    return (3 << 30) | (size_bytes << 16) | (ord("f") << 8) | number


def read_bytes(path: Path | str) -> bytes:
    """A whole file by as few reads as it takes.

    /proc makes its text anew for every read, so large buffers are what keeps it consistent and cheap.

    Raises:
        OSError: As the kernel answered; ESRCH for a process that ended in between.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        chunks = []
        while chunk := os.read(descriptor, 1 << 20):
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        os.close(descriptor)
