"""The clock by which the operator waits."""

import asyncio
import time

import pytest
from sojourn.operator.clock import Clock
from sojourn.operator.process import Heartbeat
from sojourn.operator.queueing import KeyedQueue


@pytest.mark.parametrize("speed", [1.0, 40.0, 1000.0])
def test_every_interval_is_shortened_alike(speed: float) -> None:
    assert Clock(speed).on_the_machine(600) == 600 / speed
    before, clock = time.monotonic(), Clock(speed)
    moment = clock.now() / speed
    assert before <= moment <= time.monotonic()


async def test_an_hour_of_a_fast_clock_ends_and_one_of_the_machines_does_not() -> None:
    await Clock(1e6).sleep(3600)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(Clock().sleep(3600), 0.05)


async def test_a_wait_ends_by_its_event_or_by_the_clock() -> None:
    event = asyncio.Event()
    await Clock(1e6).wait(event, 3600)
    assert not event.is_set()
    event.set()
    await Clock().wait(event, None)


async def test_a_pause_in_the_queue_and_an_overdue_resync_go_by_it() -> None:
    fast = Clock(1e6)
    queue: KeyedQueue[str] = KeyedQueue(clock=fast)
    queue.add("a", after=3600)
    assert await asyncio.wait_for(queue.take(), 30) == "a"
    beats = {clock: Heartbeat((300.0, 600.0), clock) for clock in (fast, Clock())}
    for beat in beats.values():
        beat.beat()
    await fast.sleep(3600)
    assert [beat.healthy() for beat in beats.values()] == [False, True]
