"""What the quality tiers have to tell: one method per fact, implemented by the process's metrics."""

from enum import StrEnum
from typing import Protocol


class Part(StrEnum):
    """What can be mounted on a transformer; the values are those of the metric label `family`."""

    GATED_RESIDUAL = "gated_residual"
    NORM_MODULATE = "norm_modulate"
    STEP_CACHE = "step_cache"


class Action(StrEnum):
    """What was done to it; the values are those of the metric label `action`."""

    MOUNT = "mount"
    UNMOUNT = "unmount"
    FAILED = "failed"


class Observer(Protocol):
    """Receives facts from any thread; must neither block nor raise."""

    def changed(self, *, part: Part, action: Action) -> None:
        """A part was mounted on a transformer or unmounted, or could not be mounted."""

    def mounted(self, *, part: Part, sites: int) -> None:
        """So many sites, over all transformers, run on a part now."""

    def evaluated(self, *, skipped: bool) -> None:
        """The step cache let an evaluation of the transformer run, or took its result from the step before."""


class _Silent:
    """Tells nobody."""

    def changed(self, *, part: Part, action: Action) -> None: ...

    def mounted(self, *, part: Part, sites: int) -> None: ...

    def evaluated(self, *, skipped: bool) -> None: ...


silent: Observer = _Silent()
