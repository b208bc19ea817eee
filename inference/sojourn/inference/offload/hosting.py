"""The hosting plan: for each layer, what its bytes on the host are. Decided once, from a budget.

The tiers differ in what the kernel can do with the bytes when memory runs short: nothing (pinned), drop them
(mapped: they are in the checkpoint), or swap them if there is swap (pageable).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sojourn.inference.offload.budget import HostMemory


class HostTier(StrEnum):
    """Where the host keeps a layer."""

    PINNED = "host_pinned"
    MAPPED = "host_mapped"
    PAGEABLE = "host_pageable"


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Sizes of one layer.

    Attributes:
        copy_bytes: What a copy of its weights takes, alignment included; pins are rounded to pages by the caller.
        mapped_bytes: Part of its weights that lies in a checkpoint mapping now; the rest is anonymous already.
    """

    copy_bytes: int
    mapped_bytes: int


@dataclass(frozen=True, kw_only=True)
class HostingPlan:
    """Tier of each layer, by index.

    Attributes:
        tiers: One per layer.
        pinned_bytes: Sum of the pinned layers' copies.
        new_anonymous_bytes: Memory that carrying the plan out takes: copies of what is mapped now. A copy that
            replaces an anonymous original is a wash.
        fits: Whether that leaves the copy reserve free; if not, the host is the limit.
    """

    tiers: tuple[HostTier, ...]
    pinned_bytes: int
    new_anonymous_bytes: int
    fits: bool


def plan_hosting(
    layers: Sequence[LayerBytes],
    *,
    streamed: Sequence[int],
    memory: HostMemory,
    pin_budget_bytes: int,
) -> HostingPlan:
    """Chooses the tier of each layer.

    Pins go to streamed layers first, in their order, since they pay in every step; then to resident ones. If the
    copies of unpinned layers would not fit, these layers stay on their mapping. If that is not enough, pins are given
    back from the tail of their order, one by one.

    Args:
        layers: Sizes, by index.
        streamed: Indices of the layers that stream.
        memory: What the host can give.
        pin_budget_bytes: What may be locked for this component.
    """
    if memory.shares_device:
        return _placed(layers, pinned=(), keep_mapped=True, memory=memory)
    resident = [i for i in range(len(layers)) if i not in set(streamed)]
    pinned = _affordable([*streamed, *resident], layers, pin_budget_bytes)
    keep_mapped = not memory.copies_fit(sum(layer.mapped_bytes for layer in layers))
    while keep_mapped and pinned and not memory.copies_fit(sum(layers[i].mapped_bytes for i in pinned)):
        pinned = pinned[:-1]
    return _placed(layers, pinned=pinned, keep_mapped=keep_mapped, memory=memory)


def _affordable(order: Sequence[int], layers: Sequence[LayerBytes], budget_bytes: int) -> list[int]:
    """The layers that can be pinned, in order. One that does not fit is passed over for smaller ones behind it."""
    pinned = []
    for index in order:
        if layers[index].copy_bytes <= budget_bytes:
            budget_bytes -= layers[index].copy_bytes
            pinned.append(index)
    return pinned


def _placed(
    layers: Sequence[LayerBytes], *, pinned: Sequence[int], keep_mapped: bool, memory: HostMemory
) -> HostingPlan:
    tiers = tuple(_tier(layer, i in pinned, keep_mapped) for i, layer in enumerate(layers))
    new_anonymous_bytes = sum(
        layer.mapped_bytes for layer, tier in zip(layers, tiers, strict=True) if tier is not HostTier.MAPPED
    )
    return HostingPlan(
        tiers=tiers,
        pinned_bytes=sum(layers[i].copy_bytes for i in pinned),
        new_anonymous_bytes=new_anonymous_bytes,
        fits=memory.copies_fit(new_anonymous_bytes),
    )


def _tier(layer: LayerBytes, pinned: bool, keep_mapped: bool) -> HostTier:
    if pinned:
        return HostTier.PINNED
    return HostTier.MAPPED if keep_mapped and layer.mapped_bytes else HostTier.PAGEABLE
