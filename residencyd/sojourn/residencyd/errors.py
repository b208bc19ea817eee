"""Everything that goes wrong in the sidecar by name; what goes wrong between it and the kernel: `kernel.errors`.

Each error of a component map carries the `reason` that the metrics label blindness with.
"""

from pathlib import Path


class ResidencydError(Exception):
    """Base of all errors that this package raises on purpose; the command line prints the message in one line."""


class MapError(ResidencydError):
    """A component map cannot be used.

    Attributes:
        reason: One word for labels.
    """

    reason = "no_map"

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


class MapMissing(MapError):
    """No process has published a map (yet)."""


class MapForbidden(MapError):
    """The map is there, or may be, and another user's."""

    reason = "other_uid"


class MapTorn(MapError):
    """The file is cut, or is no component map."""

    reason = "map_torn"


class MapSchemaUnknown(MapError):
    """The map was written by a version of the model process that this one does not understand."""

    reason = "map_schema"


class Sandboxed(ResidencydError):
    """The process runs in a sandbox whose memory is one file: nothing can be told apart from outside."""

    reason = "sandboxed"


class InvalidSetting(ResidencydError):
    """An option has a value that cannot be served; the message says what is valid."""
