"""Faults of the world around the operator: requests that fail, kinds that vanish, a helm that is told to stop."""

import asyncio
import base64
import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from sojourn.operator.helm import Helm, HelmFailed, HelmSettings
from sojourn.operator.kube.client import (
    ADALN_CACHES,
    CONFIG_MAPS,
    DEPLOYMENTS,
    DIFFUSION_SERVICES,
    LAYERWISE_OFFLOADS,
    SERVICES,
    Kube,
)
from sojourn.operator.records import RecordBook
from sojourn.operator.releases import Releases

from tests.operator.cluster import (
    condition,
    custom,
    exists,
    no_pod_monitors,
    pod_monitors,
    service,
    status,
    until,
    until_condition,
)
from tests.operator.operators import OperatorProcess, rights
from tests.operator.proxy import Right, is_write
from tests.operator.stage import Stage, assert_clean, gone, remove, settled

SEED = int(os.environ.get("SOJOURN_FAULT_SEED", random.randrange(10**6)))
EVERYTHING: dict[str, Any] = {"autoscaling": {"minReplicas": 2, "maxReplicas": 3}}


async def edit(stage: Stage, name: str, **spec: Any) -> None:
    await stage.kube.merge(DIFFUSION_SERVICES, stage.namespace, name, {"spec": spec})


async def test_requests_that_fail_now_and_then_are_made_up_for(stage: Stage) -> None:
    """A handler that is gated by a phase which it also writes loses what failed (dask/dask-kubernetes#976, #968)."""
    print(f"SOJOURN_FAULT_SEED={SEED}")
    draw = random.Random(SEED)
    stage.proxy.fails = lambda request: 503 if is_write(request) and draw.random() < 0.06 else 0
    stage.ensure_running()
    for name in ("a", "b", "c"):
        await stage.kube.create(DIFFUSION_SERVICES, service(stage.namespace, name, **EVERYTHING))
    for name in ("a", "b", "c"):
        await settled(stage, name)
        await edit(stage, name, autoscaling=None, podLabels={"team": "a"})
    for name in ("a", "b", "c"):
        await settled(stage, name)
        await assert_clean(stage, name)
        await stage.kube.delete(DIFFUSION_SERVICES, stage.namespace, name)
    for name in ("a", "b", "c"):
        await gone(stage, name)
    assert await stage.kube.list_metadata(CONFIG_MAPS, stage.namespace, labels="owner=helm") == []


async def test_a_helm_that_is_told_to_stop_leaves_no_lock(stage: Stage) -> None:
    """SIGTERM first: an operator that is moved to another node cuts nothing off (fluxcd/helm-controller#149)."""

    def holds(request: web.Request) -> bool:
        return is_write(request) and request.path.endswith("/deployments/dsvc-a") and not stage.proxy.release.is_set()

    stage.proxy.holds = holds
    stage.ensure_running()
    await stage.kube.create(DIFFUSION_SERVICES, service(stage.namespace, "a"))
    await asyncio.wait_for(stage.proxy.held.wait(), 30)
    await asyncio.to_thread(stage.operator.end)
    records = await stage.kube.list_metadata(CONFIG_MAPS, stage.namespace, labels="owner=helm")
    assert [item["metadata"]["labels"]["status"] for item in records] == ["failed"]
    stage.proxy.release.set()
    stage.ensure_running()
    await settled(stage, "a")
    await assert_clean(stage, "a")


async def test_a_kind_that_the_cluster_no_longer_knows_blocks_nobody_for_ever(
    kube: Kube, namespace: str, operator: OperatorProcess
) -> None:
    operator.defaults["podMonitor"] = True
    async with pod_monitors(kube):
        operator.start()
        for name in ("a", "b"):
            await kube.create(DIFFUSION_SERVICES, service(namespace, name))
            await until_condition(kube, namespace, "Released", "True", name=name)
        await no_pod_monitors(kube)
        # Deleted while helm cannot even address what it has made.
        await kube.delete(DIFFUSION_SERVICES, namespace, "b")

        async def deleted() -> bool:
            return not await exists(kube, DIFFUSION_SERVICES, namespace, "b")

        await until(deleted, seconds=60)
        assert not await exists(kube, DEPLOYMENTS, namespace, "dsvc-b")
        # Wanted still: said, with what to do.
        await kube.merge(DIFFUSION_SERVICES, namespace, "a", {"spec": {"podLabels": {"a": "b"}}})
        said = await until_condition(kube, namespace, "Stalled", "True", reason="KindMissing", name="a", seconds=60)
        assert "CustomResourceDefinition" in said["message"]
        # Wanted no more: the release is built anew around what is there.
        operator.end()
        operator.defaults["podMonitor"] = False
        operator.start()
        await until_condition(kube, namespace, "Released", "True", name="a", seconds=60)

        async def unstalled() -> bool:
            return condition(await status(kube, namespace, "a"), "Stalled")["status"] == "Absent"

        await until(unstalled)
        live = await kube.get(DEPLOYMENTS, namespace, "dsvc-a")
        assert live["spec"]["template"]["metadata"]["labels"]["a"] == "b"


