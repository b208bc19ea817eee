"""Where a component's weights are, in four buckets that differ in what the kernel can do with the bytes.

Sizes are those of storages, each counted once however many tensors view it, so that one flat buffer behind many
weights counts in full and a placeholder next to nothing. Where a weight is in two places at once, on the host and as a
copy on the device, both are counted: both are memory. Pinned is asked before file-backed, because pinned stores sit
behind a named mapping as files do.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from sojourn.inference.offload.mapped import is_file
from sojourn.residencyd.kernel.maps import PINNED_STORE_NAME, Lookup

log = logging.getLogger(__name__)

GB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Residency:
    """Bytes of weights by where they are.

    Attributes:
        vram: In memory of a device.
        host_pinned: In host memory that a driver has locked: the kernel can do nothing with it.
        host_mapped: In a mapping of a file: the kernel can drop it. This is the mapping's size; how much of it is
            resident only the kernel knows.
        host_pageable: In other host memory: swap, if there is any.
    """

    vram: int = 0
    host_pinned: int = 0
    host_mapped: int = 0
    host_pageable: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.vram + self.host_pinned + self.host_mapped + self.host_pageable

    def __str__(self) -> str:
        """Parts that are not zero, in GB of 2^30 bytes; "weights: none" if all are."""
        parts = {
            "vram": self.vram,
            "host pinned": self.host_pinned,
            "host mapped": self.host_mapped,
            "host pageable": self.host_pageable,
        }
        text = ", ".join(f"{label}: {size / GB:.2f} GB" for label, size in parts.items() if size)
        return text or "weights: none"


@dataclass(frozen=True, kw_only=True)
class StoragePlace:
    """One storage.

    Attributes:
        address: Of its first byte, in this process or on the device.
        size_bytes: Its length.
        tier: The bucket, a field of `Residency`.
    """

    address: int
    size_bytes: int
    tier: str


def storages(tensors: Iterable[torch.Tensor], mappings: Lookup) -> Iterator[StoragePlace]:
    """The storages behind tensors, each once. Tensors without memory (meta, empty) have none.

    Args:
        tensors: Of any devices.
        mappings: Of this process.
    """
    seen: set[tuple[str, int]] = set()
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):
            continue  # functional and other wrapped tensors own no memory
        key = (str(tensor.device), address)
        if not address or key in seen:
            continue
        seen.add(key)
        yield StoragePlace(address=address, size_bytes=size, tier=_tier(tensor, address, mappings))


def _tier(tensor: torch.Tensor, address: int, mappings: Lookup) -> str:
    if tensor.device.type != "cpu":
        return "vram"
    found = mappings.overlapping(address, address + 1)
    if (found and found[0].name.startswith(f"/memfd:{PINNED_STORE_NAME}")) or _is_pinned(tensor):
        return "host_pinned"
    return "host_mapped" if found and is_file(found[0]) else "host_pageable"


def _is_pinned(tensor: torch.Tensor) -> bool:
    try:
        return torch.cuda.is_available() and tensor.is_pinned()
    except RuntimeError:
        return False


def weights_of(component: object) -> Iterator[torch.Tensor]:
    """Parameters and buffers of a component; nothing for one that is no module."""
    if isinstance(component, torch.nn.Module):
        yield from (parameter.data for parameter in component.parameters())
        yield from component.buffers()


def residency_of(component: object, mappings: Lookup, *, hosted: Iterable[torch.Tensor] = ()) -> Residency | None:
    """Where a component is; None for an object that has no weights by nature, such as a tokenizer.

    Args:
        component: The component.
        mappings: Of this process.
        hosted: What offload keeps of it on the host.
    """
    if not isinstance(component, torch.nn.Module):
        return None
    sums = dict.fromkeys(Residency.__dataclass_fields__, 0)
    for place in storages((*weights_of(component), *hosted), mappings):
        sums[place.tier] += place.size_bytes
    return Residency(**sums)


def log_loaded(name: str, component: object, residency: Residency, *, size_bytes: int) -> None:
    """The line at load. Placement may still change; see `log_settled`.

    Args:
        name: Of the component.
        component: The component.
        residency: Where it is now.
        size_bytes: Its parameters and buffers, wherever they are.
    """
    log.info("Loaded %s: %s. size %.2f GB, %s", name, type(component).__name__, size_bytes / GB, residency)


def log_settled(residencies: Mapping[str, Residency]) -> None:
    """The line once every component has its place: the one above is older than the placement of those that came after.

    Args:
        residencies: By component name.
    """
    log.info("Settled: %s", ", ".join(f"{name} ({residency})" for name, residency in residencies.items()))
