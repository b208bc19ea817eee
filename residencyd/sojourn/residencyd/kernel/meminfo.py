"""What the machine has left: /proc/meminfo."""

from dataclasses import dataclass
from pathlib import Path

from sojourn.residencyd.kernel.errors import ParseFailed, SourceMissing
from sojourn.residencyd.kernel.process import PROC
from sojourn.residencyd.kernel.syscalls import read_bytes


@dataclass(frozen=True)
class MemInfo:
    """Memory of the machine, in bytes.

    Attributes:
        total_bytes: MemTotal.
        free_bytes: MemFree. Leaves reclaimable page cache out: on a device that shares host memory the driver
            reports this as free, which is why it refuses models that fit.
        available_bytes: MemAvailable, the kernel's estimate of what new work can take without swapping.
        swap_free_bytes: SwapFree.
    """

    total_bytes: int
    free_bytes: int
    available_bytes: int
    swap_free_bytes: int


def parse_meminfo(text: bytes) -> MemInfo:
    """Reads the text of /proc/meminfo.

    Raises:
        ParseFailed: A field is missing (MemAvailable needs Linux 3.14) or is no number.
    """
    lines = dict(line.split(b":", 1) for line in text.splitlines() if b":" in line)
    return MemInfo(
        total_bytes=_kilobytes(lines, b"MemTotal"),
        free_bytes=_kilobytes(lines, b"MemFree"),
        available_bytes=_kilobytes(lines, b"MemAvailable"),
        swap_free_bytes=_kilobytes(lines, b"SwapFree") if b"SwapFree" in lines else 0,
    )


def _kilobytes(lines: dict[bytes, bytes], key: bytes) -> int:
    try:
        return int(lines[key].removesuffix(b"kB")) * 1024
    except (KeyError, ValueError) as error:
        raise ParseFailed("meminfo", f"{key.decode()}: {lines.get(key)!r}") from error


def read_meminfo(*, proc: Path = PROC) -> MemInfo:
    """Memory of the machine now.

    Raises:
        SourceMissing: No such file.
        ParseFailed: It holds no MemAvailable.
    """
    try:
        return parse_meminfo(read_bytes(proc / "meminfo"))
    except FileNotFoundError as error:
        raise SourceMissing("meminfo", proc / "meminfo") from error
