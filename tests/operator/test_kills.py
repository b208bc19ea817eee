"""kill -9 at writing requests of install, upgrade, recovery and delete, before and after each.

Whatever is cut off: the next operator brings it to the last spec, with no pending release, no stray object and no
lost status. By default some points of each line are drawn (the seed is printed); SOJOURN_ALL_KILLS=1 tries them all.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sojourn.operator.errors import NotFound
from sojourn.operator.kube.access import from_kubeconfig
from sojourn.operator.kube.client import ADALN_CACHES, CHART_KINDS, CONFIG_MAPS, DIFFUSION_SERVICES, Kube
from sojourn.operator.manifest import digest, objects
from sojourn.operator.records import stored_manifest

from tests.operator.cluster import condition, custom, exists, service, status, until
from tests.operator.operators import OperatorProcess, write_kubeconfig
from tests.operator.proxy import Proxy, Side, Trap, kill_children, proxy

ALL = bool(os.environ.get("SOJOURN_ALL_KILLS"))
SEED = int(os.environ.get("SOJOURN_KILL_SEED", random.randrange(10**6)))
DRAWN = 3
# More than any line of work writes; points past its end are never reached and end the walk.
MOST_WRITES = 40


@dataclass
class Stage:
    """An operator whose requests go through the proxy."""

    kube: Kube
    namespace: str
    operator: OperatorProcess
    proxy: Proxy

    def arm(self, at: int, side: Side, victim: str) -> Trap:
        def kill() -> None:
            process = self.operator.process
            assert process
            if victim == "operator":
                self.operator.kill()
            else:
                kill_children(process.pid, "helm")

        self.proxy.trap = Trap(at, side, kill, agent="" if victim == "operator" else "Helm")
        return self.proxy.trap

    def disarm(self) -> None:
        self.proxy.trap = None

    def ensure_running(self) -> None:
        if self.operator.process is None:
            self.operator.start()


@pytest.fixture
async def stage(kube: Kube, kubeconfig: Path, namespace: str, operator: OperatorProcess) -> AsyncIterator[Stage]:
    access = from_kubeconfig(kubeconfig)
    token = from_kubeconfig(operator.kubeconfig).token or ""
    async with proxy(access, token) as running:
        path = operator.folder / "proxied"
        operator.kubeconfig = write_kubeconfig(path, running.server, None, token)
        await kube.create(ADALN_CACHES, custom("AdaLNCache", namespace, "small", hostTierSize="1Gi"))
        yield Stage(kube, namespace, operator, running)
        operator.kill()


# Each spec has objects that the other lacks: a PodDisruptionBudget, an autoscaler.
BEFORE: dict[str, Any] = {"replicas": 2, "adaLNCacheRef": {"name": "small"}}
AFTER: dict[str, Any] = {"replicas": 1, "autoscaling": {"minReplicas": 1, "maxReplicas": 3}}
LAST: dict[str, Any] = {"replicas": 1, "autoscaling": None, "podLabels": {"last": "one"}}


async def settled(stage: Stage, name: str) -> None:
    """Until the release of the newest generation is said to be deployed."""

    async def ask() -> bool:
        item = await stage.kube.get(DIFFUSION_SERVICES, stage.namespace, name)
        released = condition(item.get("status") or {}, "Released")
        return released["status"] == "True" and released["observedGeneration"] == item["metadata"]["generation"]

    await until(ask, seconds=60)


async def assert_clean(stage: Stage, name: str) -> None:
    """One deployed record, none pending; the objects are those of its manifest; the status is whole."""
    release = f"dsvc-{name}"
    records = await stage.kube.list(CONFIG_MAPS, stage.namespace, labels=f"owner=helm,name={release}")
    states = [item["metadata"]["labels"]["status"] for item in records]
    assert states.count("deployed") == 1, states
    assert not [state for state in states if state.startswith("pending")], states
    deployed = next(item for item in records if item["metadata"]["labels"]["status"] == "deployed")
    wanted = {(item["kind"], item["metadata"]["name"]) for item in objects(stored_manifest(deployed))}
    assert await present(stage, release) == wanted
    found = await status(stage.kube, stage.namespace, name)
    assert found["release"]["digest"] == digest(stored_manifest(deployed))
    assert condition(found, "Ready")["status"] in ("False", "Unknown")


async def present(stage: Stage, release: str) -> set[tuple[str, str]]:
    """Kind and name of every object of a release."""
    found = set()
    for resource in CHART_KINDS:
        try:
            items = await stage.kube.list_metadata(
                resource, stage.namespace, labels=f"app.kubernetes.io/instance={release}"
            )
        except NotFound:
            continue
        found |= {(resource.kind, item["metadata"]["name"]) for item in items}
    return found


def points(line: str, victim: str) -> list[tuple[int, Side]]:
    every: list[tuple[int, Side]] = [(at, side) for at in range(1, MOST_WRITES) for side in ("before", "after")]
    if ALL:
        return every
    print(f"SOJOURN_KILL_SEED={SEED}")
    likely = [point for point in every if point[0] <= (14 if victim == "operator" else 9)]
    return sorted(random.Random(f"{SEED}{line}{victim}").sample(likely, DRAWN))


async def wait_for(trap: Trap, done: Any) -> bool:
    """Whether the trap sprang before the work was done."""
    waiting = asyncio.ensure_future(done)
    while not trap.sprung and not waiting.done():
        await asyncio.sleep(0.02)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    return trap.sprung


@pytest.mark.timeout(3600 if ALL else 600)
@pytest.mark.parametrize("victim", ["operator", "helm"])
async def test_killed_in_an_install(stage: Stage, victim: str) -> None:
    for number, (at, side) in enumerate(points("install", victim)):
        name = f"i{number}"
        stage.ensure_running()
        trap = stage.arm(at, side, victim)
        await stage.kube.create(DIFFUSION_SERVICES, service(stage.namespace, name, **AFTER))
        sprung = await wait_for(trap, settled(stage, name))
        stage.disarm()
        # What is wanted changes meanwhile.
        await stage.kube.merge(DIFFUSION_SERVICES, stage.namespace, name, {"spec": LAST})
        stage.ensure_running()
        await settled(stage, name)
        await assert_clean(stage, name)
        await remove(stage, name)
        if not sprung and ALL:
            return


@pytest.mark.timeout(3600 if ALL else 600)
@pytest.mark.parametrize("victim", ["operator", "helm"])
async def test_killed_in_an_upgrade(stage: Stage, victim: str) -> None:
    for number, (at, side) in enumerate(points("upgrade", victim)):
        name = f"u{number}"
        stage.ensure_running()
        await stage.kube.create(DIFFUSION_SERVICES, service(stage.namespace, name, **BEFORE))
        await settled(stage, name)
        trap = stage.arm(at, side, victim)
        await stage.kube.merge(DIFFUSION_SERVICES, stage.namespace, name, {"spec": AFTER})
        sprung = await wait_for(trap, settled(stage, name))
        stage.disarm()
        await stage.kube.merge(DIFFUSION_SERVICES, stage.namespace, name, {"spec": LAST})
        stage.ensure_running()
        await settled(stage, name)
        await assert_clean(stage, name)
        await remove(stage, name)
        if not sprung and ALL:
            return


@pytest.mark.timeout(3600 if ALL else 600)
@pytest.mark.parametrize("line", ["install", "upgrade"])
async def test_killed_in_the_recovery_from_a_kill(stage: Stage, line: str) -> None:
    """Among others in the rollback of a cut-off install, and between an apply and the sweep after it."""
    for number, (at, side) in enumerate(points(f"recovery of {line}", "operator")):
        name = f"r{number}"
        stage.ensure_running()
        if line == "upgrade":
            await stage.kube.create(DIFFUSION_SERVICES, service(stage.namespace, name, **BEFORE))
            await settled(stage, name)
        first = stage.arm(6, "after", "helm" if line == "upgrade" else "operator")
        if line == "upgrade":
            await stage.kube.merge(DIFFUSION_SERVICES, stage.namespace, name, {"spec": AFTER})
        else:
            await stage.kube.create(DIFFUSION_SERVICES, service(stage.namespace, name, **AFTER))
        await wait_for(first, settled(stage, name))
        stage.operator.kill()
        trap = stage.arm(at, side, "operator")
        stage.ensure_running()
        sprung = await wait_for(trap, settled(stage, name))
        stage.disarm()
        await stage.kube.merge(DIFFUSION_SERVICES, stage.namespace, name, {"spec": LAST})
        stage.ensure_running()
        await settled(stage, name)
        await assert_clean(stage, name)
        await remove(stage, name)
        if not sprung and ALL:
            return


@pytest.mark.timeout(3600 if ALL else 600)
@pytest.mark.parametrize("victim", ["operator", "helm"])
async def test_killed_in_a_delete(stage: Stage, victim: str) -> None:
    for number, (at, side) in enumerate(points("delete", victim)):
        name = f"d{number}"
        stage.ensure_running()
        await stage.kube.create(DIFFUSION_SERVICES, service(stage.namespace, name, **AFTER))
        await settled(stage, name)
        trap = stage.arm(at, side, victim)
        await stage.kube.delete(DIFFUSION_SERVICES, stage.namespace, name)
        sprung = await wait_for(trap, gone(stage, name))
        stage.disarm()
        stage.ensure_running()
        await gone(stage, name)
        assert await present(stage, f"dsvc-{name}") == set()
        assert await stage.kube.list_metadata(CONFIG_MAPS, stage.namespace, labels=f"owner=helm,name=dsvc-{name}") == []
        if not sprung and ALL:
            return


async def gone(stage: Stage, name: str) -> None:
    async def ask() -> bool:
        return not await exists(stage.kube, DIFFUSION_SERVICES, stage.namespace, name)

    await until(ask, seconds=60)


async def remove(stage: Stage, name: str) -> None:
    await stage.kube.delete(DIFFUSION_SERVICES, stage.namespace, name)
    await gone(stage, name)


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
