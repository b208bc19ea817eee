"""The operator against a real API server: from a DiffusionService to a release, its status, and back."""

from sojourn.operator.kube.client import ADALN_CACHES, CONFIG_MAPS, DEPLOYMENTS, DIFFUSION_SERVICES, SERVICES, Kube

from tests.operator.cluster import condition, custom, exists, serve, service, status, until, until_condition
from tests.operator.operators import OperatorProcess


async def test_a_service_becomes_a_release_that_is_ready_once_its_pods_serve(
    kube: Kube, namespace: str, operator: OperatorProcess
) -> None:
    operator.start()
    await kube.create(DIFFUSION_SERVICES, service(namespace))
    await until_condition(kube, namespace, "Released", "True")
    first = await status(kube, namespace)
    assert condition(first, "Ready")["status"] in ("False", "Unknown")
    assert condition(first, "Reconciling")["status"] == "True"
    await serve(kube, namespace)
    await until_condition(kube, namespace, "Ready", "True", reason="Serving")
    done = await status(kube, namespace)
    assert condition(done, "Reconciling")["status"] == "Absent"
    assert done["replicasSummary"] == "1/1"
    assert done["endpoint"] == f"dsvc-demo.{namespace}.svc:50051"
    assert done["release"]["revision"] == 1
    assert done["release"]["chart"].startswith("sojourn-service-")


async def test_deleting_a_service_leaves_nothing(kube: Kube, namespace: str, operator: OperatorProcess) -> None:
    operator.start()
    await kube.create(DIFFUSION_SERVICES, service(namespace))
    await until_condition(kube, namespace, "Released", "True")
    await kube.delete(DIFFUSION_SERVICES, namespace, "demo")

    async def gone() -> bool:
        return not await exists(kube, DIFFUSION_SERVICES, namespace, "demo")

    await until(gone)
    assert not await exists(kube, DEPLOYMENTS, namespace, "dsvc-demo")
    assert not await exists(kube, SERVICES, namespace, "dsvc-demo")
    assert await kube.list(CONFIG_MAPS, namespace, labels="owner=helm") == []


async def test_a_missing_policy_is_said_and_found_when_it_appears(
    kube: Kube, namespace: str, operator: OperatorProcess
) -> None:
    operator.start()
    await kube.create(DIFFUSION_SERVICES, service(namespace, adaLNCacheRef={"name": "small"}))
    said = await until_condition(kube, namespace, "PolicyResolved", "False", reason="PolicyNotFound")
    assert "AdaLNCache small" in said["message"]
    assert condition(await status(kube, namespace), "Stalled")["reason"] == "PolicyNotFound"
    assert not await exists(kube, DEPLOYMENTS, namespace, "dsvc-demo")
    await kube.create(ADALN_CACHES, custom("AdaLNCache", namespace, "small", plans=7))
    await until_condition(kube, namespace, "Released", "True")
    deployment = await kube.get(DEPLOYMENTS, namespace, "dsvc-demo")
    assert "--adaln-plans=7" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert condition(await status(kube, namespace), "Stalled")["status"] == "Absent"
