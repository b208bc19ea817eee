"""What became of each source in one look. Each is asked in its own right: one that fails hides nothing else.

What a machine does not have (PSI switched off, no cgroups) is not usable, and that is no error.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from sojourn.residencyd.errors import ResidencydError
from sojourn.residencyd.kernel.errors import KernelError, SourceMissing

NAMES = ("map", "process", "files", "meminfo", "cgroup", "pressure", "devices")

Result = TypeVar("Result")
Other = TypeVar("Other")


@dataclass
class Sources:
    """Names of sources that were asked.

    Attributes:
        said: By name, why it is not usable; empty if it is.
        errors: Those that failed, rather than being missing.
    """

    said: dict[str, str] = field(default_factory=dict)
    errors: set[str] = field(default_factory=set)

    def ask(self, name: str, call: Callable[[], Result], *, otherwise: Other) -> Result | Other:
        """The result of a call, or the alternative if it fails in a way that a source can."""
        self.asked(name)
        try:
            return call()
        except (KernelError, ResidencydError, OSError) as error:
            self.failed(name, error)
            return otherwise

    def asked(self, name: str) -> None:
        """Notes that a source is asked, before anything can be said of it."""
        self.said.setdefault(name, "")

    def failed(self, name: str, error: Exception) -> None:
        """Notes why a source is not usable."""
        self.said[name] = str(error) or type(error).__name__
        if not isinstance(error, SourceMissing):
            self.errors.add(name)
