"""Looks at all processes whose maps are published, and at what the machine leaves them.

What cannot be known of a process is told as a reason; bytes are never made up for it. A look is not repeated before
the interval floor has passed, however often it is asked for. Nothing is remembered that could outlive its model,
except how many errors there were.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sojourn.residencyd import sources as source_names
from sojourn.residencyd.deep import Budget
from sojourn.residencyd.devices import read_devices
from sojourn.residencyd.errors import MapError, Sandboxed
from sojourn.residencyd.headroom import Headroom, room_bytes
from sojourn.residencyd.kernel.cgroups import Group
from sojourn.residencyd.kernel.errors import KernelError
from sojourn.residencyd.kernel.meminfo import MemInfo, read_meminfo
from sojourn.residencyd.kernel.pressure import RESOURCES, Pressure, read_pressure
from sojourn.residencyd.map_shelf import MapShelf, ShelvedMap
from sojourn.residencyd.reading import Memory, read_process
from sojourn.residencyd.settings import Settings
from sojourn.residencyd.snapshots import BLIND_REASONS, ProcessReading, Snapshot
from sojourn.residencyd.sources import Sources


class Scanner:
    """Makes snapshots. Safe to use from several threads: they wait for one look and share it.

    Args:
        settings: What to look at.
        timer: Seconds, monotonic; times looks.
        cpu_timer: CPU seconds of the calling thread; what counting pages is held to its share by.
        nvml: See `devices.load_nvml`.
        on_scan: Called with every new snapshot.

    Attributes:
        errors: Failures since the start, by source.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        timer: Callable[[], float] = time.perf_counter,
        cpu_timer: Callable[[], float] = time.thread_time,
        nvml: Any | None = None,
        on_scan: Callable[[Snapshot], None] = lambda snapshot: None,
    ) -> None:
        self.settings = settings
        self.errors = dict.fromkeys(source_names.NAMES, 0)
        self.on_scan = on_scan
        self._timer = timer
        self._cpu_timer = cpu_timer
        self._nvml = nvml
        self._lock = threading.Lock()
        self._last: Snapshot | None = None
        self._shelf = MapShelf(settings.map_pattern)
        self._memories: dict[tuple[int, int], Memory] = {}

    def snapshot(self, now: float) -> Snapshot:
        """A look no older than the interval floor.

        Args:
            now: Unix time.
        """
        with self._lock:
            if self._last and 0 <= now - self._last.scanned_seconds < self.settings.floor_seconds:
                return self._last
            self._last = self._scan(now)
            self.on_scan(self._last)
            return self._last

    def _scan(self, now: float) -> Snapshot:
        begun = self._timer()
        sources = Sources()
        snapshot = self._look(sources, now)
        for name in sources.errors:
            self.errors[name] += 1
        return replace(snapshot, duration_seconds=self._timer() - begun)

    def _look(self, sources: Sources, now: float) -> Snapshot:
        processes = tuple(self._read(path, sources, now) for path in self._shelf.paths())
        self._forget_all_but(processes)
        seen = [reading for reading in processes if reading.seen]
        memory = sources.ask("meminfo", lambda: read_meminfo(proc=self.settings.proc), otherwise=None)
        groups = seen[0].groups if seen else ()
        claimed = [device for reading in seen if reading.claim for device in reading.claim.devices]
        found = sources.ask("devices", lambda: read_devices(self._nvml, claimed, memory), otherwise=())
        return Snapshot(
            scanned_seconds=now,
            processes=processes,
            memory=memory,
            groups=groups,
            pressure=self._pressure(groups, sources),
            headroom=headroom_of(seen, memory),
            devices=found,
            sources=sources.said,
        )

    def _read(self, path: Path, sources: Sources, now: float) -> ProcessReading:
        try:
            sources.asked("map")
            shelved = self._shelf.read(path)
        except MapError as error:
            sources.failed("map", error)
            return ProcessReading(blind_reason=error.reason, blind_message=str(error))
        return self._read_process(shelved, sources, now)

    def _read_process(self, shelved: ShelvedMap, sources: Sources, now: float) -> ProcessReading:
        claim = shelved.claim
        memory = self._memories.setdefault(
            (claim.pid, claim.start_ticks), Memory(Budget(self.settings.deep_share, self._cpu_timer))
        )
        sources.asked("process")
        sources.asked("files")
        try:
            return read_process(shelved, memory, now=now, settings=self.settings, sources=sources)
        except (KernelError, Sandboxed, OSError) as error:
            sources.failed("process", error)
            reason = getattr(error, "reason", "")
            return ProcessReading(
                pid=claim.pid,
                start_ticks=claim.start_ticks,
                blind_reason=reason if reason in BLIND_REASONS else "unreadable",
                blind_message=str(error),
                claim=claim,
            )

    def _forget_all_but(self, processes: Sequence[ProcessReading]) -> None:
        """Keeps only what is known of processes that were seen."""
        kept = {(p.claim.pid, p.claim.start_ticks) for p in processes if p.seen and p.claim}
        self._memories = {identity: memory for identity, memory in self._memories.items() if identity in kept}

    def _pressure(self, groups: Sequence[Group], sources: Sources) -> dict[str, Pressure]:
        folders = [group.path for group in groups[:1]]
        found: dict[str, Pressure] = {}
        sources.asked("pressure")
        for resource in RESOURCES:
            try:
                found[resource] = read_pressure(resource, folders=folders, proc=self.settings.proc)
            except KernelError as error:
                sources.failed("pressure", error)
        return found


def headroom_of(seen: Sequence[ProcessReading], memory: MemInfo | None) -> Headroom | None:
    """Over all processes that were read; None if none was, or the machine's memory is not known. Pure."""
    if not seen or memory is None:
        return None
    mapped = sum(reading.mapped_resident_bytes for reading in seen)
    cold = [cold for reading in seen for cold in reading.cold.values()]
    return Headroom(
        room_bytes=min(room_bytes(memory.available_bytes, reading.groups, mapped) for reading in seen),
        cold_bytes=sum(part.cold_bytes for part in cold),
        stuck_bytes=sum(sum(part.stuck_bytes.values()) for part in cold),
        need_bytes=sum(reading.claim.next_stage_need_bytes for reading in seen if reading.claim),
    )
