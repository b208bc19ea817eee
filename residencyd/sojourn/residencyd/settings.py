"""What a look is to look at, and how often: every option of the command line that reaches the scanner."""

from dataclasses import dataclass
from pathlib import Path

from sojourn.residencyd.kernel.process import PROC

# Where an inference process publishes its map, in a volume that both containers mount.
MAP_FOLDER = "/run/sojourn"


@dataclass(frozen=True)
class Settings:
    """Where to look, and how often.

    Attributes:
        map_pattern: File, folder or glob of component maps. In a folder every *.pb is one.
        proc: Root of the proc file system.
        cgroup_root: Where control groups are mounted; None for where the process itself sees them.
        floor_seconds: Least time between two looks.
        deep_share: Share of one core that counting pages may take.
        host_pids: Maps' pids are those of containers, ours the host's: find processes by start time and inner pid.
    """

    map_pattern: str = MAP_FOLDER
    proc: Path = PROC
    cgroup_root: Path | None = None
    floor_seconds: float = 5.0
    deep_share: float = 0.001
    host_pids: bool = False
