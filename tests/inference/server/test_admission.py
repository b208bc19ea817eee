"""The line and the pace: pure, with time passed in."""

import asyncio

import pytest
from sojourn.inference.errors import DeadlineTooShort, NotServing, QueueFull
from sojourn.inference.server.admission import MAX_AGE_SECONDS, Admission, Line, Pace, Work


def work(*, clips: int = 1, evaluations: int = 10, voxels: int = 1000, decodes: bool = False) -> Work:
    return Work(clips=clips, evaluations=evaluations, voxels=voxels, decodes=decodes)


def measured(step: float = 1.0, overhead: float = 0.0) -> Pace:
    pace = Pace()
    pace.observe_step(work(), step, now=0.0)
    pace.observe_overhead(work(), overhead, now=0.0)
    return pace


def test_steps_are_measured_by_what_one_works_on() -> None:
    """A chunked model's steps take as long in a long clip as in a short one; what is around them does not."""
    short = Work(clips=1, evaluations=10, voxels=1000, step_voxels=1000, decodes=False)
    long = Work(clips=1, evaluations=40, voxels=4000, step_voxels=1000, decodes=False)
    pace = Pace()
    pace.observe_step(short, 1.0, now=0.0)
    pace.observe_step(Work(clips=1, evaluations=10, voxels=4000, decodes=False), 9.0, now=0.0)
    pace.observe_overhead(short, 2.0, now=0.0)
    assert (pace.seconds(short, now=0.0), pace.seconds(long, now=0.0)) == (12.0, 40.0)


def test_first_runs_and_others_wait_in_order() -> None:
    line = Line(limit=2, pace=Pace())
    first, second, third = (line.admit(work(), now=0, deadline=None) for _ in range(3))
    assert line.start_next(now=0) is first
    assert line.start_next(now=0) is None
    line.leave(first)
    assert line.start_next(now=1) is second
    line.leave(second)
    assert line.start_next(now=2) is third


def test_one_more_than_the_limit_is_refused() -> None:
    line = Line(limit=1, pace=Pace())
    line.admit(work(), now=0, deadline=None)
    line.start_next(now=0)
    line.admit(work(), now=0, deadline=None)
    with pytest.raises(QueueFull, match="1 requests wait and the queue holds 1"):
        line.admit(work(), now=0, deadline=None)


def test_limit_zero_takes_the_running_request_alone() -> None:
    line = Line(limit=0, pace=Pace())
    line.admit(work(), now=0, deadline=None)
    with pytest.raises(QueueFull):
        line.admit(work(), now=0, deadline=None)


def test_leaving_frees_the_place_at_once_and_twice_does_nothing() -> None:
    line = Line(limit=1, pace=Pace())
    running = line.admit(work(), now=0, deadline=None)
    line.start_next(now=0)
    waiting = line.admit(work(), now=0, deadline=None)
    for _ in range(2):
        line.leave(waiting)
    assert line.size == 1
    line.admit(work(), now=0, deadline=None)
    line.leave(running)
    assert line.size == 1


def test_delivering_frees_the_pipeline_and_keeps_a_place() -> None:
    line = Line(limit=1, pace=Pace())
    first = line.admit(work(), now=0, deadline=None)
    line.start_next(now=0)
    second = line.admit(work(), now=0, deadline=None)
    line.deliver(first)
    assert line.start_next(now=0) is second
    with pytest.raises(QueueFull):
        line.admit(work(), now=0, deadline=None)
    line.leave(first)
    line.admit(work(), now=0, deadline=None)


def test_retry_is_when_the_running_request_ends() -> None:
    line = Line(limit=0, pace=measured(step=2.0, overhead=3.0))
    line.admit(work(evaluations=10), now=0, deadline=None)
    line.start_next(now=0)
    with pytest.raises(QueueFull) as caught:
        line.admit(work(), now=5, deadline=None)
    assert caught.value.retry_after_seconds == pytest.approx(10 * 2 + 3 - 5)


@pytest.mark.parametrize(
    ("deadline", "refused"),
    [(0.5, "shorter than a step"), (9.9, "shorter than the run"), (19.9, "shorter than queue and run"), (30.1, None)],
)
def test_deadline_that_cannot_be_met_is_refused(deadline: float, refused: str | None) -> None:
    line = Line(limit=9, pace=measured(step=1.0))
    line.admit(work(), now=0, deadline=None)
    line.start_next(now=0)
    line.admit(work(), now=0, deadline=None)
    if refused is None:
        line.admit(work(), now=0, deadline=deadline)
        return
    with pytest.raises(DeadlineTooShort, match="allow 30 s"):
        line.admit(work(), now=0, deadline=deadline)
    assert line.size == 2


def test_what_was_never_measured_refuses_nothing_but_the_past() -> None:
    line = Line(limit=9, pace=Pace())
    line.admit(work(evaluations=10**6), now=0, deadline=0.001)
    with pytest.raises(DeadlineTooShort):
        line.admit(work(), now=1, deadline=1)


def test_old_measurements_refuse_nothing() -> None:
    line = Line(limit=9, pace=measured(step=100.0))
    with pytest.raises(DeadlineTooShort):
        line.admit(work(), now=MAX_AGE_SECONDS, deadline=MAX_AGE_SECONDS + 10)
    line.admit(work(), now=MAX_AGE_SECONDS + 1, deadline=MAX_AGE_SECONDS + 10)


def test_pace_is_the_median_of_its_class() -> None:
    pace = Pace()
    for seconds in (1.0, 2.0, 90.0):
        pace.observe_step(work(voxels=1000), seconds, now=0)
    pace.observe_step(work(voxels=10_000), 7.0, now=0)
    assert pace.step_seconds(work(voxels=1010), now=0) == 2.0
    assert pace.step_seconds(work(voxels=10_000), now=0) == 7.0


def test_unmeasured_class_is_bounded_by_the_next_smaller() -> None:
    pace = measured(step=3.0)
    assert pace.step_seconds(work(voxels=10**9), now=0) == 3.0
    assert pace.step_seconds(work(voxels=10), now=0) == 0.0


def test_every_field_of_the_work_counts() -> None:
    pace = measured(step=1.0, overhead=5.0)
    assert pace.seconds(work(), now=0) == 15
    assert pace.seconds(work(clips=3), now=0) == 45
    assert pace.seconds(work(evaluations=20), now=0) == 25
    assert pace.seconds(work(decodes=True), now=0) == 10


async def test_cancelled_waiter_is_passed_over() -> None:
    seen: list[tuple[int, int]] = []
    admission = Admission(limit=3, clock=lambda: 0.0, changed=lambda *counts: seen.append(counts))
    first, second, third = (admission.enter(work(), deadline=None) for _ in range(3))
    assert [place.position for place in (first, second, third)] == [0, 1, 2]
    await first.turn
    second.turn.cancel()
    admission.leave(first)
    assert third.turn.done()
    admission.leave(second)
    admission.leave(third)
    assert seen[-1] == (0, 0)
    assert max(seen) == (1, 2)


async def test_dismissed_waiters_get_the_error() -> None:
    admission = Admission(limit=3, clock=lambda: 0.0)
    running, waiting = (admission.enter(work(), deadline=None) for _ in range(2))
    admission.dismiss_waiting(NotServing("draining"))
    with pytest.raises(NotServing):
        await asyncio.wait_for(waiting.turn, 1)
    assert admission.line.running is running.ticket
    assert admission.line.size == 1
