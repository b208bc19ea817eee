"""What the host keeps of a unit of weights, and how it gets to the device.

A *unit* is what is loaded and dropped as one: the extents that one layer alone uses, or one extent that several
layers share (tied weights). Its store holds the bytes pinned, pageable, or where the checkpoint is mapped. While the
unit is away its parameters are placeholders of one element.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from sojourn.inference.offload.budget import PinLedger
from sojourn.inference.offload.hosting import HostTier
from sojourn.inference.offload.layout import Layout
from sojourn.inference.offload.observer import Fallback, Observer
from sojourn.inference.offload.pinning import PinDriver, RegisterFailed, pin_filled

Buffers = Mapping[torch.dtype, torch.Tensor]


class CannotFlatten(ValueError):
    """The weights of an extent lie in several storages, none of which spans it."""


def extent_bytes(tensors: Sequence[torch.Tensor], address: int, size_bytes: int) -> torch.Tensor:
    """A run of memory as uint8, seen through one of the tensors that lie in it. Nothing is copied.

    Raises:
        CannotFlatten: No storage of theirs holds the whole run.
    """
    for tensor in tensors:
        storage = tensor.untyped_storage()
        start = address - storage.data_ptr()
        if start >= 0 and start + size_bytes <= storage.nbytes():
            return torch.empty(0, dtype=torch.uint8).set_(storage, start, (size_bytes,), (1,))
    raise CannotFlatten(
        f"no storage holds the {size_bytes} bytes at {address:#x}: {len(tensors)} weights overlap there"
    )


@dataclass(frozen=True, kw_only=True)
class Store:
    """The host's copy of a unit.

    Attributes:
        tier: What the kernel can do with it.
        layout: Where the weights lie in flat buffers.
        runs: What to copy: (dtype of the flat buffer, offset in it, uint8 bytes on the host).
    """

    tier: HostTier
    layout: Layout
    runs: tuple[tuple[torch.dtype, int, torch.Tensor], ...]

    def copy_into(self, buffers: Buffers, copy: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Writes everything into flat buffers of the layout's sizes, by `copy(destination, source)`."""
        for dtype, offset, run in self.runs:
            copy(buffers[dtype][offset : offset + run.numel()], run)


def mapped_store(layout: Layout, originals: Mapping[str, torch.Tensor]) -> Store:
    """Leaves the weights where they are.

    Args:
        layout: Of the unit.
        originals: Its weights by name. The store views their memory through tensors of its own, since the parameters
            are going to be placeholders.

    Raises:
        CannotFlatten: See `extent_bytes`.
    """
    runs = tuple(
        (
            extent.dtype,
            offset,
            extent_bytes([originals[weight.name] for weight in extent.weights], extent.address, extent.size_bytes),
        )
        for extent, offset in layout.extents
    )
    return Store(tier=HostTier.MAPPED, layout=layout, runs=runs)


def pageable_store(source: Store) -> Store:
    """Copies into ordinary memory."""
    return _flat(source, HostTier.PAGEABLE, lambda size, fill: _filled(torch.empty(size, dtype=torch.uint8), fill))


@dataclass(kw_only=True)
class Pinner:
    """Makes pinned stores while budget and driver grant them.

    Attributes:
        driver: Who locks.
        ledger: Who grants.
        observer: Told of refusals.
        warn: Called with a text at the first refusal by each.
    """

    driver: PinDriver
    ledger: PinLedger
    observer: Observer
    warn: Callable[[str], None]
    _warned: set[Fallback] = field(default_factory=set)

    def store(self, source: Store) -> Store:
        """A pinned copy; pageable where the budget or the driver refuses, warned of once and counted."""
        try:
            return _flat(source, HostTier.PINNED, self._pinned)
        except _OverBudget:
            self._fell_back(Fallback.PIN, f"no budget to pin {source.layout.total_bytes} bytes more")
        except (RegisterFailed, OSError) as error:
            self._fell_back(Fallback.REGISTER, str(error))
        return pageable_store(source)

    def _pinned(self, size_bytes: int, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
        buffer = pin_filled(size_bytes, fill, driver=self.driver, ledger=self.ledger)
        if buffer is None:
            raise _OverBudget
        return buffer

    def _fell_back(self, reason: Fallback, why: str) -> None:
        self.observer.fell_back(reason=reason)
        if reason not in self._warned:
            self._warned.add(reason)
            self.warn(f"weights go to pageable memory instead of pinned, and their copies will wait: {why}")


class _OverBudget(Exception):
    """The ledger refused."""


def _flat(
    source: Store, tier: HostTier, allocate: Callable[[int, Callable[[torch.Tensor], None]], torch.Tensor]
) -> Store:
    """A store of one run per dtype."""
    runs = []
    for dtype, size in source.layout.buffer_bytes.items():
        parts = [(offset, run) for kind, offset, run in source.runs if kind is dtype]
        runs.append((dtype, 0, allocate(size, lambda buffer, parts=parts: _write(buffer, parts))))  # type: ignore[misc]
    return Store(tier=tier, layout=source.layout, runs=tuple(runs))


def _write(buffer: torch.Tensor, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
    for offset, run in parts:
        buffer[offset : offset + run.numel()].copy_(run)


def _filled(buffer: torch.Tensor, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
    fill(buffer)
    return buffer
