"""Exit statuses of the `sojourn` command, in one table."""

from enum import IntEnum

import grpc
from sojourn.inference import errors
from sojourn.inference.adaln.refusals import SettingRefused


class Exit(IntEnum):
    """What the exit status says."""

    DONE = 0
    FAILED = 1
    INVALID = 2
    NOT_NOW = 3
    DEADLINE = 4
    INTERRUPTED = 130

    @classmethod
    def of(cls, error: BaseException) -> "Exit":
        """The status for an error raised in this process."""
        for kind, status in _BY_ERROR.items():
            if isinstance(error, kind):
                return status
        return cls.FAILED

    @classmethod
    def of_code(cls, code: grpc.StatusCode) -> "Exit":
        """The status for a gRPC code that a server answered."""
        return _BY_CODE.get(code, cls.FAILED)


class CommandFailed(Exception):
    """Ends the command with one line on stderr.

    Attributes:
        status: The exit status.
    """

    def __init__(self, message: str, status: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.status = status


_BY_ERROR: dict[type[BaseException], Exit] = {
    errors.InvalidRequest: Exit.INVALID,
    SettingRefused: Exit.INVALID,
    errors.Unsupported: Exit.NOT_NOW,
    errors.DoesNotFit: Exit.NOT_NOW,
    errors.NotServing: Exit.NOT_NOW,
    errors.QueueFull: Exit.NOT_NOW,
    errors.DeadlineTooShort: Exit.DEADLINE,
    errors.DeadlineExceeded: Exit.DEADLINE,
    errors.RequestCancelled: Exit.INTERRUPTED,
}

_BY_CODE: dict[grpc.StatusCode, Exit] = {
    grpc.StatusCode.INVALID_ARGUMENT: Exit.INVALID,
    grpc.StatusCode.FAILED_PRECONDITION: Exit.NOT_NOW,
    grpc.StatusCode.UNAVAILABLE: Exit.NOT_NOW,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Exit.NOT_NOW,
    grpc.StatusCode.UNAUTHENTICATED: Exit.NOT_NOW,
    grpc.StatusCode.DEADLINE_EXCEEDED: Exit.DEADLINE,
    grpc.StatusCode.CANCELLED: Exit.INTERRUPTED,
}
