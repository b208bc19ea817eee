"""How many bytes of mapped weights may stay in memory, measured anew whenever it is asked.

What is left (limit − usage + reclaimable file cache, in the tightest control group, or MemAvailable) counts every
clean file page as free. Two things are not: the file pages that the process needs besides its weights, such as the
code it runs, and what the coming pass will allocate that is not allocated now.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sojourn.inference.offload.spans import Span
from sojourn.residencyd.kernel.cgroups import CGROUP_ROOT, Group, available_bytes, read_groups, tightest
from sojourn.residencyd.kernel.meminfo import read_meminfo
from sojourn.residencyd.kernel.pages import PageTable
from sojourn.residencyd.kernel.process import PROC, read_status
from sojourn.residencyd.kernel.syscalls import PAGE_BYTES, read_bytes

# Left free besides everything that is measured: page tables, the kernel's per-CPU batches of charges. With less the cap
# is met now and then, and each time the kernel takes pages that are to be kept.
SLACK_BYTES = 6 << 20


@dataclass(frozen=True, kw_only=True)
class Room:
    """What may be in memory.

    Attributes:
        available_bytes: What the machine and every control group leave, reclaimable file cache counted as free.
        other_file_bytes: Part of that cache that the process needs in memory besides its weights.
        resident_bytes: Weights in memory now.
        limited: Whether a control group is what limits.
    """

    available_bytes: int
    other_file_bytes: int
    resident_bytes: int
    limited: bool

    def for_weights(self, *, coming_bytes: int) -> int:
        """Bytes of weights that may stay while `coming_bytes` more are allocated for other things."""
        return max(0, self.available_bytes - self.other_file_bytes - coming_bytes)


def other_file_bytes(*, mapped_bytes: int, process_file_bytes: int, resident_bytes: int) -> int:
    """File pages in use besides the weights.

    Two upper bounds, and the lower one holds. What the control group has mapped, less the weights: it counts the
    neighbours' too. What the process has mapped, less the weights: it counts pages that another group pays for.

    Args:
        mapped_bytes: File cache of the group that some process maps.
        process_file_bytes: Resident file pages of this process.
        resident_bytes: Weights among them.
    """
    return max(0, min(mapped_bytes, process_file_bytes) - resident_bytes)


@dataclass(frozen=True)
class _Seen:
    """A look at the page tables.

    Attributes:
        weights: Where it looked.
        file_bytes: File pages that the process had in memory then.
        resident_bytes: Weights among them.
    """

    weights: Sequence[Span]
    file_bytes: int
    resident_bytes: int


class RoomReader:
    """Measures room for one process.

    Args:
        proc: Root of the proc file system.
        cgroups: Where control groups are mounted.
        pid: The process; it must be readable.
    """

    def __init__(self, pid: int, *, proc: Path = PROC, cgroups: Path = CGROUP_ROOT) -> None:
        self._pid = pid
        self._proc = proc
        self._cgroups = cgroups
        self._seen: _Seen | None = None

    def read(self, weights: Sequence[Span]) -> Room:
        """The room now, for weights that are mapped at `weights`. About 0.4 ms.

        The page tables, 20 ms for each GiB of 4 KiB pages, are looked at only when the process has another number of
        file pages in memory than at the last look: whatever comes or goes changes it.

        Raises:
            KernelError: A source cannot be read.
        """
        groups = read_groups(pid=self._pid, proc=self._proc, root=self._cgroups)
        machine = read_meminfo(proc=self._proc).available_bytes
        file_bytes = read_status(self._pid, proc=self._proc).rss_file_bytes
        resident = self._weights_bytes(weights, file_bytes)
        return room_of(machine, groups, file_bytes, resident_bytes=resident)

    def _weights_bytes(self, weights: Sequence[Span], file_bytes: int) -> int:
        seen = self._seen
        if seen is None or seen.weights is not weights or seen.file_bytes != file_bytes:
            seen = self._seen = _Seen(weights, file_bytes, self.resident_bytes(weights))
        return seen.resident_bytes

    def resident_bytes(self, spans: Sequence[Span]) -> int:
        """File pages of the spans that the process has in memory.

        Raises:
            KernelError: The page table cannot be read.
        """
        with PageTable(self._pid, proc=self._proc) as pages:
            return sum(pages.count(start, end).file_bytes for start, end in spans)

    def anonymous_bytes(self) -> int:
        """Resident memory of the process that is not file pages, cheaply."""
        fields = read_bytes(self._proc / str(self._pid) / "statm").split()
        return (int(fields[1]) - int(fields[2])) * PAGE_BYTES


def room_of(machine_bytes: int, groups: Sequence[Group], process_file_bytes: int, *, resident_bytes: int) -> Room:
    """The room that follows from readings; see `RoomReader.read`."""
    binding = tightest(tuple(groups))
    limited = binding is not None and binding.room_bytes is not None and binding.room_bytes < machine_bytes
    mapped = binding.mapped_file_bytes if limited and binding is not None else process_file_bytes
    return Room(
        available_bytes=available_bytes(machine_bytes, tuple(groups)),
        other_file_bytes=other_file_bytes(
            mapped_bytes=mapped, process_file_bytes=process_file_bytes, resident_bytes=resident_bytes
        ),
        resident_bytes=resident_bytes,
        limited=limited,
    )
