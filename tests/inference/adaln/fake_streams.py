"""Streams that record who touches which memory when, and say where a wait is missing.

Every tensor operation is an access of address ranges on the stream that is current. Each stream has a vector clock; a
wait joins clocks. Two accesses of overlapping memory, one of them a write, must be ordered by clocks: if neither
happened before the other, a wait is missing, whatever order the operations really ran in here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

COMPUTE, COPY, HOST = "compute", "copy", "host"
Clock = dict[str, int]


@dataclass(frozen=True)
class Access:
    stream: str
    time: int
    start: int
    end: int
    writes: bool
    what: str

    def meets(self, other: "Access") -> bool:
        return self.start < other.end and other.start < self.end and (self.writes or other.writes)


@dataclass
class RaceDetector:
    """The clocks, the accesses so far, and the races found."""

    clocks: dict[str, Clock] = field(default_factory=lambda: {COMPUTE: {}, COPY: {}, HOST: {}})
    accesses: list[Access] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    current: str = COMPUTE
    watched: list[tuple[int, int]] = field(default_factory=list)

    def watch(self, *tensors: torch.Tensor) -> None:
        """Looks at this memory alone: temporaries come and go, and two of them may have one address in turn."""
        self.watched += [_range(tensor) for tensor in tensors]

    def join(self, waiter: str, waited_for: str) -> None:
        mine, theirs = self.clocks[waiter], self.clocks[waited_for]
        for stream, time in theirs.items():
            mine[stream] = max(mine.get(stream, 0), time)

    def touch(self, tensors: Sequence[torch.Tensor], *, writes: bool, what: str) -> None:
        # The host issues every operation: what it has waited for lies before it.
        self.join(self.current, HOST)
        clock = self.clocks[self.current]
        clock[self.current] = clock.get(self.current, 0) + 1
        for tensor in tensors:
            if self._is_watched(tensor):
                access = Access(self.current, clock[self.current], *_range(tensor), writes, what)
                self._check(access, clock)
                self.accesses.append(access)

    def _is_watched(self, tensor: torch.Tensor) -> bool:
        if tensor.numel() == 0:
            return False
        start, end = _range(tensor)
        return any(start < last and first < end for first, last in self.watched)

    def _check(self, access: Access, clock: Clock) -> None:
        for earlier in self.accesses:
            is_ordered = clock.get(earlier.stream, 0) >= earlier.time
            if earlier.meets(access) and earlier.stream != access.stream and not is_ordered:
                self.races.append(f"{earlier.what} on {earlier.stream} races {access.what} on {access.stream}")


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()


class Recording(TorchDispatchMode):
    """Reports every operation to a detector."""

    def __init__(self, detector: RaceDetector) -> None:
        super().__init__()
        self._detector = detector

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _is_view(func):
            written = _written(func, args)
            read = [item for item in _tensors(args) if all(item is not w for w in written)]
            made = [] if written else _tensors([result])
            self._detector.touch(read, writes=False, what=str(func))
            self._detector.touch(written + made, writes=True, what=str(func))
        return result


def _is_view(func: Any) -> bool:
    return any(ret.alias_info is not None and not ret.alias_info.is_write for ret in func._schema.returns)


def _written(func: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    arguments = zip(func._schema.arguments, args, strict=False)
    return [value for argument, value in arguments if argument.alias_info is not None and argument.alias_info.is_write]


def _tensors(values: Any) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


@dataclass
class FakeStreams:
    """Streams over a detector, with any of the waits left out.

    Attributes:
        without: Names of waits that do nothing: "begin_copy", "begin_compute", "compute_waits", "copies_wait",
            "synchronize".
    """

    detector: RaceDetector
    without: frozenset[str] = frozenset()

    def _wait(self, name: str, waiter: str, waited_for: str) -> None:
        if name not in self.without:
            self.detector.join(waiter, waited_for)

    def begin(self) -> None:
        self._wait("begin_copy", COPY, COMPUTE)
        self._wait("begin_compute", COMPUTE, COPY)

    def compute_waits(self) -> None:
        self._wait("compute_waits", COMPUTE, COPY)

    def copies_wait(self) -> None:
        self._wait("copies_wait", COPY, COMPUTE)

    def synchronize(self) -> None:
        self._wait("synchronize", HOST, COPY)

    @contextmanager
    def copying(self) -> Iterator[None]:
        before, self.detector.current = self.detector.current, COPY
        try:
            yield
        finally:
            self.detector.current = before
