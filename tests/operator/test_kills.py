"""kill -9 at writing requests of install, upgrade, recovery and delete, before and after each.

Whatever is cut off: the next operator brings it to the last spec, with no pending release, no stray object and no
lost status. By default some points of each line are drawn (the seed is printed); SOJOURN_ALL_KILLS=1 tries them all.
Most of a recovery is waiting for a stale lock, so several operators, each in a namespace of its own, are killed at
once.
"""

import asyncio
import os
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from sojourn.operator.kube.client import ADALN_CACHES, CONFIG_MAPS, DIFFUSION_SERVICES, Kube

from tests.operator.cluster import condition, service, status, until
from tests.operator.proxy import Side, Trap
from tests.operator.stage import Stage, assert_clean, gone, open_stage, present, remove, settled

ALL = bool(os.environ.get("SOJOURN_ALL_KILLS"))
SEED = int(os.environ.get("SOJOURN_KILL_SEED", random.randrange(10**6)))
DRAWN = 3
AT_ONCE = 5
# More than any line of work writes; points past its end are never reached and end the walk.
MOST_WRITES = 40

Victim = Literal["operator", "helm"]


@dataclass(frozen=True)
class Point:
    """Where to kill: at the k-th write, before or after the API server has seen it."""

    at: int
    side: Side
    victim: Victim

    @property
    def name(self) -> str:
        return f"{self.side[0]}{self.at}"


# A line of work that is cut off at a point; answers whether the point was reached.
Line = Callable[[Stage, Point], Awaitable[bool]]

# Each spec has objects that the other lacks: a PodDisruptionBudget, an autoscaler.
BEFORE: dict[str, Any] = {"replicas": 2, "adaLNCacheRef": {"name": "small"}}
AFTER: dict[str, Any] = {"replicas": 1, "autoscaling": {"minReplicas": 1, "maxReplicas": 3}}
LAST: dict[str, Any] = {"replicas": 1, "autoscaling": None, "podLabels": {"last": "one"}}


def points(line: str, victim: Victim) -> list[Point]:
    every = [Point(at, side, victim) for at in range(1, MOST_WRITES) for side in ("before", "after")]
    if ALL:
        return every
    print(f"SOJOURN_KILL_SEED={SEED}")
    likely = [point for point in every if point.at <= (14 if victim == "operator" else 9)]
    drawn = random.Random(f"{SEED}{line}{victim}").sample(likely, DRAWN)
    return sorted(drawn, key=lambda point: (point.at, point.side))


async def walk(kube: Kube, kubeconfig: Path, folder: Path, line: Line, victim: Victim) -> None:
    """Cuts a line of work off at its points, at several of them at a time."""
    todo, end = deque(points(line.__name__, victim)), MOST_WRITES

    async def work(number: int) -> None:
        nonlocal end
        async with open_stage(kube, kubeconfig, folder / str(number)) as stage:
            while todo and (point := todo.popleft()).at <= end:
                print(line.__name__, point)
                if not await line(stage, point):
                    end = min(end, point.at)

    await asyncio.gather(*(work(number) for number in range(min(AT_ONCE, len(todo)))))


async def sprung(trap: Trap, done: Any) -> bool:
    """Whether the trap sprang before the work was done."""
    waiting = asyncio.ensure_future(done)
    while not trap.sprung and not waiting.done():
        await asyncio.sleep(0.02)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    return trap.sprung


async def converges(stage: Stage, name: str) -> None:
    """What is wanted changes after the kill; a new operator brings it there, and takes it away."""
    stage.disarm()
    await stage.kube.merge(DIFFUSION_SERVICES, stage.namespace, name, {"spec": LAST})
    stage.ensure_running()
    await settled(stage, name)
    await assert_clean(stage, name)
    await remove(stage, name)


async def install(stage: Stage, point: Point) -> bool:
    name = f"i{point.name}"
    stage.ensure_running()
    trap = stage.arm(point.at, point.side, point.victim)
    await stage.kube.create(DIFFUSION_SERVICES, service(stage.namespace, name, **AFTER))
    reached = await sprung(trap, settled(stage, name))
    await converges(stage, name)
    return reached


