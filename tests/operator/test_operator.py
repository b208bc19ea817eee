"""The operator against a real API server: from a DiffusionService to a release, its status, and back."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from sojourn.operator.errors import NotFound
from sojourn.operator.kube.client import (
    ADALN_CACHES,
    CONFIG_MAPS,
    DEPLOYMENTS,
    DIFFUSION_SERVICES,
    EVENTS,
    NETWORK_POLICIES,
    PODS,
    SERVICES,
    Kube,
)
from sojourn.operator.naming import RECONCILE_AT

from tests.operator.audit import Audit
from tests.operator.cluster import (
    answer,
    condition,
    custom,
    exists,
    serve,
    service,
    status,
    until,
    until_condition,
)
from tests.operator.operators import OperatorProcess
from tests.operator.served import Model


async def change(kube: Kube, namespace: str, name: str = "demo", **spec: Any) -> None:
    await kube.merge(DIFFUSION_SERVICES, namespace, name, {"spec": spec})


async def annotate(kube: Kube, namespace: str, name: str = "demo", **annotations: str) -> None:
    body = {"metadata": {"annotations": {RECONCILE_AT: annotations["at"]}}}
    await kube.merge(DIFFUSION_SERVICES, namespace, name, body)


async def deployment(kube: Kube, namespace: str, name: str = "demo") -> dict[str, Any]:
    return await kube.get(DEPLOYMENTS, namespace, f"dsvc-{name}")


async def arguments(kube: Kube, namespace: str) -> list[str]:
    pod = (await deployment(kube, namespace))["spec"]["template"]["spec"]
    found: list[str] = pod["containers"][0]["args"]
    return found


async def revisions(kube: Kube, namespace: str) -> dict[str, str]:
    """Status of each release record by its name."""
    records = await kube.list_metadata(CONFIG_MAPS, namespace, labels="owner=helm")
    return {item["metadata"]["name"]: item["metadata"]["labels"]["status"] for item in records}


async def gone(kube: Kube, namespace: str, name: str = "demo", *, seconds: float = 40) -> None:
    async def ask() -> bool:
        return not await exists(kube, DIFFUSION_SERVICES, namespace, name)

    await until(ask, seconds=seconds)


async def until_argument(kube: Kube, namespace: str, wanted: str, *, seconds: float = 30) -> None:
    async def ask() -> bool:
        try:
            return wanted in await arguments(kube, namespace)
        except NotFound:
            return False

    await until(ask, seconds=seconds)


async def test_from_a_service_to_ready_and_from_an_edit_to_ready_again(
    kube: Kube, namespace: str, operator: OperatorProcess, model: Model
) -> None:
    """Success right after an edit, since the old pods are ready (ai-dynamo/dynamo#3567), is never said."""
    operator.start()
    await kube.create(DIFFUSION_SERVICES, service(namespace))
    await until_condition(kube, namespace, "Released", "True")
    first = await status(kube, namespace)
    # What a first install may cost: one helm process; the finalizer and the status.
    cost = operator.metrics()
    assert cost['sojourn_operator_helm_calls_total{verb="upgrade"}'] == 1
    assert cost['sojourn_operator_helm_calls_total{verb="template"}'] == 0
    assert cost['sojourn_operator_api_writes_total{what="metadata"}'] == 1
    assert first["release"]["digest"]
    assert condition(first, "Ready")["status"] in ("False", "Unknown")
    assert condition(first, "Reconciling")["status"] == "True"
    await serve(kube, namespace, model)
    await until_condition(kube, namespace, "Ready", "True", reason="Serving")
    done = await status(kube, namespace)
    assert condition(done, "Reconciling")["status"] == "Absent"
    assert (done["replicasSummary"], done["release"]["revision"]) == ("1/1", 1)
    assert done["endpoint"] == f"dsvc-demo.{namespace}.svc:50051"
    assert done["release"]["chart"].startswith("sojourn-service-")

    # Old pods go on serving; that makes the new spec no more ready.
    await change(kube, namespace, podLabels={"team": "a"})
    seen = set()
    for _ in range(40):
        now = await status(kube, namespace)
        generation = (await kube.get(DIFFUSION_SERVICES, namespace, "demo"))["metadata"]["generation"]
        ready = condition(now, "Ready")
        if ready["observedGeneration"] == generation:
            seen.add(ready["status"])
        await asyncio.sleep(0.1)
    assert seen
    assert "True" not in seen
    await serve(kube, namespace, model)
    ready = await until_condition(kube, namespace, "Ready", "True")
    item = await kube.get(DIFFUSION_SERVICES, namespace, "demo")
    assert ready["observedGeneration"] == item["metadata"]["generation"] == item["status"]["observedGeneration"]

    # Values that become empty are not remembered by helm.
    await change(kube, namespace, podLabels=None)

    async def label_gone() -> bool:
        return "team" not in (await deployment(kube, namespace))["spec"]["template"]["metadata"]["labels"]

    await until(label_gone)
    events = {
        item["reason"]
        for item in await kube.list(EVENTS, namespace)
        if item["source"].get("component") == "sojourn-operator"
    }
    assert "Serving" in events


async def test_deleting_a_service_leaves_nothing(kube: Kube, namespace: str, operator: OperatorProcess) -> None:
    operator.start()
    await kube.create(DIFFUSION_SERVICES, service(namespace))
    await until_condition(kube, namespace, "Released", "True")
    await kube.delete(DIFFUSION_SERVICES, namespace, "demo")
    await gone(kube, namespace)
    assert not await exists(kube, DEPLOYMENTS, namespace, "dsvc-demo")
    assert not await exists(kube, SERVICES, namespace, "dsvc-demo")
    assert await revisions(kube, namespace) == {}
    # One that was never installed: refused before, so that it has no release.
    await kube.create(DIFFUSION_SERVICES, service(namespace, "never", adaLNCacheRef={"name": "missing"}))
    await until_condition(kube, namespace, "PolicyResolved", "False", name="never")
    await kube.delete(DIFFUSION_SERVICES, namespace, "never")
    await gone(kube, namespace, "never")


async def test_policies_are_followed_missed_and_counted(kube: Kube, namespace: str, operator: OperatorProcess) -> None:
    operator.start()
    await kube.create(DIFFUSION_SERVICES, service(namespace, adaLNCacheRef={"name": "small"}))
    said = await until_condition(kube, namespace, "PolicyResolved", "False", reason="PolicyNotFound")
    assert "AdaLNCache small" in said["message"]
    assert condition(await status(kube, namespace), "Stalled")["reason"] == "PolicyNotFound"
    assert not await exists(kube, DEPLOYMENTS, namespace, "dsvc-demo")

    await kube.create(ADALN_CACHES, custom("AdaLNCache", namespace, "small", plans=7))
    await until_condition(kube, namespace, "Released", "True")
    assert "--adaln-plans=7" in await arguments(kube, namespace)
    assert condition(await status(kube, namespace), "Stalled")["status"] == "Absent"

    async def used() -> bool:
        return (await kube.get(ADALN_CACHES, namespace, "small")).get("status", {}).get("users") == ["demo"]

    await until(used)
    await kube.merge(ADALN_CACHES, namespace, "small", {"spec": {"plans": 9}})
    await until_argument(kube, namespace, "--adaln-plans=9")

    # Deleted while it is in use: said, and the release stays as it is.
    await kube.delete(ADALN_CACHES, namespace, "small")
    await until_condition(kube, namespace, "PolicyResolved", "False", reason="PolicyNotFound")
    assert "--adaln-plans=9" in await arguments(kube, namespace)


RESYNCED = 'sojourn_operator_resyncs_total{result="completed"}'


async def test_idle_restart_upgrade_and_foreign_labels_write_nothing(
    kube: Kube, namespace: str, operator: OperatorProcess, model: Model, audit: Audit, tmp_path: Path
) -> None:
    """Ten minutes with every interval as it is by default, by a clock that runs 60 times as fast.

    An upgrade of the operator that restarts every model is ray-project/kuberay#2315.
    """
    operator.flags, operator.speed = (), 60
    operator.start()
    await kube.create(ADALN_CACHES, custom("AdaLNCache", namespace, "small", hostTierSize="1Gi"))
    names = [f"s{index}" for index in range(10)]

    async def up(name: str) -> None:
        await kube.create(DIFFUSION_SERVICES, service(namespace, name, adaLNCacheRef={"name": "small"}))
        await until_condition(kube, namespace, "Released", "True", name=name, seconds=120)
        await serve(kube, namespace, model, name)
        await until_condition(kube, namespace, "Ready", "True", name=name, seconds=60)

    await asyncio.gather(*map(up, names))
    records, generations = await revisions(kube, namespace), await _generations(kube, namespace, names)

    async def resynced(*, minutes: float = 0) -> None:
        """Waits for the end of another resync, and for so many minutes of the operator."""
        before = operator.metrics()[RESYNCED]

        async def passed() -> bool:
            return operator.metrics()[RESYNCED] > before

        await asyncio.gather(until(passed, seconds=60), asyncio.sleep(minutes * 60 / operator.speed))

    await resynced(minutes=1)  # ends every look that the last pod's readiness has led to
    mark = audit.mark()
    await resynced(minutes=10)
    assert [str(write) for write in audit.writes(namespace, mark)] == [], "idle"
    assert audit.writes(namespace, mark, dry_run=True), "drift was looked for"

    mark = audit.mark()
    for name in names:
        await kube.merge(DIFFUSION_SERVICES, namespace, name, {"metadata": {"labels": {"team": "a"}}})
    await resynced(minutes=1)
    assert [str(write) for write in audit.writes(namespace, mark)] == [], "a foreign label"

    for end in (operator.end, operator.kill):
        mark = audit.mark()
        end()
        operator.start().wait_healthy()
        await asyncio.sleep(3 * 60 / operator.speed)
        assert [str(write) for write in audit.writes(namespace, mark)] == [], f"restart after {end.__name__}"

    operator.end()
    chart = shutil.copytree(operator.chart, tmp_path / "newer")
    (chart / "Chart.yaml").write_text((chart / "Chart.yaml").read_text().replace("version: 0.1.0", "version: 0.2.0"))
    operator.chart = chart
    mark = audit.mark()
    operator.start().wait_healthy()

    async def rendered() -> bool:
        return operator.metrics()['sojourn_operator_helm_calls_total{verb="template"}'] == 10

    await until(rendered)
    await asyncio.sleep(3 * 60 / operator.speed)
    assert [str(write) for write in audit.writes(namespace, mark)] == [], "upgrade"
    assert (records, generations) == (await revisions(kube, namespace), await _generations(kube, namespace, names))


async def _generations(kube: Kube, namespace: str, names: list[str]) -> list[int]:
    return [(await deployment(kube, namespace, name))["metadata"]["generation"] for name in names]


async def test_drift_is_corrected_without_a_revision_and_foreign_fields_stay(
    kube: Kube, namespace: str, operator: OperatorProcess
) -> None:
    """Fields of others are no drift: kserve/kserve#2278, #2521."""
    operator.start()
    await kube.create(DIFFUSION_SERVICES, service(namespace, replicas=2))
    await until_condition(kube, namespace, "Released", "True")
    before = await revisions(kube, namespace)
    injected = {"name": "mesh", "image": "localhost/mesh:1"}
    foreign = {
        "metadata": {"labels": {"injected": "yes"}, "annotations": {"meta.helm.sh/release-name": None}},
        "spec": {"template": {"metadata": {"labels": {"mesh": "on"}}}},
    }
    await kube.merge(DEPLOYMENTS, namespace, "dsvc-demo", foreign)
    live = await deployment(kube, namespace)
    containers = [*live["spec"]["template"]["spec"]["containers"], injected]
    await kube.merge(DEPLOYMENTS, namespace, "dsvc-demo", {"spec": {"template": {"spec": {"containers": containers}}}})
    await kube.merge(DEPLOYMENTS, namespace, "dsvc-demo", {"spec": {"replicas": 5, "progressDeadlineSeconds": 7}})
    await kube.delete(SERVICES, namespace, "dsvc-demo")
    await kube.merge(NETWORK_POLICIES, namespace, "dsvc-demo", {"spec": {"ingress": [{}]}})

    async def corrected() -> bool:
        live = await deployment(kube, namespace)
        policy = await kube.get(NETWORK_POLICIES, namespace, "dsvc-demo")
        return (
            live["spec"]["replicas"] == 2
            and live["spec"]["progressDeadlineSeconds"] == 1860
            and live["metadata"]["annotations"].get("meta.helm.sh/release-name") == "dsvc-demo"
            and policy["spec"]["ingress"] != [{}]
            and await exists(kube, SERVICES, namespace, "dsvc-demo")
        )

    await until(corrected)
    live = await deployment(kube, namespace)
    assert live["metadata"]["labels"]["injected"] == "yes"
    assert live["spec"]["template"]["metadata"]["labels"]["mesh"] == "on"
    assert "mesh" in [item["name"] for item in live["spec"]["template"]["spec"]["containers"]]
    assert await revisions(kube, namespace) == before
    # The lever for replicas is the service.
    await kube.merge(DIFFUSION_SERVICES, namespace, "demo", {"spec": {"replicas": 3}}, subresource="scale")

    async def scaled() -> bool:
        return bool((await deployment(kube, namespace))["spec"]["replicas"] == 3)

    await until(scaled)


async def test_autoscaling_keeps_the_replicas_when_it_is_switched_on_and_off(
    kube: Kube, namespace: str, operator: OperatorProcess
) -> None:
    """An operator and an autoscaler that fight: defilantech/LLMKube#485."""
    operator.start()
    await kube.create(DIFFUSION_SERVICES, service(namespace, replicas=3))
    await until_condition(kube, namespace, "Released", "True")
    seen: set[int] = set()

    async def watch() -> None:
        while True:
            seen.add((await deployment(kube, namespace))["spec"]["replicas"])
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    await change(kube, namespace, replicas=1, autoscaling={"minReplicas": 2, "maxReplicas": 6})

    async def handed_over() -> bool:
        return (await status(kube, namespace)).get("release", {}).get("revision") == 2

    await until(handed_over)
    await asyncio.sleep(1)
    watching.cancel()
    assert seen == {3}, "never 1"
    # As an autoscaler does it: by the scale subresource, left alone.
    await kube.merge(DEPLOYMENTS, namespace, "dsvc-demo", {"spec": {"replicas": 5}}, subresource="scale")
    await asyncio.sleep(6)
    assert (await deployment(kube, namespace))["spec"]["replicas"] == 5
    await change(kube, namespace, replicas=2, autoscaling=None)

    async def fixed() -> bool:
        return bool((await deployment(kube, namespace))["spec"]["replicas"] == 2)

    await until(fixed)


async def test_lost_and_unreadable_records_are_written_anew(
    kube: Kube, namespace: str, operator: OperatorProcess
) -> None:
    operator.start()
    await kube.create(DIFFUSION_SERVICES, service(namespace))
    await until_condition(kube, namespace, "Released", "True")
    uid = (await deployment(kube, namespace))["metadata"]["uid"]
    (record,) = await revisions(kube, namespace)

    async def readable() -> bool:
        found = await kube.list(CONFIG_MAPS, namespace, labels="owner=helm,status=deployed")
        return bool(found) and all(len(item["data"]["release"]) > 100 for item in found)

    await kube.merge(CONFIG_MAPS, namespace, record, {"data": {"release": "broken"}})
    await until(readable, seconds=40)
    for name in await revisions(kube, namespace):
        await kube.delete(CONFIG_MAPS, namespace, name)
    await until(readable, seconds=40)
    live = await deployment(kube, namespace)
    assert (live["metadata"]["uid"], live["metadata"]["generation"]) == (uid, 1), "no pod was touched"
    # Unreadable at the very moment of an edit, and of a delete.
    for name in await revisions(kube, namespace):
        await kube.merge(CONFIG_MAPS, namespace, name, {"data": {"release": "broken"}})
    await change(kube, namespace, device="CPU")
    await until_argument(kube, namespace, "--device=cpu", seconds=40)
    for name in await revisions(kube, namespace):
        await kube.merge(CONFIG_MAPS, namespace, name, {"data": {"release": "broken"}})
    await kube.delete(DIFFUSION_SERVICES, namespace, "demo")
    await gone(kube, namespace)
    assert await revisions(kube, namespace) == {}
    assert not await exists(kube, DEPLOYMENTS, namespace, "dsvc-demo")


async def test_without_rights_on_the_records_a_delete_is_never_done(
    kube: Kube, namespace: str, operator: OperatorProcess
) -> None:
    from tests.operator.operators import ROLES, rights

    operator.start()
    await kube.create(DIFFUSION_SERVICES, service(namespace))
    await until_condition(kube, namespace, "Released", "True")
    role = next(item for item in rights(namespace) if item["kind"] == "Role")
    less = [rule for rule in role["rules"] if rule["resources"] != ["configmaps"]]
    await kube.merge(ROLES, namespace, role["metadata"]["name"], {"rules": less})
    await asyncio.sleep(1)
    await kube.delete(DIFFUSION_SERVICES, namespace, "demo")
    await until_condition(kube, namespace, "Reconciling", "True", reason="Forbidden")
    assert await exists(kube, DEPLOYMENTS, namespace, "dsvc-demo")
    await kube.merge(ROLES, namespace, role["metadata"]["name"], {"rules": role["rules"]})
    await gone(kube, namespace)
    assert not await exists(kube, DEPLOYMENTS, namespace, "dsvc-demo")


async def test_a_refused_manifest_is_stalled_said_and_not_tried_again_at_once(
    kube: Kube, namespace: str, operator: OperatorProcess, model: Model, tmp_path: Path
) -> None:
    """A field that cannot change fails an upgrade for ever in fluxcd/helm-controller#454."""
    operator.start()
    await kube.create(DIFFUSION_SERVICES, service(namespace))
    await until_condition(kube, namespace, "Released", "True")
    await serve(kube, namespace, model)
    operator.end()
    original = operator.chart
    chart = shutil.copytree(original, tmp_path / "other-selector")
    helpers = chart / "templates/_helpers.tpl"
    selector = "app.kubernetes.io/name: sojourn-service\n"
    helpers.write_text(helpers.read_text().replace(selector, selector + "extra: label\n", 1))
    operator.chart = chart
    operator.start()
    said = await until_condition(kube, namespace, "Stalled", "True", reason="ImmutableField")
    assert "delete the named object" in said["message"]
    assert condition(await status(kube, namespace), "Ready")["status"] == "False"
    calls = operator.metrics()['sojourn_operator_helm_calls_total{verb="upgrade"}']
    await asyncio.sleep(5)
    assert operator.metrics()['sojourn_operator_helm_calls_total{verb="upgrade"}'] == calls
    # What it says to do helps.
    await kube.delete(DEPLOYMENTS, namespace, "dsvc-demo")
    await annotate(kube, namespace, at="now")

    async def handled() -> bool:
        return (await status(kube, namespace)).get("lastHandledReconcileAt") == "now"

    await until(handled)
    assert condition(await status(kube, namespace), "Stalled")["status"] == "Absent"
    assert (await deployment(kube, namespace))["spec"]["selector"]["matchLabels"]["extra"] == "label"


async def test_suspend_stops_the_release_and_not_the_pods(
    kube: Kube, namespace: str, operator: OperatorProcess, model: Model
) -> None:
    operator.start()
    await kube.create(DIFFUSION_SERVICES, service(namespace))
    await until_condition(kube, namespace, "Released", "True")
    await serve(kube, namespace, model)
    await until_condition(kube, namespace, "Ready", "True")
    await change(kube, namespace, suspend=True)
    await until_condition(kube, namespace, "Released", "True", reason="Suspended")
    assert (await until_condition(kube, namespace, "Ready", "True"))["reason"] == "Serving"
    await change(kube, namespace, device="CPU")
    await until_condition(kube, namespace, "Ready", "False", reason="Suspended")
    await kube.merge(DEPLOYMENTS, namespace, "dsvc-demo", {"spec": {"progressDeadlineSeconds": 7}})
    await asyncio.sleep(5)
    assert "--device=auto" in await arguments(kube, namespace)
    assert (await deployment(kube, namespace))["spec"]["progressDeadlineSeconds"] == 7
    await change(kube, namespace, suspend=False)
    await until_argument(kube, namespace, "--device=cpu")
    await change(kube, namespace, suspend=True)
    await kube.delete(DIFFUSION_SERVICES, namespace, "demo")
    await gone(kube, namespace)


async def test_a_plan_that_does_not_fit_is_stalled_with_needed_and_available(
    kube: Kube, namespace: str, operator: OperatorProcess
) -> None:
    """Limits that nothing reads: kserve/kserve#6137."""
    operator.start()
    await kube.create(ADALN_CACHES, custom("AdaLNCache", namespace, "big", hostTierSize="8Gi"))
    limits = {"limits": {"memory": "4Gi"}}
    await kube.create(DIFFUSION_SERVICES, service(namespace, adaLNCacheRef={"name": "big"}, resources=limits))
    said = await until_condition(kube, namespace, "PlanFits", "False", reason="DoesNotFit")
    assert "9Gi in all) do not fit the memory limit of 4Gi" in said["message"]
    assert condition(await status(kube, namespace), "Stalled")["reason"] == "PlanDoesNotFit"
    assert not await exists(kube, DEPLOYMENTS, namespace, "dsvc-demo")
    await kube.merge(ADALN_CACHES, namespace, "big", {"spec": {"hostTierSize": "1Gi"}})
    await until_condition(kube, namespace, "Released", "True")


async def test_an_oom_kill_makes_it_unready_within_one_resync(
    kube: Kube, namespace: str, operator: OperatorProcess, model: Model
) -> None:
    """Ready that stays True over an OOM loop: kaito-project/kaito#1493."""
    operator.start()
    await kube.create(DIFFUSION_SERVICES, service(namespace))
    await until_condition(kube, namespace, "Released", "True")
    await serve(kube, namespace, model)
    await until_condition(kube, namespace, "Ready", "True")
    (pod,) = await kube.list(PODS, namespace)
    for finished in ("2026-09-01T12:00:00Z", "2026-09-01T13:00:00Z"):
        killed = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": finished}
        await answer(kube, pod, model, ready=False, ended=killed)
        await until_condition(kube, namespace, "Ready", "False", reason="OOMKilled", seconds=10)
        failure = (await status(kube, namespace))["lastFailure"]
        assert (failure["exitCode"], failure["container"]) == (137, "inference")
        assert failure["pod"] == pod["metadata"]["name"]
        assert (failure["finishedAt"], "recoveredAt" in failure) == (finished, False)
        await answer(kube, pod, model, ready=True)
        await until_condition(kube, namespace, "Ready", "True")
        over = (await status(kube, namespace))["lastFailure"]
        assert over == {**failure, "recoveredAt": over["recoveredAt"]}, "it stays, and one can see that it is old"


async def test_ready_needs_the_word_of_the_model_and_the_figures_come_from_it(
    kube: Kube, namespace: str, operator: OperatorProcess, model: Model
) -> None:
    """Pods that the kubelet calls ready while the model inside has stopped (SeldonIO/seldon-core#5032)."""
    operator.start()
    await kube.create(DIFFUSION_SERVICES, service(namespace))
    await until_condition(kube, namespace, "Released", "True")
    await serve(kube, namespace, model)
    await until_condition(kube, namespace, "Ready", "True")
    await until_condition(kube, namespace, "ResidencyVisible", "True")
    told = await status(kube, namespace)
    assert (told["model"], told["family"]) == ("h3-digits", "minimax-h3")
    assert "transformer" in [row["component"] for row in told["residency"]["components"]]
    # What `sojourn inspect` says of the model: 64 plans of 4 rows take more than its projections.
    assert told["adaLN"] == {"builds": 0, "hitRatio": "", "saved": "-7.53Mi", "hostTier": "0"}
    assert {entry["name"] for entry in told["memoryPlan"]} == {"sharedHostMemory", "hostPeak"}
    with model.hanging():
        said = await until_condition(kube, namespace, "Ready", "Unknown", reason="HealthUnreachable")
        assert "gets no answer" in said["message"]
    await until_condition(kube, namespace, "Ready", "True")
    # What is served is not what is wanted: no pod is the worse for it, and Ready says so.
    before = await revisions(kube, namespace)
    await change(kube, namespace, workflows=["T2VA", "REF2VA"])
    said = await until_condition(kube, namespace, "Ready", "False", reason="WorkflowMissing")
    assert "wants REF2VA" in said["message"]
    await until_condition(kube, namespace, "Stalled", "True", reason="WorkflowMissing")
    await change(kube, namespace, workflows=["T2VA"], model={"family": "other"})
    await until_condition(kube, namespace, "Ready", "False", reason="OtherFamily")
    await change(kube, namespace, model={"family": "minimax-h3"})
    await until_condition(kube, namespace, "Ready", "True")
    assert condition(await status(kube, namespace), "Stalled")["status"] == "Absent"
    assert await revisions(kube, namespace) == before


async def test_many_edits_end_in_the_last_one_and_a_delete_in_the_middle_ends(
    kube: Kube, namespace: str, operator: OperatorProcess
) -> None:
    """Edits during a handler double what it makes in nolar/kopf#916 and dask/dask-kubernetes#649."""
    operator.start()
    await kube.create(DIFFUSION_SERVICES, service(namespace))
    for grace in (11, 12, 13, 14, 15):
        await change(kube, namespace, terminationGraceSeconds=grace)
        await asyncio.sleep(0.15)
    await until_argument(kube, namespace, "--grace-seconds=15")
    await until_condition(kube, namespace, "Released", "True")
    assert len(await kube.list(DEPLOYMENTS, namespace)) == 1
    await change(kube, namespace, terminationGraceSeconds=16)
    await kube.delete(DIFFUSION_SERVICES, namespace, "demo")
    await gone(kube, namespace)
    assert await kube.list(DEPLOYMENTS, namespace) == []


async def test_work_on_an_object_that_is_gone_stops(kube: Kube, namespace: str, operator: OperatorProcess) -> None:
    """Taken away under a failing pass, with the finalizer removed by hand (dask/dask-kubernetes#810)."""
    operator.defaults["inferenceImage"] = "localhost/a:1"
    operator.start()
    foreign = {"metadata": {"name": "dsvc-demo", "namespace": namespace}, "spec": {"ports": [{"port": 1}]}}
    await kube.create(SERVICES, foreign)
    await kube.create(DIFFUSION_SERVICES, service(namespace))
    await until_condition(kube, namespace, "Stalled", "True", reason="ForeignObject")
    await kube.merge(DIFFUSION_SERVICES, namespace, "demo", {"metadata": {"finalizers": None}})
    await kube.delete(DIFFUSION_SERVICES, namespace, "demo")

    async def dropped() -> bool:
        return operator.metrics()['sojourn_operator_resources{kind="DiffusionService",ready="False"}'] == 0

    await until(dropped)
    calls = operator.metrics()['sojourn_operator_helm_calls_total{verb="upgrade"}']
    await asyncio.sleep(5)
    assert operator.metrics()['sojourn_operator_helm_calls_total{verb="upgrade"}'] == calls


@pytest.mark.parametrize("driver", ["configmap", "secret"])
async def test_the_operator_may_do_no_more_than_the_chart_says(
    kube: Kube, namespace: str, kubeconfig: Path, tmp_path: Path, driver: str
) -> None:
    """Both drivers run with the rights that the chart gives for them; with configmap no Secret can be read."""
    from sojourn.operator.errors import Forbidden
    from sojourn.operator.kube.access import from_kubeconfig, open_session
    from sojourn.operator.kube.client import SECRETS

    from tests.operator.operators import FAST, account_kubeconfig

    account = await account_kubeconfig(kubeconfig, namespace, tmp_path / "kubeconfig", f"helm.driver={driver}")
    process = OperatorProcess(account, tmp_path, (namespace,), (*FAST, f"--helm-driver={driver}"))
    try:
        process.start()
        await kube.create(DIFFUSION_SERVICES, service(namespace, autoscaling={"minReplicas": 2, "maxReplicas": 3}))
        await until_condition(kube, namespace, "Released", "True")
        await change(kube, namespace, autoscaling=None)
        await asyncio.sleep(5)
        await kube.delete(DIFFUSION_SERVICES, namespace, "demo")
        await gone(kube, namespace)
        assert "is forbidden" not in process.log()
        access = from_kubeconfig(account)
        async with open_session(access) as session:
            own = Kube(session, access.server)
            if driver == "configmap":
                with pytest.raises(Forbidden):
                    await own.list(SECRETS, namespace)
            with pytest.raises(Forbidden):
                await own.list(DIFFUSION_SERVICES, "default")
    finally:
        process.kill()
