"""What can go wrong, by what to do about it.

`Transient`: try again later, with growing pauses. `Permanent`: trying again changes nothing until somebody changes
the input; the message says what. Both carry a `reason`, one word for a condition.
"""


class OperatorError(Exception):
    """Base of all errors of the operator."""

    reason = "Failed"


class Transient(OperatorError):
    """May go away by itself."""


class Permanent(OperatorError):
    """Stays until somebody changes the input."""


class ApiError(Transient):
    """The API server refused or failed.

    Attributes:
        status: HTTP status, 0 where no answer came.
        causes: `details.causes` of the answer: field and message of each.
    """

    reason = "ApiError"

    def __init__(self, message: str, *, status: int = 0, causes: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.causes = causes


class NotFound(ApiError):
    """404: the object or its kind does not exist."""

    reason = "NotFound"


class Forbidden(ApiError):
    """403: a right is missing."""

    reason = "Forbidden"


class Conflict(ApiError):
    """409, and 422 of a JSON patch whose test failed: somebody else was faster."""

    reason = "Conflict"


class Invalid(ApiError, Permanent):
    """400, 422: what was sent can never be accepted."""

    reason = "Invalid"


class BadConfiguration(Permanent):
    """The operator's own settings are wrong."""

    reason = "BadConfiguration"
