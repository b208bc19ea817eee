"""Errors → gRPC status, in one table.

The rich details travel in a trailer, and HTTP/2 header lists are small (gRPC refuses more than 8 KiB by default, and
non-ASCII takes three bytes for one in the message): so texts and the number of violations are bounded here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from sojourn.inference import errors

MAX_MESSAGE_CHARACTERS = 600
MAX_DESCRIPTION_CHARACTERS = 240
MAX_VIOLATIONS = 12


@dataclass(frozen=True)
class Status:
    """What a caller gets. `details` are messages of google.rpc."""

    code: grpc.StatusCode
    message: str
    details: tuple[Message, ...] = ()

    def trailers(self) -> tuple[str, Any]:
        """The message and the trailing metadata that carries the details."""
        number: int = self.code.value[0]
        status = status_pb2.Status(code=number, message=self.message)
        for detail in self.details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        wire = rpc_status.to_status(status)
        return wire.details, wire.trailing_metadata


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _bad_request(error: errors.InvalidRequest) -> tuple[Message, ...]:
    shown = error.violations[:MAX_VIOLATIONS]
    detail = error_details_pb2.BadRequest()
    for violation in shown:
        description = _shortened(violation.description, MAX_DESCRIPTION_CHARACTERS)
        detail.field_violations.add(field=violation.field, description=description)
    return (detail,)


def _retry_info(error: errors.QueueFull) -> tuple[Message, ...]:
    detail = error_details_pb2.RetryInfo()
    detail.retry_delay.FromMilliseconds(round(error.retry_after_seconds * 1000))
    return (detail,)


def _no_details(error: BaseException) -> tuple[Message, ...]:
    return ()


# First match wins; what is not here is a fault of ours, whose text stays in the log.
TABLE: tuple[tuple[type[BaseException], grpc.StatusCode, Callable[[Any], tuple[Message, ...]]], ...] = (
    (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT, _bad_request),
    (errors.Unsupported, grpc.StatusCode.FAILED_PRECONDITION, _no_details),
    (errors.NotServing, grpc.StatusCode.UNAVAILABLE, _no_details),
    (errors.QueueFull, grpc.StatusCode.RESOURCE_EXHAUSTED, _retry_info),
    (errors.DeadlineTooShort, grpc.StatusCode.DEADLINE_EXCEEDED, _no_details),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED, _no_details),
    (errors.RequestCancelled, grpc.StatusCode.CANCELLED, _no_details),
    (errors.NonFiniteOutput, grpc.StatusCode.INTERNAL, _no_details),
)


def is_expected(error: BaseException) -> bool:
    """Whether the table names the error, so that its text is meant for the caller."""
    return any(isinstance(error, kind) for kind, _, _ in TABLE)


def status_of(error: BaseException, *, request_id: str) -> Status:
    """The status of a call that ended with `error`."""
    for kind, code, details in TABLE:
        if isinstance(error, kind):
            return Status(code, _shortened(str(error), MAX_MESSAGE_CHARACTERS), details(error))
    message = f"an unexpected error ended the request; the server's log has it under request_id {request_id}"
    return Status(grpc.StatusCode.INTERNAL, message)
