"""What a process has read from and written to storage: /proc/<pid>/io. Page faults on mapped files count too."""

from dataclasses import dataclass
from pathlib import Path

from sojourn.residencyd.kernel.errors import ParseFailed
from sojourn.residencyd.kernel.process import PROC, asked
from sojourn.residencyd.kernel.syscalls import read_bytes


@dataclass(frozen=True)
class ProcessIo:
    """Bytes since the process began, of the whole process.

    Attributes:
        read_bytes: Fetched from storage, for reads and page faults alike.
        written_bytes: Sent to storage, or will be.
    """

    read_bytes: int
    written_bytes: int


def parse_io(text: bytes) -> ProcessIo:
    """Reads the text of /proc/<pid>/io.

    Raises:
        ParseFailed: A field is missing or no number.
    """
    lines = dict(line.split(b":", 1) for line in text.splitlines() if b":" in line)
    try:
        return ProcessIo(read_bytes=int(lines[b"read_bytes"]), written_bytes=int(lines[b"write_bytes"]))
    except (KeyError, ValueError) as error:
        raise ParseFailed("io", text) from error


def read_io(pid: int | str = "self", *, proc: Path = PROC) -> ProcessIo:
    """Storage traffic of a process. Needs the right to read it, as its memory does.

    Raises:
        ProcessGone, OtherUser, NotDumpable: The process cannot be read.
        ParseFailed: Not of the documented form.
    """
    path = proc / str(pid) / "io"
    if pid == "self":
        return parse_io(read_bytes(path))
    return parse_io(asked(int(pid), lambda: read_bytes(path), proc=proc))
