"""The keyed queue: each key once, serial per key, due in order, pauses that grow."""

import asyncio

import pytest
from sojourn.operator.clock import Clock
from sojourn.operator.queueing import Backoff, KeyedQueue


class Stopped(Clock):
    """Time that passes only when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds


async def ready(queue: KeyedQueue[str]) -> str | None:
    """What `take` gives at once, None if it would wait."""
    try:
        return await asyncio.wait_for(queue.take(), 0.01)
    except TimeoutError:
        return None


async def test_a_key_is_in_the_queue_at_most_once() -> None:
    queue: KeyedQueue[str] = KeyedQueue(clock=Stopped())
    for _ in range(3):
        queue.add("a")
    assert queue.waiting() == 1
    assert [await ready(queue), await ready(queue)] == ["a", None]


async def test_edits_during_a_pass_unite_into_one_more_pass_after_it() -> None:
    queue: KeyedQueue[str] = KeyedQueue(clock=Stopped())
    queue.add("a")
    assert await ready(queue) == "a"
    for _ in range(5):
        queue.add("a")
    assert await ready(queue) is None, "nobody else gets a key that is held"
    queue.done("a")
    assert [await ready(queue), await ready(queue)] == ["a", None]


async def test_the_earliest_wish_for_a_key_counts() -> None:
    clock = Stopped()
    queue: KeyedQueue[str] = KeyedQueue(clock=clock)
    queue.add("a", after=30)
    queue.add("a", after=10)
    queue.add("a", after=20)
    assert await ready(queue) is None
    clock.seconds += 10
    assert await ready(queue) == "a"
    queue.done("a")
    clock.seconds += 100
    assert await ready(queue) is None, "the later wishes were part of it"


async def test_keys_come_in_the_order_in_which_they_are_due() -> None:
    clock = Stopped()
    queue: KeyedQueue[str] = KeyedQueue(clock=clock)
    queue.add("later", after=2)
    queue.add("now")
    queue.add("soon", after=1)
    clock.seconds += 5
    assert [await ready(queue) for _ in range(4)] == ["now", "soon", "later", None]


async def test_a_worker_that_waits_is_woken_by_a_new_key() -> None:
    queue: KeyedQueue[str] = KeyedQueue()
    waiting = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.add("a")
    assert await asyncio.wait_for(waiting, 1) == "a"


async def test_a_dropped_key_does_not_come() -> None:
    queue: KeyedQueue[str] = KeyedQueue(clock=Stopped())
    queue.add("a")
    queue.drop("a")
    assert await ready(queue) is None


async def test_pauses_grow_with_failures_and_are_forgotten_after_success() -> None:
    queue: KeyedQueue[str] = KeyedQueue(Backoff(first_seconds=1, cap_seconds=8), clock=Stopped())
    pauses = [queue.failed("a") for _ in range(6)]
    for pause, whole in zip(pauses, [1, 2, 4, 8, 8, 8], strict=True):
        assert whole / 2 <= pause <= whole
    queue.succeeded("a")
    assert queue.failed("a") <= 1


@pytest.mark.parametrize("failures", [1, 10, 40_000])
def test_no_number_of_failures_overflows_the_pause(failures: int) -> None:
    assert Backoff(cap_seconds=300).pause(failures, jitter=lambda: 0.0) <= 300


async def test_the_oldest_due_key_is_told() -> None:
    clock = Stopped()
    queue: KeyedQueue[str] = KeyedQueue(clock=clock)
    assert queue.oldest_due() is None
    queue.add("a")
    clock.seconds += 7
    queue.add("b")
    assert queue.oldest_due() == 100.0


async def test_a_resync_shortens_no_pause() -> None:
    queue: KeyedQueue[str] = KeyedQueue(clock=Stopped())
    queue.failed("a")
    queue.remind("a")
    queue.remind("b")
    assert [await ready(queue), await ready(queue)] == ["b", None]


async def test_what_a_failing_pass_stirs_up_shortens_no_pause() -> None:
    """Else every failure brings the next one on, and soon the pause is as long as it can be."""
    clock = Stopped()
    queue: KeyedQueue[str] = KeyedQueue(Backoff(first_seconds=10), clock=clock)
    queue.add("a")
    assert await ready(queue) == "a"
    queue.nudge("a")
    queue.failed("a")
    queue.done("a")
    queue.nudge("a")
    assert await ready(queue) is None
    clock.seconds += 10
    assert await ready(queue) == "a"


async def test_what_a_pass_stirs_up_that_succeeds_is_looked_at_at_once() -> None:
    queue: KeyedQueue[str] = KeyedQueue(clock=Stopped())
    queue.add("a")
    assert await ready(queue) == "a"
    queue.nudge("a")
    queue.succeeded("a")
    queue.done("a")
    assert await ready(queue) == "a"
    queue.nudge("b")
    assert await ready(queue) == "b"


async def test_a_new_wish_ends_the_pause_and_what_led_to_it() -> None:
    queue: KeyedQueue[str] = KeyedQueue(Backoff(first_seconds=1), clock=Stopped())
    for _ in range(5):
        queue.failed("a")
    queue.renew("a")
    assert await ready(queue) == "a"
    assert queue.failed("a") <= 1
