"""Where the time of one clip goes: pure, the readings of the clock are passed in."""

import statistics
from dataclasses import dataclass, field

from sojourn.inference.watch import Stage


@dataclass
class Stopwatch:
    """Times of the stages and steps of one clip, in seconds.

    Attributes:
        began: When it was started.
        stages: Ended stages in the order of their begin; a stage that comes twice is listed once.
        steps: Ended steps. The first one is counted from the begin of its stage.
    """

    began: float
    stages: dict[Stage, float] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    _stage: Stage | None = None
    _stage_began: float = 0.0
    _step_began: float = 0.0

    def begin(self, stage: Stage, *, at: float) -> tuple[Stage, float] | None:
        """Ends the present stage, if any, and begins the next; answers which ended and its seconds."""
        ended = self.end(at=at)
        self._stage, self._stage_began, self._step_began = stage, at, at
        return ended

    def step(self, *, at: float) -> float:
        """Ends a step; answers its seconds."""
        seconds = at - self._step_began
        self.steps.append(seconds)
        self._step_began = at
        return seconds

    def end(self, *, at: float) -> tuple[Stage, float] | None:
        """Ends the present stage, if any; answers which and its seconds."""
        if self._stage is None:
            return None
        ended, seconds = self._stage, at - self._stage_began
        self.stages[ended] = self.stages.get(ended, 0.0) + seconds
        self._stage = None
        return ended, seconds

    @property
    def seconds_per_step(self) -> float:
        """Median of the steps; 0 before the first."""
        return statistics.median(self.steps) if self.steps else 0.0
