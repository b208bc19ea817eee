"""Puts the fused forwards of one fusion on a transformer, all of them or none, and takes them off again."""

import types
from dataclasses import dataclass, field

from sojourn.inference.errors import SojournError
from sojourn.inference.quality.observer import Part
from sojourn.inference.quality.sites import FusionSites, site_obstacle
from torch import nn


class MountRefused(SojournError):
    """A part cannot be put on a transformer as it is; the message says which site, and why."""


class UnmountFailed(SojournError):
    """Someone has changed a mounted module, so that the stock forward cannot be brought back.

    No request may run on the transformer as if it were stock.
    """


@dataclass
class MountedFusion:
    """One fusion on one transformer."""

    part: Part
    sites: int = 0
    _put: list[tuple[nn.Module, types.MethodType]] = field(default_factory=list)

    @classmethod
    def on(cls, transformer: nn.Module, place: FusionSites) -> "MountedFusion":
        """Mounts every site.

        Raises:
            MountRefused: There is no site, or one cannot be mounted; nothing is changed.
        """
        found = place.find(transformer)
        refused = [reason for name, module, kind in found if (reason := site_obstacle(name, module, kind))]
        if refused or not found:
            raise MountRefused(refused[0] if refused else f"{type(transformer).__name__} has no site")
        mounted = cls(place.fusion.part)
        for _, module, kind in found:
            fused = types.MethodType(kind.forward, module)
            module.forward = fused
            mounted._put.append((module, fused))
            mounted.sites += kind.sites
        return mounted

    def undo(self) -> None:
        """Brings every stock forward back. May be called again.

        Raises:
            UnmountFailed: A module's forward is not the one that was put there; it and those after it stay.
        """
        while self._put:
            module, fused = self._put[-1]
            if module.__dict__.get("forward") is not fused:
                raise UnmountFailed(
                    f"the fused forward of a {type(module).__name__} was replaced by someone else while it was "
                    "mounted; start the process anew"
                )
            del module.forward
            self._put.pop()
