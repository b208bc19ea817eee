"""Time lost for want of a resource: PSI, of a control group where it has it, else of the machine.

The counters need no sampling: their rate is the share of time that some, or all, tasks waited.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sojourn.residencyd.kernel.errors import ParseFailed, SourceMissing
from sojourn.residencyd.kernel.process import PROC
from sojourn.residencyd.kernel.syscalls import read_bytes

RESOURCES = ("cpu", "io", "memory")

_MICROSECONDS_PER_SECOND = 1_000_000


@dataclass(frozen=True)
class Pressure:
    """Seconds since boot, or since the group was made.

    Attributes:
        waiting_seconds: At least one task waited ("some").
        stalled_seconds: All tasks that could run waited ("full"); part of the former.
    """

    waiting_seconds: float
    stalled_seconds: float


def parse_pressure(text: bytes) -> Pressure:
    """Reads the text of a pressure file. "full" is missing for cpu before Linux 5.13 and counts 0 then.

    Raises:
        ParseFailed: No "some" line, or a total that is no number.
    """
    totals = {}
    for line in text.splitlines():
        kind, _, fields = line.partition(b" ")
        values = dict(field.split(b"=", 1) for field in fields.split() if b"=" in field)
        try:
            totals[kind] = int(values[b"total"]) / _MICROSECONDS_PER_SECOND
        except (KeyError, ValueError) as error:
            raise ParseFailed("pressure", line) from error
    if b"some" not in totals:
        raise ParseFailed("pressure", text)
    return Pressure(waiting_seconds=totals[b"some"], stalled_seconds=totals.get(b"full", 0.0))


def read_pressure(resource: str, *, folders: Sequence[Path] = (), proc: Path = PROC) -> Pressure:
    """Pressure on one of RESOURCES.

    Args:
        resource: "cpu", "io" or "memory".
        folders: Control group folders to look in first, nearest first.
        proc: Root of the proc file system, for the machine's own.

    Raises:
        SourceMissing: None of them exists, or the kernel keeps no such account (booted with psi=0).
        ParseFailed: Not of the documented form.
    """
    paths = [*(folder / f"{resource}.pressure" for folder in folders), proc / "pressure" / resource]
    for path in paths:
        try:
            return parse_pressure(read_bytes(path))
        except OSError:  # ENOENT; EOPNOTSUPP where PSI is compiled in and switched off
            continue
    raise SourceMissing("pressure", paths[-1])
