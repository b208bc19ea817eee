"""Everything that goes wrong between a reader and the kernel, by name.

Each error carries a `reason`, one lower-case word that serves as a metric label, and a message that says what was
wrong, with the offending value, and what to change.
"""

import errno
from pathlib import Path


class KernelError(Exception):
    """Base of all errors that these readers raise on purpose.

    Attributes:
        reason: One word for labels.
    """

    reason = "unreadable"


class ParseFailed(KernelError):
    """A source was read, but its content is not what the kernel documents.

    Attributes:
        source: Which source, such as "maps".
        line: The offending text, cut to 120 characters.
    """

    reason = "malformed"

    def __init__(self, source: str, line: object) -> None:
        self.source = source
        self.line = str(line)[:120]
        super().__init__(f"{source}: cannot make sense of {self.line!r}")


class SourceMissing(KernelError):
    """The file of a source is not there: an older kernel, another cgroup version, a sandbox."""

    reason = "missing"

    def __init__(self, source: str, path: Path | str) -> None:
        self.source = source
        super().__init__(f"{source}: {path} does not exist")


class ProcessGone(KernelError):
    """No process has this id, or it is a zombie: its memory has been given back."""

    reason = "gone"

    def __init__(self, pid: int) -> None:
        self.pid = pid
        super().__init__(f"process {pid} is gone")


class PidReused(KernelError):
    """The process id now belongs to another process than the one that was meant."""

    reason = "pid_reused"

    def __init__(self, pid: int, *, expected_ticks: int, found_ticks: int) -> None:
        self.pid = pid
        super().__init__(
            f"process {pid} started at tick {found_ticks}, the one meant at tick {expected_ticks}: the id was reused"
        )


class OtherUser(KernelError):
    """The process runs as another user, and the kernel shows its memory to its own user only."""

    reason = "other_uid"

    def __init__(self, pid: int, *, uid: int, own_uid: int) -> None:
        self.pid = pid
        super().__init__(f"process {pid} runs as uid {uid} and this one as {own_uid}: give both the same runAsUser")


class NotDumpable(KernelError):
    """The process has our uid, but it changed user without an exec or asked not to be dumpable."""

    reason = "not_dumpable"

    def __init__(self, pid: int) -> None:
        self.pid = pid
        super().__init__(
            f"process {pid} has our uid but hides its memory (it changed user after its start, or set dumpable to 0, "
            f"or a security module forbids it): start it as this user instead of switching later"
        )


class NotSupported(KernelError):
    """This kernel, file system or right does not allow the call.

    Attributes:
        source: Which call, such as "cachestat".
        errno: What the kernel answered; 0 where it was not asked.
    """

    reason = "unsupported"

    def __init__(self, source: str, *, why: str, number: int = 0) -> None:
        self.source = source
        self.errno = number
        named = f" ({errno.errorcode.get(number, number)})" if number else ""
        super().__init__(f"{source}: {why}{named}")


class NotOwner(NotSupported):
    """The kernel hides a file's page cache from who neither owns the file nor may write it."""

    reason = "not_owner"
