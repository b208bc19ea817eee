"""What a process says about its own weights: the component map as frozen data, and its reader.

A map is the process's word, so nothing in it is taken for granted: a component's ranges are widened to whole pages,
and no page belongs to two of them.
"""

import os
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError
from sojourn.residencyd.errors import MapError, MapForbidden, MapMissing, MapSchemaUnknown, MapTorn
from sojourn.residencyd.kernel.syscalls import PAGE_BYTES
from sojourn.v1 import residency_pb2

SCHEMA_VERSION = 1

# A map of ten thousand storages takes 0.5 MB. What is larger than this is not a map, and is not read into memory.
MAP_BYTES_LIMIT = 64 << 20


class Tier(StrEnum):
    """Which memory bytes are in; the value is the metrics' label."""

    VRAM = "vram"
    HOST_PINNED = "host_pinned"
    HOST_MAPPED = "host_mapped"
    HOST_PAGEABLE = "host_pageable"

    @property
    def is_droppable(self) -> bool:
        """Whether the kernel can drop such pages and read them again."""
        return self is Tier.HOST_MAPPED


@dataclass(frozen=True)
class File:
    """A file as maps print it.

    Attributes:
        device: Major and minor number.
        inode: Its number.
    """

    device: tuple[int, int]
    inode: int


@dataclass(frozen=True)
class Claim:
    """One range of weights.

    Attributes:
        start: First address.
        end: Address after the last.
        tier: Where the process believes it to be.
        file: The mapped file; None where it named none.
        in_use: Read by the running stage.
    """

    start: int
    end: int
    tier: Tier
    file: File | None = None
    in_use: bool = False

    @property
    def size_bytes(self) -> int:
        """Length of the range."""
        return self.end - self.start


@dataclass(frozen=True)
class ComponentClaim:
    """One component of the model.

    Attributes:
        name: In the pipeline.
        class_name: Of the module.
        parameter_bytes: As the process counts them.
        claims: Its ranges, as given.
        needed_now: The running stage uses it.
        needed_next: The next stage does.
    """

    name: str
    class_name: str = ""
    parameter_bytes: int = 0
    claims: tuple[Claim, ...] = ()
    needed_now: bool = False
    needed_next: bool = False

    @property
    def in_use(self) -> bool:
        """Whether the running stage uses it, or any part of it."""
        return self.needed_now or any(claim.in_use for claim in self.claims)

    @property
    def is_cold(self) -> bool:
        """Whether neither the running stage nor the next would miss it."""
        return not self.in_use and not self.needed_next


@dataclass(frozen=True)
class DeviceClaim:
    """An accelerator as the process sees it.

    Attributes:
        index: Among the process's devices.
        name: The driver's name for it.
        shares_host_memory: Whether it has no memory of its own.
    """

    index: int
    name: str
    shares_host_memory: bool


@dataclass(frozen=True)
class ComponentMap:
    """The claim of one process.

    Attributes:
        generation: Rises with every map that the process writes.
        pid: In the process's own pid namespace.
        start_ticks: Clock ticks since boot.
        published_seconds: Unix time.
        next_stage_need_bytes: What the next stage will take.
        components: Of the model.
        devices: In use.
    """

    generation: int
    pid: int
    start_ticks: int
    published_seconds: float = 0.0
    next_stage_need_bytes: int = 0
    components: tuple[ComponentClaim, ...] = ()
    devices: tuple[DeviceClaim, ...] = ()


@dataclass(frozen=True)
class Origin:
    """What ranges that are claimed alike have in common.

    Attributes:
        component: Its name.
        tier: Claimed.
        file: Claimed; None where none was named.
    """

    component: str
    tier: Tier
    file: File | None


class Range(NamedTuple):
    """Whole pages that one component claims, in one way.

    Attributes:
        origin: Who claims them, and how.
        start: First address, on a page.
        end: Address after the last, on a page.
    """

    origin: Origin
    start: int
    end: int