async def test_an_object_without_helms_annotation_goes_with_its_service(
    kube: Kube, namespace: str, operator: OperatorProcess
) -> None:
    """helm leaves such an object behind and calls that a success; its owner reference does not."""
    operator.start()
    await kube.create(DIFFUSION_SERVICES, service(namespace))
    await until_condition(kube, namespace, "Released", "True")
    operator.end()
    await kube.merge(
        SERVICES, namespace, "dsvc-demo", {"metadata": {"annotations": {"meta.helm.sh/release-name": None}}}
    )
    await kube.delete(DIFFUSION_SERVICES, namespace, "demo")
    operator.start()

    async def nothing_left() -> bool:
        found = [await exists(kube, resource, namespace, "dsvc-demo") for resource in (SERVICES, DEPLOYMENTS)]
        return not any(found) and not await exists(kube, DIFFUSION_SERVICES, namespace, "demo")

    await until(nothing_left, seconds=60)


async def test_a_helm_that_fails_for_good_does_not_keep_a_service_from_ending(
    kube: Kube, namespace: str, tmp_path: Path
) -> None:
    program = tmp_path / "helm"
    program.write_text("#!/bin/sh\necho 'Error: the disk is full' >&2\nexit 1\n")
    program.chmod(0o755)
    releases = Releases(kube, Helm(HelmSettings(program=str(program))), RecordBook(kube), chart_digest="")
    labels = {"app.kubernetes.io/instance": "dsvc-demo"}
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": ""}
    made = await kube.create(CONFIG_MAPS, {"metadata": {"name": "owner", "namespace": namespace}})
    owner["uid"] = made["metadata"]["uid"]
    ours = {"name": "ours", "namespace": namespace, "labels": labels, "ownerReferences": [owner]}
    await kube.create(CONFIG_MAPS, {"metadata": ours})
    await kube.create(CONFIG_MAPS, {"metadata": {"name": "foreign", "namespace": namespace, "labels": labels}})
    record = {"owner": "helm", "name": "dsvc-demo", "version": "1", "status": "deployed"}
    packed = base64.b64encode(gzip.compress(json.dumps({"manifest": ""}).encode())).decode()
    await kube.create(
        CONFIG_MAPS,
        {"metadata": {"name": "record", "namespace": namespace, "labels": record}, "data": {"release": packed}},
    )
    with pytest.raises(HelmFailed, match="the disk is full"):
        await releases.remove(namespace, "demo", owner["uid"], for_good=False)
    assert await exists(kube, CONFIG_MAPS, namespace, "ours"), "nothing is forgotten while helm may still do it"
    await releases.remove(namespace, "demo", owner["uid"], for_good=True)
    for name, stays in (("ours", False), ("record", False), ("foreign", True)):
        assert await exists(kube, CONFIG_MAPS, namespace, name) is stays, name


def granted(namespace: str) -> set[Right]:
    """What the chart gives for one namespace."""
    rules = [rule for item in rights(namespace) if item["kind"] == "Role" for rule in item["rules"]]
    return {
        Right(group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


async def test_the_operator_has_every_right_that_it_uses_and_no_other(stage: Stage) -> None:
    stage.operator.defaults["podMonitor"] = True
    kube, namespace = stage.kube, stage.namespace
    conflicts = {"adalncaches/small/status", "layerwiseoffloads/stream/status", "diffusionservices/a"}

    def fails(request: web.Request) -> int:
        """Each once: somebody else was faster, so that the object is read again."""
        found = next((path for path in conflicts if is_write(request) and request.path.endswith(path)), None)
        conflicts.discard(found or "")
        return 409 if found else 0

    async with pod_monitors(kube):
        stage.proxy.fails = fails
        stage.ensure_running()
        await kube.create(LAYERWISE_OFFLOADS, custom("LayerwiseOffload", namespace, "stream"))
        refs = {"adaLNCacheRef": {"name": "small"}, "layerwiseOffloadRef": {"name": "stream"}}
        await kube.create(DIFFUSION_SERVICES, service(namespace, "a", replicas=3, **refs))
        await settled(stage, "a")
        await edit(stage, "a", replicas=1, **EVERYTHING)
        await settled(stage, "a")
        # An upgrade that is cut off, so that the records are tidied and every kind is swept.
        trap = stage.arm(4, "after", "helm")
        await edit(stage, "a", podLabels={"team": "a"})

        async def cut_off() -> bool:
            return trap.sprung

        await until(cut_off)
        stage.disarm()
        await settled(stage, "a")
        await kube.delete(SERVICES, namespace, "dsvc-a")

        async def put_back() -> bool:
            return await exists(kube, SERVICES, namespace, "dsvc-a")

        await until(put_back)
        await kube.merge(ADALN_CACHES, namespace, "small", {"spec": {"plans": 9}})
        await settled(stage, "a")
        await remove(stage, "a")
    assert conflicts == set()
    assert stage.proxy.rights - granted(namespace) == set(), "used without a right"
    assert granted(namespace) - stage.proxy.rights == set(), "granted and never used"
