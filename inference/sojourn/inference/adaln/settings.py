"""What can be set of the plan cache, judged at construction. Without torch, as the command line needs it early."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from sojourn.inference.adaln.overrides import Overrides, check_overrides, projected_as
from sojourn.inference.adaln.refusals import SettingRefused

MODE_SETTING = "--adaln-cache"
PLANS_SETTING = "--adaln-plans"
WIDTH_SETTING = "--adaln-plan-width"
HOST_BYTES_SETTING = "--adaln-host-bytes"
STORE_SETTING = "--adaln-store"
STORE_BYTES_SETTING = "--adaln-store-bytes"
PRECISION_SETTING = "--adaln-precision"


class Mode(StrEnum):
    """When the cache is used."""

    ON = "on"
    """Always; a model that it cannot serve does not load."""
    OFF = "off"
    """Never."""
    AUTO = "auto"
    """Where it can serve the model and costs less than the weights that it replaces."""


class Precision(StrEnum):
    """How rows are computed."""

    MATCH = "match"
    """As resident weights on the same device would, in eager mode: equal bit for bit."""
    FP32 = "fp32"
    """In float32 throughout, rounded once to the rows' dtype: nearer to the truth, not equal to resident weights."""


@dataclass(frozen=True, kw_only=True)
class PlanCacheSettings:
    """Settings of the plan caches of one process.

    Attributes:
        mode: When to use it.
        plans: Plans that the slab of one transformer holds. A MiniMax-H3 request of N steps needs N - 1.
        width: Distinct rows that a plan may have. MiniMax-H3 needs 2 for t2va, 3 for fl2va, 4 for ref2va.
        host_bytes: Host memory for rows of recent requests, over all transformers; 0 for none.
        store: Directory that the processes of a node share; None for none.
        store_bytes: Size cap of that directory.
        precision: How rows are computed.
        families: Component -> the family that it is treated as, whatever its class; the others go by their class.
    """

    mode: Mode = Mode.AUTO
    plans: int = 64
    width: int = 4
    host_bytes: int = 8_000_000_000
    store: Path | None = None
    store_bytes: int = 32_000_000_000
    precision: Precision = Precision.MATCH
    families: Overrides = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Judges each value.

        Raises:
            SettingRefused: Naming the first one that is wrong.
        """
        _refuse_other_words(MODE_SETTING, self.mode, Mode)
        _refuse_other_words(PRECISION_SETTING, self.precision, Precision)
        object.__setattr__(self, "mode", Mode(self.mode))
        object.__setattr__(self, "precision", Precision(self.precision))
        for setting, value, least in (
            (PLANS_SETTING, self.plans, 1),
            (WIDTH_SETTING, self.width, 1),
            (HOST_BYTES_SETTING, self.host_bytes, 0),
            (STORE_BYTES_SETTING, self.store_bytes, 1),
        ):
            if type(value) is not int or value < least:
                raise SettingRefused(setting, value, f"must be a whole number of at least {least}")
        if self.store is not None:
            _refuse_no_directory(self.store)
        check_overrides(self.families)

    def projected_as(self, component: str, class_name: str) -> str:
        """The class in diffusers whose projections a component of that class is taken to have."""
        return projected_as(self.families, component, class_name)


def _refuse_other_words(setting: str, value: Any, words: type[StrEnum]) -> None:
    if value not in list(words):
        raise SettingRefused(setting, str(value), f"must be one of {', '.join(words)}")


def _refuse_no_directory(path: Path) -> None:
    """A directory that is not there yet is made when the first file is written."""
    if path.exists() and not path.is_dir():
        raise SettingRefused(STORE_SETTING, str(path), "is a file; name a directory")
