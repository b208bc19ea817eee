"""What can be set of the plan cache, judged at construction; and whether it pays to have it on."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from sojourn.inference.adaln.families import Family
from sojourn.inference.adaln.projection import Precision
from sojourn.inference.adaln.refusals import ModelReason, ModelRefused, SettingRefused
from sojourn.inference.adaln.slab import PLANS_SETTING, WIDTH_SETTING
from sojourn.inference.adaln.store import STORE_BYTES_SETTING, STORE_SETTING
from sojourn.inference.adaln.table import Table

MODE_SETTING = "--adaln-cache"
HOST_BYTES_SETTING = "--adaln-host-bytes"
PRECISION_SETTING = "--adaln-precision"


class Mode(StrEnum):
    """When the cache is used."""

    ON = "on"
    """Always; a model that it cannot serve does not load."""
    OFF = "off"
    """Never."""
    AUTO = "auto"
    """Where it can serve the model and costs less than the weights that it replaces."""


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
    """

    mode: Mode = Mode.AUTO
    plans: int = 64
    width: int = 4
    host_bytes: int = 8_000_000_000
    store: Path | None = None
    store_bytes: int = 32_000_000_000
    precision: Precision = Precision.MATCH

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


def _refuse_other_words(setting: str, value: Any, words: type[StrEnum]) -> None:
    if value not in list(words):
        raise SettingRefused(setting, str(value), f"must be one of {', '.join(words)}")


def _refuse_no_directory(path: Path) -> None:
    """A directory that is not there yet is made when the first file is written."""
    if path.exists() and not path.is_dir():
        raise SettingRefused(STORE_SETTING, str(path), "is a file; name a directory")


def slab_bytes(table: Table, *, plans: int, width: int) -> int:
    """Bytes that a slab allocates, before it does."""
    return plans * (width * table.row_bytes + 8)


def check_worth(settings: PlanCacheSettings, family: Family, table: Table) -> None:
    """Whether rows cost less than the weights that they replace, and are used again.

    What is compared is the slab as it is allocated. Rows cost as much as weights at in + 1 of them: 2689 for
    MiniMax-H3, that is 672 plans of width 4.

    Raises:
        ModelRefused: It does not pay; asked of `auto` alone.
    """
    if not family.reusable:
        raise ModelRefused(
            ModelReason.ROWS_NOT_REUSED,
            f"rows of {family.name} depend on the prompt, so each new one would read all projections again; "
            f"set {MODE_SETTING} on for repeated prompts",
        )
    costs = slab_bytes(table, plans=settings.plans, width=settings.width)
    if costs >= table.weight_bytes:
        raise ModelRefused(
            ModelReason.COSTS_MORE,
            f"{settings.plans} plans of {settings.width} rows take {costs} bytes and the projections "
            f"{table.weight_bytes}; lower {PLANS_SETTING} or {WIDTH_SETTING}, or set {MODE_SETTING} on",
        )
