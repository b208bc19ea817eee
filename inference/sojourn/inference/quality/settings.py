"""What can be set of the quality tiers, judged at construction. Without torch, as the command line needs it early."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sojourn.inference.errors import SojournError

FUSIONS_SETTING = "--fusions"
TABLE_SETTING = "--step-cache-table"


class Fusions(StrEnum):
    """When the fusions of a model are offered."""

    AUTO = "auto"
    """Where a measurement at load finds them faster than the reference on this device."""
    ON = "on"
    """Wherever they can run, faster or not: the same on every start."""
    OFF = "off"
    """Never."""


class QualitySettingRefused(SojournError):
    """A setting of the quality tiers is wrong; the message names it, its value and what is valid."""


@dataclass(frozen=True, kw_only=True)
class QualitySettings:
    """Settings of the quality tiers of one process.

    Attributes:
        fusions: When fusions are offered.
        table: File of measured errors of the step cache, beside those that come with Sojourn; None for none.
    """

    fusions: Fusions = Fusions.AUTO
    table: Path | None = None

    def __post_init__(self) -> None:
        """Judges each value.

        Raises:
            QualitySettingRefused: Naming the one that is wrong.
        """
        if self.fusions not in list(Fusions):
            raise QualitySettingRefused(f"{FUSIONS_SETTING} is {self.fusions!r}: must be one of {', '.join(Fusions)}")
        object.__setattr__(self, "fusions", Fusions(self.fusions))
        if self.table is not None and not self.table.is_file():
            raise QualitySettingRefused(f"{TABLE_SETTING} is {str(self.table)!r}: there is no such file")
