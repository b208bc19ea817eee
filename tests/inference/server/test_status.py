"""One table from errors to statuses."""

import grpc
import pytest
from google.rpc import error_details_pb2
from sojourn.inference import errors
from sojourn.inference.errors import FieldViolation
from sojourn.inference.server import status

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequest(FieldViolation("steps", "0 is not within 2 to 9")), Code.INVALID_ARGUMENT),
        (errors.Unsupported("install torchvision"), Code.FAILED_PRECONDITION),
        (errors.TierUnavailable("high", "h3", "not measured"), Code.FAILED_PRECONDITION),
        (errors.NotServing("loading"), Code.UNAVAILABLE),
        (errors.QueueFull(waiting=1, limit=1, retry_after_seconds=3.25), Code.RESOURCE_EXHAUSTED),
        (errors.DeadlineTooShort("2 s"), Code.DEADLINE_EXCEEDED),
        (errors.DeadlineExceeded("passed"), Code.DEADLINE_EXCEEDED),
        (errors.RequestCancelled("gone"), Code.CANCELLED),
        (errors.NonFiniteOutput(stage="denoise", step=3, what="latents"), Code.INTERNAL),
    ],
)
def test_expected_errors_keep_code_and_text(error: BaseException, code: grpc.StatusCode) -> None:
    told = status.status_of(error, request_id="r1")
    assert (told.code, told.message) == (code, str(error))
    assert status.is_expected(error)


@pytest.mark.parametrize("error", [RuntimeError("secret"), MemoryError("secret"), errors.SojournError("secret")])
def test_other_errors_are_internal_and_point_to_the_log(error: Exception) -> None:
    told = status.status_of(error, request_id="r1")
    assert told.code is Code.INTERNAL
    assert "r1" in told.message
    assert "secret" not in told.message


def test_every_request_error_has_a_row() -> None:
    rows = tuple(kind for kind, _, _ in status.TABLE)
    ours = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BaseException)}
    bases = {errors.SojournError, errors.RequestStopped}
    at_load = {errors.ModelError, errors.DoesNotFit}
    assert {kind for kind in ours if not issubclass(kind, rows)} == bases | at_load


def test_details_survive_the_wire_form() -> None:
    error = errors.QueueFull(waiting=1, limit=1, retry_after_seconds=3.25)
    (detail,) = status.status_of(error, request_id="r1").details
    assert isinstance(detail, error_details_pb2.RetryInfo)
    assert detail.retry_delay.ToMilliseconds() == 3250


def test_trailers_stay_small_whatever_the_request() -> None:
    violations = [FieldViolation(f"outputs[{n}]", "ä×" * 5000) for n in range(1000)]
    told = status.status_of(errors.InvalidRequest(*violations), request_id="r1")
    message, trailers = told.trailers()
    in_bytes = 3 * len(message.encode()) + sum(len(value) * 4 // 3 for _, value in trailers)
    assert in_bytes < 16_000
