"""Component maps as a model process writes them."""

import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sojourn.residencyd.kernel import atomic_file
from sojourn.residencyd.kernel.process import read_stat
from sojourn.v1 import residency_pb2 as pb

VRAM, PINNED, MAPPED, PAGEABLE = (
    pb.TIER_VRAM,
    pb.TIER_HOST_PINNED,
    pb.TIER_HOST_MAPPED,
    pb.TIER_HOST_PAGEABLE,
)


def storage(address: int, length: int, tier: pb.Tier, *, file: Path | None = None, **more: Any) -> pb.Storage:
    """One range; of a file, as its stat says."""
    if file:
        found = file.stat()
        more |= {
            "device_major": os.major(found.st_dev),
            "device_minor": os.minor(found.st_dev),
            "inode": found.st_ino,
        }
    return pb.Storage(address=address, length_bytes=length, tier=tier, **more)


def component(name: str, *storages: pb.Storage, **more: Any) -> pb.Component:
    return pb.Component(name=name, class_name=name.title(), storages=storages, **more)


def message(pid: int, components: Iterable[pb.Component], **more: Any) -> pb.ComponentMap:
    fields = {"schema_version": 1, "generation": 1, "published_seconds": 1000.0} | more
    if "start_ticks" not in fields:
        fields["start_ticks"] = read_stat(pid).start_ticks
    return pb.ComponentMap(pid=pid, components=components, **fields)


def sealed(claim: pb.ComponentMap) -> bytes:
    content = claim.SerializeToString()
    return pb.ComponentMapFile(crc32=zlib.crc32(content), component_map=content).SerializeToString()


def publish(folder: Path, pid: int, *components: pb.Component, name: str = "model.pb", **more: Any) -> Path:
    """Writes the map of a process into a folder that residencyd looks at."""
    atomic_file.replace(folder / name, sealed(message(pid, components, **more)))
    return folder / name
