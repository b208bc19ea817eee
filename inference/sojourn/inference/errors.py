"""Everything that goes wrong by name.

A message says what was wrong, with the offending value, and what to change. The server maps these types to gRPC
codes in one table (`server.status`), the command line prints the message in one line.
"""

from dataclasses import dataclass
from pathlib import Path


class SojournError(Exception):
    """Base of all errors that this package raises on purpose."""


@dataclass(frozen=True)
class FieldViolation:
    """One field of a request that is not valid.

    Attributes:
        field: Path of the field as in the proto, such as "size.width".
        description: The offending value, what is valid, and the nearest valid values.
    """

    field: str
    description: str


class InvalidRequest(SojournError):
    """The request can never be served as it is.

    Attributes:
        violations: Every field found wrong, at least one.
    """

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = violations


class Unsupported(SojournError):
    """The request is valid, but this model or installation cannot do it; the message says what to change."""


class TierUnavailable(Unsupported):
    """A quality tier is not offered: for this model, on this device, or for such a request.

    Attributes:
        tier: The tier that was asked for.
    """

    def __init__(self, tier: str, model_name: str, obstacle: str) -> None:
        super().__init__(f"quality tier {tier} is not available for {model_name}: {obstacle}; or ask for lossless")
        self.tier = tier


class NotServing(SojournError):
    """The process is loading, draining or has failed to load."""


class QueueFull(SojournError):
    """All places in the queue are taken.

    Attributes:
        retry_after_seconds: When a place is likely to be free.
    """

    def __init__(self, *, waiting: int, limit: int, retry_after_seconds: float) -> None:
        super().__init__(
            f"{waiting} requests wait and the queue holds {limit}; try again in {retry_after_seconds:.0f} s"
        )
        self.retry_after_seconds = retry_after_seconds


class DeadlineTooShort(SojournError):
    """The deadline cannot be met by what the service has measured so far; refused before any work."""


class ModelError(SojournError):
    """The model folder cannot be served.

    Attributes:
        reason: One CamelCase word for conditions and labels, such as "WeightsTruncated".
        path: The file or folder at fault.
    """

    def __init__(self, reason: str, path: Path, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.reason = reason
        self.path = path


class DoesNotFit(ModelError):
    """The memory plan finds no placement that fits; refused before anything is loaded.

    Attributes:
        space: "device" or "host".
        needed_bytes: What the busiest stage needs there.
        available_bytes: What there is.
    """

    def __init__(
        self, path: Path, space: str, *, needed_bytes: int, available_bytes: int, stage: str, changes: tuple[str, ...]
    ) -> None:
        super().__init__(
            "DoesNotFit",
            path,
            f"it does not fit: stage {stage} needs {needed_bytes} bytes of {space} memory and there are "
            f"{available_bytes}; " + "; or ".join(changes),
        )
        self.space = space
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class RequestStopped(BaseException):
    """Ends a running request from within the pipeline.

    Derived from BaseException as asyncio.CancelledError is: it is control flow, and the `except Exception` clauses
    of the libraries between the check and the caller must neither swallow it nor log it as their fault.
    """


class RequestCancelled(RequestStopped):
    """The client has cancelled or gone."""


class DeadlineExceeded(RequestStopped):
    """The client's deadline has passed."""


class NonFiniteOutput(RequestStopped):
    """A NaN or infinity came out of a stage.

    Attributes:
        stage: Name of the stage.
        step: The denoising step that made it, from 1; None outside the denoising loop.
    """

    def __init__(self, *, stage: str, step: int | None, what: str) -> None:
        at = f"step {step} of stage {stage}" if step is not None else f"stage {stage}"
        super().__init__(f"{what} of {at} holds a NaN or infinity")
        self.stage = stage
        self.step = step
