"""The component map: what this process claims about its weights, for residencyd to hold against the kernel's word.

It is written to a file that is replaced whole, at load and whenever a tier, a use or the next stage changes. So it can
be read while this process hangs, which is when one needs it.
"""

import contextlib
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from sojourn.inference.offload.lifecycle import Situation
from sojourn.inference.residency.report import StoragePlace, storages, weights_of
from sojourn.inference.watch import Stage
from sojourn.residencyd.kernel import atomic_file
from sojourn.residencyd.kernel.maps import Lookup, MapsTable, read_maps
from sojourn.residencyd.kernel.process import read_stat
from sojourn.v1 import inference_pb2, residency_pb2

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1

_TIERS = {
    "vram": residency_pb2.TIER_VRAM,
    "host_pinned": residency_pb2.TIER_HOST_PINNED,
    "host_mapped": residency_pb2.TIER_HOST_MAPPED,
    "host_pageable": residency_pb2.TIER_HOST_PAGEABLE,
}


@dataclass(frozen=True, kw_only=True)
class PublishedComponent:
    """A component as the map tells of it.

    Attributes:
        name: In the pipeline.
        value: The component.
        hosted: What offload keeps of it on the host, now.
        device_buffers: What offload keeps of it on a device, now.
    """

    name: str
    value: object
    hosted: Callable[[], Iterable[torch.Tensor]] = lambda: ()
    device_buffers: Callable[[], Iterable[torch.Tensor]] = lambda: ()


class ComponentMapPublisher:
    """Writes the map. A failure to write is logged once per change of state, and never fails a request.

    Args:
        path: Of the file; its folder is shared with residencyd.
        components: All components, weightless ones left out.
        devices: Index, name, and whether it shares host memory, of each accelerator.
        need_bytes: Host memory that the next stage will take beyond what is resident of its components.
        clock: Unix time.
    """

    def __init__(
        self,
        path: Path,
        components: Iterable[PublishedComponent],
        *,
        devices: Iterable[tuple[int, str, bool]] = (),
        need_bytes: Callable[[Situation], int] = lambda situation: 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.generation = 0
        self._components = [c for c in components if isinstance(c.value, torch.nn.Module)]
        self._devices = tuple(devices)
        self._need_bytes = need_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._failing = False

    def publish(self, situation: Situation) -> None:
        """Writes a map of the next generation."""
        with self._lock:
            self.generation += 1
            try:
                atomic_file.replace(self.path, as_file(self.build(situation)))
                self._failing = False
            except OSError as error:
                if not self._failing:
                    log.warning("The component map %s cannot be written, residencyd is blind: %s", self.path, error)
                self._failing = True

    def withdraw(self) -> None:
        """Takes the map away: there is nothing to claim any more."""
        with self._lock, contextlib.suppress(OSError):
            self.path.unlink()

    def build(self, situation: Situation) -> residency_pb2.ComponentMap:
        """The map as it is now."""
        mappings = MapsTable(read_maps(os.getpid()))
        return residency_pb2.ComponentMap(
            schema_version=SCHEMA_VERSION,
            generation=self.generation,
            pid=os.getpid(),
            start_ticks=read_stat(os.getpid()).start_ticks,
            published_seconds=self._clock(),
            stage=_stage(situation.stage),
            next_stage=_stage(situation.next_stage),
            next_stage_need_bytes=self._need_bytes(situation),
            components=[_component(part, situation, mappings) for part in self._components],
            devices=[
                residency_pb2.Device(index=index, name=name, shares_host_memory=shares)
                for index, name, shares in self._devices
            ],
        )


def as_file(component_map: residency_pb2.ComponentMap) -> bytes:
    """A map with its checksum, as residencyd reads it."""
    content = component_map.SerializeToString()
    return residency_pb2.ComponentMapFile(crc32=zlib.crc32(content), component_map=content).SerializeToString()


def _stage(stage: Stage | None) -> "inference_pb2.Stage.ValueType":
    return inference_pb2.Stage.Value(f"STAGE_{stage.name if stage else 'UNSPECIFIED'}")


def _component(part: PublishedComponent, situation: Situation, mappings: Lookup) -> residency_pb2.Component:
    needed_now = part.name in situation.needed_now
    held = (*weights_of(part.value), *part.hosted(), *part.device_buffers())
    places = list(storages(held, mappings))
    return residency_pb2.Component(
        name=part.name,
        class_name=type(part.value).__name__,
        parameter_bytes=parameter_bytes(part),
        storages=[_storage(place, mappings, in_use=needed_now) for place in places],
        needed_now=needed_now,
        needed_next=part.name in situation.needed_next,
    )


def parameter_bytes(part: PublishedComponent) -> int:
    """Bytes of parameters and buffers wherever they are: those in the module, and those that offload hosts for it."""
    seen: Mapping[tuple[str, int], int] = {
        (str(tensor.device), tensor.untyped_storage().data_ptr()): tensor.untyped_storage().nbytes()
        for tensor in (*weights_of(part.value), *part.hosted())
        if tensor.numel() > 1 or tensor.untyped_storage().nbytes() > tensor.element_size()
    }
    return sum(seen.values())


def _storage(place: StoragePlace, mappings: Lookup, *, in_use: bool) -> residency_pb2.Storage:
    storage = residency_pb2.Storage(
        address=place.address, length_bytes=place.size_bytes, tier=_TIERS[place.tier], in_use=in_use
    )
    if place.tier == "host_mapped":
        mapping = mappings.overlapping(place.address, place.address + 1)[0]
        storage.device_major, storage.device_minor = mapping.device
        storage.inode = mapping.inode
    return storage
