"""Requests that want the same run side by side; others wait in order and can be cancelled while they do."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sojourn.inference.quality.turns import Turns


def nothing() -> None:
    """Nobody cancels."""


class Asking:
    """A thread that takes a turn and keeps it until told."""

    def __init__(self, turns: Turns, wanted: str, *, alone: bool = False) -> None:
        self.entered, self._leave = threading.Event(), threading.Event()

        def run() -> None:
            with turns.take(wanted, alone=alone, check=nothing):
                self.entered.set()
                assert self._leave.wait(60)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def leave(self) -> None:
        self._leave.set()
        self._thread.join()


@contextmanager
def asking(turns: Turns, *wanted: Any) -> Iterator[list[Asking]]:
    threads: list[Asking] = []
    try:
        for index, want in enumerate(wanted):
            threads.append(Asking(turns, want[0], alone=want[1]))
            limit = time.monotonic() + 60
            while turns._running + len(turns._waiting) <= index:  # in this order
                assert time.monotonic() < limit
                time.sleep(0.001)
        yield threads
    finally:
        for thread in threads:  # in their order: a later one may wait for an earlier one
            thread.leave()


def test_same_wishes_run_side_by_side() -> None:
    with asking(Turns(), ("a", False), ("a", False)) as threads:
        assert all(thread.entered.wait(60) for thread in threads)


@pytest.mark.parametrize("other", [("b", False), ("a", True)])
def test_others_wait_and_then_run(other: tuple[str, bool]) -> None:
    with asking(Turns(), ("a", False), other) as (first, second):
        assert first.entered.wait(60)
        assert not second.entered.wait(0.1)
        first.leave()
        assert second.entered.wait(60)


def test_nobody_runs_beside_one_that_is_alone() -> None:
    with asking(Turns(), ("a", True), ("a", True)) as (first, second):
        assert first.entered.wait(60)
        assert not second.entered.wait(0.1)


def test_one_that_wants_the_same_does_not_overtake_one_that_waits() -> None:
    with asking(Turns(), ("a", False), ("b", False), ("a", False)) as (first, second, third):
        assert first.entered.wait(60)
        assert not third.entered.wait(0.1)
        first.leave()
        assert second.entered.wait(60)
        second.leave()
        assert third.entered.wait(60)


def test_cancelled_while_waiting_it_leaves_the_line() -> None:
    class Cancelled(Exception):
        pass

    def cancel() -> None:
        raise Cancelled

    turns = Turns()
    with asking(turns, ("a", False)) as (first,):
        assert first.entered.wait(60)
        with pytest.raises(Cancelled), turns.take("b", alone=False, check=cancel):
            raise AssertionError("it ran")
    with turns.take("b", alone=True, check=cancel):
        assert turns._running == 1
    assert turns._running == 0