async def upgrade(stage: Stage, point: Point) -> bool:
    name = f"u{point.name}"
    stage.ensure_running()
    await stage.kube.create(DIFFUSION_SERVICES, service(stage.namespace, name, **BEFORE))
    await settled(stage, name)
    trap = stage.arm(point.at, point.side, point.victim)
    await stage.kube.merge(DIFFUSION_SERVICES, stage.namespace, name, {"spec": AFTER})
    reached = await sprung(trap, settled(stage, name))
    await converges(stage, name)
    return reached


async def rollback(stage: Stage, point: Point) -> bool:
    """The recovery from an install that was cut off, cut off itself."""
    name = f"r{point.name}"
    stage.ensure_running()
    first = stage.arm(6, "after", "operator")
    await stage.kube.create(DIFFUSION_SERVICES, service(stage.namespace, name, **AFTER))
    return await _killed_again(stage, name, first, point)


async def sweep(stage: Stage, point: Point) -> bool:
    """The recovery from an upgrade that was cut off, with the sweep at its end, cut off itself."""
    name = f"s{point.name}"
    stage.ensure_running()
    await stage.kube.create(DIFFUSION_SERVICES, service(stage.namespace, name, **BEFORE))
    await settled(stage, name)
    first = stage.arm(6, "after", "helm")
    await stage.kube.merge(DIFFUSION_SERVICES, stage.namespace, name, {"spec": AFTER})
    return await _killed_again(stage, name, first, point)


async def _killed_again(stage: Stage, name: str, first: Trap, point: Point) -> bool:
    await sprung(first, settled(stage, name))
    stage.operator.kill()
    trap = stage.arm(point.at, point.side, point.victim)
    stage.ensure_running()
    reached = await sprung(trap, settled(stage, name))
    await converges(stage, name)
    return reached


async def delete(stage: Stage, point: Point) -> bool:
    name = f"d{point.name}"
    stage.ensure_running()
    await stage.kube.create(DIFFUSION_SERVICES, service(stage.namespace, name, **AFTER))
    await settled(stage, name)
    trap = stage.arm(point.at, point.side, point.victim)
    await stage.kube.delete(DIFFUSION_SERVICES, stage.namespace, name)
    reached = await sprung(trap, gone(stage, name))
    stage.disarm()
    stage.ensure_running()
    await gone(stage, name)
    assert await present(stage, f"dsvc-{name}") == set()
    assert await stage.kube.list_metadata(CONFIG_MAPS, stage.namespace, labels=f"owner=helm,name=dsvc-{name}") == []
    return reached


LINES: list[tuple[Line, Victim]] = [
    (install, "operator"),
    (install, "helm"),
    (upgrade, "operator"),
    (upgrade, "helm"),
    (rollback, "operator"),
    (rollback, "helm"),
    (sweep, "operator"),
    (sweep, "helm"),
    (delete, "operator"),
    (delete, "helm"),
]


@pytest.mark.timeout(3600 if ALL else 600)
@pytest.mark.parametrize(("line", "victim"), LINES, ids=[f"{line.__name__}-{victim}" for line, victim in LINES])
async def test_killed_in(kube: Kube, kubeconfig: Path, tmp_path: Path, line: Line, victim: Victim) -> None:
    """The classic of its kind is a release that is stuck in pending-upgrade: fluxcd/helm-controller#149, #644."""
    await walk(kube, kubeconfig, tmp_path, line, victim)


async def test_a_policy_that_vanished_behind_a_410_is_noticed(stage: Stage) -> None:
    """After 410 Gone a watch begins anew and tells nothing of what was deleted meanwhile."""
    stage.ensure_running()
    await stage.kube.create(DIFFUSION_SERVICES, service(stage.namespace, "w", **BEFORE))
    await settled(stage, "w")
    stage.proxy.gone = ADALN_CACHES.plural
    for watch in list(stage.proxy.cut):
        watch.cancel()
    await stage.kube.delete(ADALN_CACHES, stage.namespace, "small")

    async def refused() -> bool:
        return stage.proxy.answered_gone > 0

    await until(refused, seconds=30)
    stage.proxy.gone = ""

    async def said() -> bool:
        found = condition(await status(stage.kube, stage.namespace, "w"), "PolicyResolved")
        return bool(found["status"] == "False")

    await until(said, seconds=30)
