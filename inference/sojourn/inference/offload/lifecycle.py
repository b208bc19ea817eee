"""When components come and go: the uses that a request's stages declare, turned into calls of strategies.

A request says beforehand which component each of its stages uses. Neighbouring stages that use one component are one
interval. Requests may run side by side: a component goes when the last of them is done with it.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from sojourn.inference.offload.observer import Observer, silent
from sojourn.inference.offload.spans import Span
from sojourn.inference.offload.strategies import Strategy
from sojourn.inference.watch import Event, Stage, StageBegan, Watch


@dataclass(frozen=True, kw_only=True)
class Use:
    """A stage uses a component.

    Attributes:
        stage: Which stage.
        component: Name of the component.
        needed_again: A later stage of the same request, not the next one, uses it once more.
        may_prefetch: Whether it may be brought in while the stage before still runs.
    """

    stage: Stage
    component: str
    needed_again: bool = False
    may_prefetch: bool = True


def declare(stages: Sequence[tuple[Stage, Iterable[str]]]) -> tuple[Use, ...]:
    """The uses of a request whose stages use these components, in order.

    Args:
        stages: Each stage with the names of its components.
    """
    by_stage = [(stage, frozenset(components)) for stage, components in stages]
    return tuple(
        Use(
            stage=stage,
            component=component,
            needed_again=any(component in later for _, later in by_stage[i + 2 :]),
        )
        for i, (stage, components) in enumerate(by_stage)
        for component in sorted(components)
    )


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Where a request stands, for the component map.

    Attributes:
        stage, next_stage: None between requests.
        needed_now, needed_next: Names of components.
    """

    stage: Stage | None = None
    next_stage: Stage | None = None
    needed_now: frozenset[str] = frozenset()
    needed_next: frozenset[str] = frozenset()


class LifeCycle:
    """Begins and ends the uses of components for all requests of a process.

    Args:
        strategies: By component name; components that are missing are none of its business.
        room: What may stay of a component whose use ends, given the next stage and its components; None if nothing
            presses.
        read_bytes: What the process has read from storage so far.
        changed: Called when the situation has changed.
        observer: Told what each stage has read.
    """

    def __init__(
        self,
        strategies: Mapping[str, Strategy],
        *,
        room: Callable[[Situation], int | None] = lambda situation: None,
        read_bytes: Callable[[], int] = lambda: 0,
        changed: Callable[[Situation], None] = lambda situation: None,
        observer: Observer = silent,
    ) -> None:
        self.strategies = dict(strategies)
        self.situation = Situation()
        self._room = room
        self._read_bytes = read_bytes
        self._changed = changed
        self._observer = observer
        self._users = dict.fromkeys(self.strategies, 0)
        self._lock = threading.RLock()

    def open(self, uses: Sequence[Use]) -> "Uses":
        """The uses of one request, to be closed when it ends however it ends."""
        return Uses(self, [use for use in uses if use.component in self.strategies])

    def in_use(self) -> frozenset[str]:
        """Names of components that some request uses now."""
        return frozenset(name for name, users in self._users.items() if users)

    def begin_use(self, component: str) -> None:
        """One more request uses a component.

        Raises:
            ModelError: Its weights are no longer whole.
        """
        with self._lock:
            if self._users[component] == 0:
                self.strategies[component].prepare()
            self._users[component] += 1

    def end_use(self, component: str, *, needed_again: bool) -> None:
        """One request less uses a component.

        Args:
            component: Name of the component.
            needed_again: Whether the same request comes back to it.
        """
        with self._lock:
            self._users[component] -= 1
            if self._users[component] == 0:
                self._finish(component, needed_again=needed_again)

    def let_go(self, component: str) -> None:
        """A component that was kept for a request is no longer: it will not come back to it."""
        with self._lock:
            if self._users[component] == 0:
                self._finish(component, needed_again=False)

    def _finish(self, component: str, *, needed_again: bool) -> None:
        self.strategies[component].finish(
            room_bytes=self._room(self.situation), in_use=self._spans_in_use(), needed_again=needed_again
        )

    def moved_to(self, situation: Situation) -> None:
        """A request has come to another stage."""
        with self._lock:
            self.situation = situation
            self._changed(situation)

    def read_bytes(self) -> int:
        """What the process has read from storage so far."""
        return self._read_bytes()

    def stage_ended(self, stage: Stage, read_bytes: int) -> None:
        """A stage has ended, in which the process read so much."""
        self._observer.stage_read(stage=stage.value, size_bytes=read_bytes)

    def _spans_in_use(self) -> Sequence[Span]:
        return [span for name in self.in_use() for span in self.strategies[name].host_spans()]

    def close(self) -> None:
        """Closes all strategies."""
        for strategy in self.strategies.values():
            strategy.close()


class Uses:
    """The uses of one request, stage after stage. A context manager. Called from the request's thread."""

    def __init__(self, life: LifeCycle, uses: Sequence[Use]) -> None:
        self._life = life
        self._uses = list(uses)
        self._open: dict[str, Use] = {}
        self._kept: set[str] = set()
        self._stage: Stage | None = None
        self._read_before = 0

    def begin(self, stage: Stage) -> None:
        """A stage begins: what it does not use ends, what it uses begins, what the next one uses may come.

        Raises:
            ModelError: The weights of a component are no longer whole.
        """
        self._account(stage)
        wanted = {use.component: use for use in self._uses if use.stage is stage}
        following = self._following(stage)
        self._life.moved_to(
            Situation(
                stage=stage,
                next_stage=following[0].stage if following else None,
                needed_now=frozenset(wanted),
                needed_next=frozenset(use.component for use in following),
            )
        )
        for component in [component for component in self._open if component not in wanted]:
            self._end(component)
        for component, use in wanted.items():
            if component not in self._open:
                self._life.begin_use(component)
                self._kept.discard(component)
            self._open[component] = use
        for use in following:
            if use.may_prefetch and use.component not in self._open:
                self._life.strategies[use.component].prefetch()

    def close(self) -> None:
        """The request has ended: so has every use. Further calls do nothing."""
        self._account(None)
        if self._open:
            self._life.moved_to(Situation())
        for component in list(self._open):
            self._open.pop(component)
            self._life.end_use(component, needed_again=False)
        while self._kept:
            self._life.let_go(self._kept.pop())

    def _end(self, component: str) -> None:
        use = self._open.pop(component)
        self._life.end_use(component, needed_again=use.needed_again)
        if use.needed_again:
            self._kept.add(component)

    def _following(self, stage: Stage) -> list[Use]:
        """The uses of the next stage that has any."""
        order = list(Stage)
        later = [use for use in self._uses if order.index(use.stage) > order.index(stage)]
        return [use for use in later if use.stage is later[0].stage]

    def _account(self, stage: Stage | None) -> None:
        read = self._life.read_bytes()
        if self._stage is not None:
            self._life.stage_ended(self._stage, read - self._read_before)
        self._stage, self._read_before = stage, read

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def driving(uses: Uses, watch: Watch) -> Watch:
    """The same watch, with the stages that it hears of driving the uses of its request before its owner is told."""

    def hear(event: Event) -> None:
        if isinstance(event, StageBegan):
            uses.begin(event.stage)
        watch.listener(event)

    return replace(watch, listener=hear)
