"""What is mounted on each transformer, and the way from one tier to another.

A tier is a list of parts in the order of their mounting: fusions first, the step cache over them. What two tiers begin
with alike stays where it is; the rest is taken off last to first, then put on. Nothing is recorded before it is there,
so that a part that failed, or a transformer that was not loaded yet, is tried again with the next request that asks.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from sojourn.inference.quality.fusion_mount import MountedFusion, UnmountFailed
from sojourn.inference.quality.observer import Action, Observer, Part
from sojourn.inference.quality.sites import FusionSites, TransformerSites
from sojourn.inference.quality.step_cache import MountedStepCache
from torch import nn

_log = logging.getLogger(__name__)


class Mounted(Protocol):
    """A part that is on a transformer."""

    part: Part
    sites: int

    def undo(self) -> None:
        """Takes it off; harmless where it is off."""


@dataclass(frozen=True)
class Wanted:
    """A part to be on a transformer.

    Attributes:
        part: Which.
        mount: Puts it on.
        setting: What else distinguishes it from another mount of the same part.
    """

    part: Part
    mount: Callable[[Any], Mounted] = field(compare=False)
    setting: float | None = None


def wanted_fusion(place: FusionSites) -> Wanted:
    """One fusion."""
    return Wanted(place.fusion.part, lambda transformer: MountedFusion.on(transformer, place))


def wanted_step_cache(place: TransformerSites, threshold: float, observer: Observer) -> Wanted:
    """The step cache at a threshold."""

    def mount(transformer: Any) -> Mounted:
        return MountedStepCache.on(transformer, place, threshold=threshold, observer=observer)

    return Wanted(Part.STEP_CACHE, mount, threshold)


class Mounts:
    """The parts on all transformers. Held by one request at a time, or by several that want the same."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._lock = threading.Lock()
        self._on: WeakKeyDictionary[nn.Module, list[tuple[Wanted, Mounted]]] = WeakKeyDictionary()

    def bring(self, transformer: nn.Module, wanted: Sequence[Wanted]) -> dict[Part, str]:
        """Makes the parts on a transformer those that are wanted, as far as they can be mounted.

        Returns:
            Why a part is not on it, for each that could not be mounted.

        Raises:
            UnmountFailed: Something cannot be taken off; the transformer must not run.
        """
        with self._lock:
            on = self._on.setdefault(transformer, [])
            if [part for part, _ in on] == list(wanted):
                return {}
            alike = _alike([part for part, _ in on], wanted)
            while len(on) > alike:
                self._take_off(transformer, on)
            failed = {}
            for part in wanted[alike:]:
                if (reason := self._put_on(transformer, part, on)) is not None:
                    failed[part.part] = reason
            return failed

    def fresh(self, transformer: nn.Module) -> None:
        """A clip begins or has ended: nothing of another one may be remembered."""
        for _, mounted in self._on.get(transformer, ()):
            if isinstance(mounted, MountedStepCache):
                mounted.fresh()

    def parts(self, transformer: nn.Module) -> tuple[Part, ...]:
        """What is on a transformer."""
        return tuple(mounted.part for _, mounted in self._on.get(transformer, ()))

    def _put_on(self, transformer: nn.Module, wanted: Wanted, on: list[tuple[Wanted, Mounted]]) -> str | None:
        try:
            mounted = wanted.mount(transformer)
        except UnmountFailed:
            raise
        except Exception as error:
            self._tell(transformer, wanted.part, Action.FAILED, reason=str(error))
            return str(error)
        on.append((wanted, mounted))
        self._tell(transformer, wanted.part, Action.MOUNT, sites=mounted.sites)
        return None

    def _take_off(self, transformer: nn.Module, on: list[tuple[Wanted, Mounted]]) -> None:
        mounted = on[-1][1]
        mounted.undo()
        on.pop()
        self._tell(transformer, mounted.part, Action.UNMOUNT, sites=mounted.sites)

    def _tell(self, transformer: nn.Module, part: Part, action: Action, **facts: object) -> None:
        facts = {"part": part.value, "transformer": type(transformer).__name__, **facts}
        _log.debug("quality part: %s", action.value, extra=facts)
        self._observer.changed(part=part, action=action)
        everywhere = [mounted for on in self._on.values() for _, mounted in on]
        self._observer.mounted(part=part, sites=sum(m.sites for m in everywhere if m.part is part))


def _alike(one: Sequence[Wanted], other: Sequence[Wanted]) -> int:
    """How many parts two tiers begin with alike."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
