"""Which file system a device number stands for: /proc/<pid>/mountinfo.

It decides what a mapping can do: pages of tmpfs are memory and never dropped, and an overlay file's pages belong to
another inode.
"""

from collections.abc import Mapping
from pathlib import Path

from sojourn.residencyd.kernel.errors import ParseFailed
from sojourn.residencyd.kernel.process import PROC, asked
from sojourn.residencyd.kernel.syscalls import read_bytes

Device = tuple[int, int]


def parse_mountinfo(text: bytes) -> dict[Device, str]:
    """Type of file system by major and minor device number.

    Raises:
        ParseFailed: A line is not of the documented form.
    """
    types: dict[Device, str] = {}
    for line in text.splitlines():
        # Optional fields stand between the sixth and a lone dash; the type follows it.
        before, _, after = line.partition(b" - ")
        try:
            major, minor = before.split()[2].split(b":")
            types[int(major), int(minor)] = after.split()[0].decode(errors="replace")
        except (ValueError, IndexError) as error:
            raise ParseFailed("mountinfo", line) from error
    return types


def read_mounts(pid: int | str = "self", *, proc: Path = PROC) -> Mapping[Device, str]:
    """File systems that a process sees, by device number.

    Raises:
        ProcessGone, OtherUser, NotDumpable: The process cannot be read.
        ParseFailed: Not of the documented form.
    """
    path = proc / str(pid) / "mountinfo"
    if pid == "self":
        return parse_mountinfo(read_bytes(path))
    return parse_mountinfo(asked(int(pid), lambda: read_bytes(path), proc=proc))
