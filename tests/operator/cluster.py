"""What the tests of this folder share: waiting, sample objects, installing the custom resources."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sojourn.operator.errors import NotFound
from sojourn.operator.kube.access import from_kubeconfig, open_session
from sojourn.operator.kube.client import Kube, Resource
from sojourn.operator.resources import API_VERSION, GROUP
from sojourn.operator.resources.definitions import KINDS, definition

CRDS = Resource("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions")
NAMESPACES = Resource("v1", "Namespace", "namespaces")
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
    deadline = asyncio.get_running_loop().time() + seconds
    while not (answer := await ready()):
        assert asyncio.get_running_loop().time() < deadline, f"{ready} not true within {seconds} s"
        await asyncio.sleep(pause)
    return answer


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
