"""Snapshots as messages of ResidencyService, and when two of those differ. Pure."""

from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.message import Message
from sojourn.residencyd.attribution import ComponentBytes
from sojourn.residencyd.claims import Tier
from sojourn.residencyd.devices import DeviceMemory
from sojourn.residencyd.family import Child
from sojourn.residencyd.files import Cached
from sojourn.residencyd.headroom import Cold
from sojourn.residencyd.snapshots import ProcessReading, Snapshot
from sojourn.v1 import residency_pb2 as pb

TIER_VALUES = {
    Tier.VRAM: pb.TIER_VRAM,
    Tier.HOST_PINNED: pb.TIER_HOST_PINNED,
    Tier.HOST_MAPPED: pb.TIER_HOST_MAPPED,
    Tier.HOST_PAGEABLE: pb.TIER_HOST_PAGEABLE,
}

# What moves with every look though nothing about the weights has changed: the looking itself, and what the machine has
# left for reasons of its own.
_ALWAYS_MOVING = frozenset(
    {"scanned_seconds", "scan_duration_seconds", "memory", "room_bytes", "devices", "major_faults", "mappings"}
)


def residency(snapshot: Snapshot, *, children: Callable[[int], Iterable[Child]] = lambda pid: ()) -> pb.Residency:
    """A snapshot as a message.

    Args:
        snapshot: The look.
        children: Descendants of a process that was seen.
    """
    message = pb.Residency(
        scanned_seconds=snapshot.scanned_seconds,
        scan_duration_seconds=snapshot.duration_seconds,
        processes=[_process(reading, children) for reading in snapshot.processes],
        memory=_memory(snapshot),
        devices=[_device(device) for device in snapshot.devices],
        sources=[pb.Source(name=name, usable=not why, message=why) for name, why in snapshot.sources.items()],
    )
    if snapshot.headroom:
        message.headroom.room_bytes = snapshot.headroom.room_bytes
        message.headroom.cold_bytes = snapshot.headroom.cold_bytes
        message.headroom.stuck_bytes = snapshot.headroom.stuck_bytes
        message.headroom.need_bytes = snapshot.headroom.need_bytes
    return message


def _process(reading: ProcessReading, children: Callable[[int], Iterable[Child]]) -> pb.ProcessResidency:
    message = pb.ProcessResidency(
        pid=reading.pid,
        start_ticks=reading.start_ticks,
        blind_reason=reading.blind_reason,
        blind_message=reading.blind_message,
        generation=reading.claim.generation if reading.claim else 0,
        published_seconds=reading.claim.published_seconds if reading.claim else 0.0,
        components=[
            _component(part, reading.cold.get(part.name), reading.cached.get(part.name)) for part in reading.components
        ],
        mappings=reading.mappings,
        major_faults=reading.major_faults,
    )
    if reading.unattributed:
        message.unattributed.file_bytes = reading.unattributed.file_bytes
        message.unattributed.anonymous_bytes = reading.unattributed.anonymous_bytes
        message.unattributed.shared_bytes = reading.unattributed.shared_bytes
    if reading.seen:
        message.children.extend(
            pb.ChildProcess(pid=child.pid, name=child.name, resident_bytes=child.resident_bytes)
            for child in children(reading.pid)
        )
    return message


def _component(part: ComponentBytes, cold: Cold | None, cached: Cached | None) -> pb.ComponentResidency:
    stuck = cold.stuck_bytes if cold else {}
    return pb.ComponentResidency(
        name=part.name,
        class_name=part.claim.class_name,
        parameter_bytes=part.claim.parameter_bytes,
        in_use=part.claim.in_use,
        tiers=[
            pb.TierBytes(
                tier=TIER_VALUES[tier],
                mapped_bytes=held.mapped_bytes,
                resident_bytes=held.resident_bytes,
                claimed_bytes=held.claimed_bytes,
            )
            for tier, held in part.tiers.items()
        ],
        swapped_bytes=part.swapped_bytes,
        disagreements=[
            pb.Disagreement(kind=kind, size_bytes=size) for kind, size in part.disagreements.items() if size
        ],
        page_cache=pb.PageCache(size_bytes=cached.size_bytes, estimate=cached.estimate) if cached else None,
        cold_bytes=cold.cold_bytes if cold else 0,
        stuck=[pb.Stuck(reason=reason, size_bytes=size) for reason, size in stuck.items() if size],
    )


def _memory(snapshot: Snapshot) -> pb.HostMemory:
    message = pb.HostMemory(
        pressure={
            resource: pb.Pressure(waiting_seconds=found.waiting_seconds, stalled_seconds=found.stalled_seconds)
            for resource, found in snapshot.pressure.items()
        }
    )
    if snapshot.memory:
        message.total_bytes = snapshot.memory.total_bytes
        message.available_bytes = snapshot.memory.available_bytes
    group = snapshot.tightest
    if group and group.limit_bytes is not None:
        message.tightest.path = str(group.path)
        message.tightest.limit_bytes = group.limit_bytes
        message.tightest.usage_bytes = group.usage_bytes
        message.tightest.reclaimable_bytes = group.reclaimable_bytes
    return message


def _device(device: DeviceMemory) -> pb.DeviceMemory:
    return pb.DeviceMemory(
        device=device.device,
        absent_reason=device.absent_reason,
        used_bytes=device.used_bytes,
        free_bytes=device.free_bytes,
        shares_host_memory=device.shares_host_memory,
    )


def differ(before: Message, after: Message, *, threshold_bytes: int = 0) -> bool:
    """Whether two messages of one kind differ in what matters.

    Args:
        before: One.
        after: The other.
        threshold_bytes: Byte counts that are closer than this are equal; 0 and 1 mean exactly equal only.
    """
    return any(
        _field_differs(field, before, after, threshold_bytes)
        for field in before.DESCRIPTOR.fields
        if field.name not in _ALWAYS_MOVING
    )


def _field_differs(field: Any, before: Message, after: Message, threshold_bytes: int) -> bool:
    one, other = getattr(before, field.name), getattr(after, field.name)
    if field.is_repeated:
        pairs = list(zip(one, other, strict=False))
        return len(one) != len(other) or any(differ(a, b, threshold_bytes=threshold_bytes) for a, b in pairs)
    if field.message_type:
        return before.HasField(field.name) != after.HasField(field.name) or differ(
            one, other, threshold_bytes=threshold_bytes
        )
    if field.name.endswith("_bytes"):
        return bool(abs(one - other) >= max(1, threshold_bytes))
    return bool(one != other)
