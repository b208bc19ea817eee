"""What the tests of this folder share: waiting, sample objects, installing the custom resources."""

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sojourn.operator.errors import NotFound
from sojourn.operator.kube.access import from_kubeconfig, open_session
from sojourn.operator.kube.client import DEPLOYMENTS, DIFFUSION_SERVICES, PODS, Kube, Resource
from sojourn.operator.naming import release_name
from sojourn.operator.resources import API_VERSION, GROUP
from sojourn.operator.resources.definitions import KINDS, definition

from tests.operator.served import Model

CRDS = Resource("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions")
NAMESPACES = Resource("v1", "Namespace", "namespaces")
# On a machine that is busy with other things everything takes longer.
PATIENCE = float(os.environ.get("SOJOURN_TEST_PATIENCE", "1"))
numbers = itertools.count(1)


async def install_crds(path: Path) -> None:
    access = from_kubeconfig(path)
    async with open_session(access) as session:
        kube = Kube(session, access.server)
        for kind in KINDS:
            body = definition(kind)
            body["metadata"]["namespace"] = ""
            await kube.apply(CRDS, body, manager="test")
        for kind in KINDS:
            await until(established(kube, f"{kind.plural}.{GROUP}"))


def established(kube: Kube, name: str) -> Callable[[], Awaitable[bool]]:
    async def ask() -> bool:
        crd = await kube.get(CRDS, "", name)
        conditions = crd.get("status", {}).get("conditions") or []
        return any(condition["type"] == "Established" and condition["status"] == "True" for condition in conditions)

    return ask


async def until(ready: Callable[[], Awaitable[Any]], *, seconds: float = 30, pause: float = 0.1) -> Any:
    """What `ready` answers, once it is true."""
    deadline = asyncio.get_running_loop().time() + seconds * PATIENCE
    while not (answer := await ready()):
        assert asyncio.get_running_loop().time() < deadline, f"{ready} not true within {seconds} s"
        await asyncio.sleep(pause)
    return answer


@contextlib.asynccontextmanager
async def fresh_namespace(kube: Kube) -> AsyncIterator[str]:
    """A namespace that nobody else uses, until the context ends."""
    name = f"t{os.getpid()}-{next(numbers)}"
    await kube.create(NAMESPACES, {"metadata": {"name": name, "namespace": ""}})
    yield name
    await kube.delete(NAMESPACES, "", name)


_POD_MONITORS = "podmonitors.monitoring.coreos.com"


@contextlib.asynccontextmanager
async def pod_monitors(kube: Kube) -> AsyncIterator[None]:
    """A cluster that knows PodMonitors, until the context ends."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": "PodMonitor", "plural": "podmonitors", "singular": "podmonitor"}
    spec = {"group": "monitoring.coreos.com", "scope": "Namespaced", "names": names, "versions": [version]}
    await kube.create(CRDS, {"metadata": {"name": _POD_MONITORS, "namespace": ""}, "spec": spec})
    await until(established(kube, _POD_MONITORS))
    yield
    await no_pod_monitors(kube)


async def no_pod_monitors(kube: Kube) -> None:
    """Takes the kind away, and with it every object of it."""
    with contextlib.suppress(NotFound):
        await kube.delete(CRDS, "", _POD_MONITORS)

    async def gone() -> bool:
        return not await exists(kube, CRDS, "", _POD_MONITORS)

    await until(gone)


async def exists(kube: Kube, resource: Resource, namespace: str, name: str) -> bool:
    try:
        await kube.get(resource, namespace, name)
    except NotFound:
        return False
    return True


def custom(kind: str, namespace: str, name: str, **spec: Any) -> dict[str, Any]:
    """A custom resource."""
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}


def service(namespace: str, name: str = "demo", **spec: Any) -> dict[str, Any]:
    """A DiffusionService, with the built-in model unless another is given."""
    return custom("DiffusionService", namespace, name, **{"model": {"builtIn": {}}, **spec})


async def status(kube: Kube, namespace: str, name: str = "demo") -> dict[str, Any]:
    """The status of a DiffusionService; empty where it has none."""
    item = await kube.get(DIFFUSION_SERVICES, namespace, name)
    found: dict[str, Any] = item.get("status") or {}
    return found


def condition(status: dict[str, Any], type_: str) -> dict[str, Any]:
    """A condition of a status; with status Absent where it is not there."""
    found = (item for item in status.get("conditions") or [] if item["type"] == type_)
    return next(found, {"status": "Absent", "reason": "", "message": ""})


async def until_condition(
    kube: Kube, namespace: str, type_: str, wanted: str, *, name: str = "demo", reason: str = "", seconds: float = 30
) -> dict[str, Any]:
    """The condition, once it has the status (and the reason) that is waited for."""
    last: dict[str, Any] = {}

    async def ask() -> bool:
        nonlocal last
        last = await status(kube, namespace, name)
        found = condition(last, type_)
        return found["status"] == wanted and reason in ("", found["reason"])

    try:
        await until(ask, seconds=seconds)
    except AssertionError as error:
        raise AssertionError(f"{type_} is not {wanted} {reason} within {seconds} s: {last}") from error
    return condition(last, type_)


async def serve(kube: Kube, namespace: str, model: Model, name: str = "demo", *, wanted: int = 1) -> None:
    """Plays the kubelet of a control plane without nodes: the pods of the newest spec run, where a model is served."""

    async def served() -> bool:
        deployment = await kube.get(DEPLOYMENTS, namespace, release_name(name))
        state = deployment.get("status") or {}
        if state.get("observedGeneration") != deployment["metadata"]["generation"]:
            return False
        for pod in await kube.list(PODS, namespace, labels=f"app.kubernetes.io/instance={release_name(name)}"):
            await answer(kube, pod, model)
        return state.get("availableReplicas") == state.get("updatedReplicas") == state.get("replicas") == wanted

    await until(served, seconds=40)


async def answer(
    kube: Kube, pod: dict[str, Any], model: Model, *, ready: bool = True, ended: dict[str, Any] | None = None
) -> None:
    """Writes a pod's status as a kubelet does."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    flag = "True" if ready else "False"
    conditions = [
        {"type": type_, "status": state, "lastTransitionTime": now}
        for type_, state in (("PodScheduled", "True"), ("Ready", flag), ("ContainersReady", flag))
    ]
    state = {"running": {"startedAt": now}} if ended is None else {"terminated": ended}
    containers = [
        {
            "name": item["name"],
            "image": item["image"],
            "imageID": "",
            "ready": ready,
            "restartCount": int(not ready),
            "state": state,
        }
        for item in pod["spec"]["containers"]
    ]
    address = {"podIP": model.address, "podIPs": [{"ip": model.address}]}
    body = {"status": {"phase": "Running", "conditions": conditions, "containerStatuses": containers, **address}}
    with contextlib.suppress(NotFound):
        await kube.merge(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], body, subresource="status")
