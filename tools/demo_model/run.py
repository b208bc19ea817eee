"""A training run: its folder, its finished stages, and the snapshots of the one that is under way."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tools.demo_model.progress import Progress, clock

# A stage that is stopped loses no more than this.
SNAPSHOT_S = 120.0


@dataclass
class Run:
    """Where a run stands: its folder, its size and its finished stages.

    Attributes:
        folder: Of everything it writes.
        seed: Of all its random numbers.
        scale: Share of the steps and clips of the recipe.
        resume: Keep what earlier runs finished.
        reference_s: Seconds of each part on the reference machine at scale 1, in order; only the estimate of the time
            left depends on them.
    """

    folder: Path
    seed: int
    scale: float
    resume: bool
    reference_s: Mapping[str, float]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def work(self) -> Path:
        """The folder of the stages' files."""
        return self.folder / "work"

    def sized(self, amount: int, least: int = 2) -> int:
        """Scale a number of steps or clips."""
        return max(least, round(amount * self.scale))

    def stage_seed(self, stage: str) -> int:
        """A seed of the run's seed and the stage's name."""
        return self.seed * 1_000_003 + zlib.crc32(stage.encode()) % 1_000_003

    def generator(self, stage: str) -> torch.Generator:
        """A generator of its own for each stage."""
        return torch.Generator().manual_seed(self.stage_seed(stage))

    def progress(self, stage: str) -> Progress:
        """The stage's progress reporter."""
        names = list(self.reference_s)
        later = names[names.index(stage) + 1 :]
        return Progress(
            stage,
            expected_s=self.reference_s[stage] * self.scale,
            later_s=sum(self.reference_s[name] for name in later) * self.scale,
        )

    def snapshots(self, stage: str) -> Snapshots:
        """The stage's snapshots."""
        return Snapshots(self.work / f"{stage}.snapshot")

    def stage(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the stage's result, from its file if it is there, or else by computing it."""
        path = self.work / f"{name}.pt"
        if not path.exists():
            started = time.monotonic()
            result = compute()
            seconds = time.monotonic() - started
            _save({"result": result, "seconds": seconds}, path)
            self.snapshots(name).clear()
            print(f"{name:8} done in {clock(seconds)}", flush=True)
        saved = torch.load(path, weights_only=True)
        self.seconds[name] = saved["seconds"]
        return saved["result"]


@dataclass
class Snapshots:
    """The state of an unfinished stage, kept in a file that is replaced as a whole.

    Attributes:
        path: Of the file.
        every_s: Seconds between two snapshots.
    """

    path: Path
    every_s: float = SNAPSHOT_S
    last: float = field(default_factory=time.monotonic)

    def load(self) -> Any | None:
        """What was kept last; None of a stage that starts afresh."""
        return torch.load(self.path, weights_only=True) if self.path.exists() else None

    def keep(self, state: Callable[[], Any]) -> None:
        """Keep the state if it is time to."""
        if time.monotonic() - self.last >= self.every_s:
            _save(state(), self.path)
            self.last = time.monotonic()

    def clear(self) -> None:
        """Forget the snapshot of a finished stage."""
        self.path.unlink(missing_ok=True)


def _save(content: Any, path: Path) -> None:
    partial = path.with_suffix(".partial")
    torch.save(content, partial)
    partial.rename(path)