def host_ranges(components: Iterable[ComponentClaim], *, page_bytes: int = PAGE_BYTES) -> tuple[Range, ...]:
    """All that is claimed of the host's address space, in order, in whole pages, no page twice.

    Tensors lie side by side in a checkpoint, so their edges share pages: neighbours that are claimed alike become one
    range, and a page that two claims share goes to the one with the lower address. Ranges that are claimed alike
    share one origin.
    """
    claims = [(claim, component.name) for component in components for claim in component.claims]
    origins: dict[Origin, Origin] = {}
    ranges: list[Range] = []
    end = 0
    for claim, name in sorted(claims, key=lambda pair: (pair[0].start, pair[0].end)):
        start = max(end, claim.start // page_bytes * page_bytes)
        stop = -(-claim.end // page_bytes) * page_bytes
        if claim.tier is Tier.VRAM or claim.end <= claim.start or stop <= start:
            continue
        origin = Origin(name, claim.tier, claim.file)
        origin = origins.setdefault(origin, origin)
        if ranges and ranges[-1].end == start and ranges[-1].origin is origin:
            ranges[-1] = ranges[-1]._replace(end=stop)
        else:
            ranges.append(Range(origin, start, stop))
        end = stop
    return tuple(ranges)


def claimed_bytes(ranges: Iterable[Range]) -> dict[tuple[str, Tier], int]:
    """Sizes of ranges by component and tier."""
    sums: dict[tuple[str, Tier], int] = {}
    for origin, start, end in ranges:
        key = (origin.component, origin.tier)
        sums[key] = sums.get(key, 0) + end - start
    return sums


def from_message(message: residency_pb2.ComponentMap) -> ComponentMap:
    """The map as frozen data.

    Raises:
        KeyError: A storage has no tier, or one that this version does not know.
    """
    return ComponentMap(
        generation=message.generation,
        pid=message.pid,
        start_ticks=message.start_ticks,
        published_seconds=message.published_seconds,
        next_stage_need_bytes=message.next_stage_need_bytes,
        components=tuple(map(_component, message.components)),
        devices=tuple(
            DeviceClaim(index=device.index, name=device.name, shares_host_memory=device.shares_host_memory)
            for device in message.devices
        ),
    )


def _component(message: residency_pb2.Component) -> ComponentClaim:
    return ComponentClaim(
        name=message.name,
        class_name=message.class_name,
        parameter_bytes=message.parameter_bytes,
        claims=tuple(map(_claim, message.storages)),
        needed_now=message.needed_now,
        needed_next=message.needed_next,
    )


def _claim(storage: residency_pb2.Storage) -> Claim:
    return Claim(
        start=storage.address,
        end=min(storage.address + storage.length_bytes, _LAST_ADDRESS),
        tier=_TIERS[storage.tier],
        file=File((storage.device_major, storage.device_minor), storage.inode) if storage.inode else None,
        in_use=storage.in_use,
    )


_LAST_ADDRESS = (1 << 64) - PAGE_BYTES

_TIERS = {
    residency_pb2.TIER_VRAM: Tier.VRAM,
    residency_pb2.TIER_HOST_PINNED: Tier.HOST_PINNED,
    residency_pb2.TIER_HOST_MAPPED: Tier.HOST_MAPPED,
    residency_pb2.TIER_HOST_PAGEABLE: Tier.HOST_PAGEABLE,
}


def parse_file(path: Path, content: bytes) -> ComponentMap:
    """Reads the content of a map's file.

    Raises:
        MapTorn: It is cut, or something else.
        MapSchemaUnknown: It is whole, and of another version.
    """
    file, message = residency_pb2.ComponentMapFile(), residency_pb2.ComponentMap()
    try:
        file.ParseFromString(content)
        if not file.component_map or zlib.crc32(file.component_map) != file.crc32:
            raise MapTorn(path, "the checksum does not fit: cut, or no component map")
        message.ParseFromString(file.component_map)
    except DecodeError as error:
        raise MapTorn(path, "no component map") from error
    if message.schema_version != SCHEMA_VERSION:
        raise MapSchemaUnknown(
            path,
            f"version {message.schema_version}, and this residencyd reads version {SCHEMA_VERSION}: "
            f"run the same release of both",
        )
    if twice := {name for name, count in Counter(part.name for part in message.components).items() if count > 1}:
        raise MapTorn(path, f"components are listed twice: {', '.join(sorted(twice))}")
    try:
        return from_message(message)
    except KeyError as error:
        raise MapSchemaUnknown(path, f"a storage is in tier {error}, which this residencyd does not know") from error


def unreadable(path: Path, error: OSError) -> MapError:
    """What to say of a file that cannot be opened or looked at."""
    if isinstance(error, PermissionError):
        return MapForbidden(path, f"uid {os.geteuid()} may not read it: give both containers the same runAsUser")
    return MapMissing(path, f"no component map ({error.strerror}): is the model process up, and the volume shared?")


def read_map(path: Path) -> ComponentMap:
    """The map in a file.

    Raises:
        MapMissing, MapForbidden: There is no such file, or it cannot be read.
        MapTorn, MapSchemaUnknown: It is of no use.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAP_BYTES_LIMIT + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(content) > MAP_BYTES_LIMIT:
        raise MapTorn(path, f"more than {MAP_BYTES_LIMIT} bytes: no component map")
    return parse_file(path, content)
