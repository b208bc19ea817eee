"""Progress lines with an estimate of the time left, for a log as much as for a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


def clock(seconds: float) -> str:
    """Format a duration as `m:ss`."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    return f"{minutes}:{rest:02d}"


@dataclass
class Progress:
    """Reports one stage, and what is left of the run.

    Attributes:
        stage: Name shown on every line.
        expected_s: Seconds this stage took on the reference machine, scaled to this run's size.
        later_s: The same for all stages after it.
        every_s: Seconds between two lines.
        resumed_at: Steps that an earlier run of this stage has done.
        now: Monotonic clock.
        write: Where a line goes.
    """

    stage: str
    expected_s: float
    later_s: float
    every_s: float = 20.0
    resumed_at: int = 0
    now: Callable[[], float] = time.monotonic
    write: Callable[[str], None] = lambda line: print(line, flush=True)
    started: float = field(init=False)
    reported: float = field(init=False)
    sums: dict[str, tuple[float, int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.started = self.reported = self.now()

    def elapsed_s(self) -> float:
        """Seconds since the stage began."""
        return self.now() - self.started

    def tick(self, step: int, steps: int, **values: float) -> None:
        """Note that `step` (from zero) of `steps` is done; write a line when one is due.

        Values are averaged over the steps since the last line.
        """
        for name, value in values.items():
            total, count = self.sums.get(name, (0.0, 0))
            self.sums[name] = (total + value, count + 1)
        if step + 1 < steps and self.now() - self.reported < self.every_s:
            return
        self.write(self._line(step + 1, steps))
        self.reported = self.now()
        self.sums = {}

    def _line(self, done: int, steps: int) -> str:
        per_step = self.elapsed_s() / (done - self.resumed_at)
        left = per_step * (steps - done)
        slowdown = per_step * steps / self.expected_s if self.expected_s else 1.0
        means = " ".join(f"{name} {total / n:.4f}" for name, (total, n) in self.sums.items())
        return (
            f"{self.stage:8} {done:5}/{steps} {per_step:6.3f} s/it {means}"
            f" | stage {clock(left)} left, run {clock(left + self.later_s * slowdown)} left"
        )
