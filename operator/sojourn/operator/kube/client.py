"""What the operator asks of the API server, as methods with typed errors. Nothing is retried here."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import aiohttp
from sojourn.operator.errors import ApiError, Conflict, Forbidden, Invalid, NotFound
from sojourn.operator.resources import GROUP, VERSION

Object = dict[str, Any]
Objects = list[Object]

MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
# Metadata alone: the body of a release record is not worth its memory to learn its state.
PARTIAL_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

_BY_STATUS: dict[int, type[ApiError]] = {400: Invalid, 403: Forbidden, 404: NotFound, 409: Conflict, 422: Invalid}


@dataclass(frozen=True)
class Resource:
    """A kind of object as the API addresses it."""

    api_version: str
    kind: str
    plural: str

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Address of the collection, or of one object or its subresource."""
        root = "/api" if "/" not in self.api_version else "/apis"
        parts = [root, self.api_version]
        parts += ["namespaces", namespace] if namespace else []
        parts += [self.plural, *(part for part in (name, subresource) if part)]
        return "/".join(parts)


ADALN_CACHES = Resource(f"{GROUP}/{VERSION}", "AdaLNCache", "adalncaches")
LAYERWISE_OFFLOADS = Resource(f"{GROUP}/{VERSION}", "LayerwiseOffload", "layerwiseoffloads")
DIFFUSION_SERVICES = Resource(f"{GROUP}/{VERSION}", "DiffusionService", "diffusionservices")
CONFIG_MAPS = Resource("v1", "ConfigMap", "configmaps")
SECRETS = Resource("v1", "Secret", "secrets")
PODS = Resource("v1", "Pod", "pods")
NODES = Resource("v1", "Node", "nodes")
EVENTS = Resource("v1", "Event", "events")
DEPLOYMENTS = Resource("apps/v1", "Deployment", "deployments")
SERVICES = Resource("v1", "Service", "services")
NETWORK_POLICIES = Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")

# Every kind that the chart of a service can make. Known beforehand, so that no discovery is needed, and so that a
# kind whose definition is gone can be left out by name.
CHART_KINDS = (
    Resource("v1", "ServiceAccount", "serviceaccounts"),
    CONFIG_MAPS,
    SERVICES,
    DEPLOYMENTS,
    NETWORK_POLICIES,
    Resource("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers"),
    Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    Resource("monitoring.coreos.com/v1", "PodMonitor", "podmonitors"),
)


class Kube:
    """One API server."""

    def __init__(
        self, session: aiohttp.ClientSession, server: str, *, on_write: Callable[[str], None] = lambda what: None
    ) -> None:
        """Uses `session` for everything.

        Args:
            session: as made by `access.open_session`; whoever opened it closes it.
            server: address of the API server.
            on_write: told of every write with what it was (status, metadata, event, object), dry runs as dry_run.
        """
        self._session = session
        self._server = server
        self._on_write = on_write

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """One object."""
        return await self._ask("GET", resource.path(namespace, name))

    async def list(self, resource: Resource, namespace: str | None = None, *, labels: str = "") -> Objects:
        """All objects of a kind, in one namespace or all, by label selector."""
        return await self._list(resource, namespace, labels, accept="application/json")

    async def list_metadata(self, resource: Resource, namespace: str | None = None, *, labels: str = "") -> Objects:
        """The same, but nothing except `metadata`."""
        return await self._list(resource, namespace, labels, accept=PARTIAL_LIST)

    async def create(self, resource: Resource, body: Object, *, what: str = "object") -> Object:
        """Makes an object in the namespace that its metadata names."""
        self._on_write(what)
        return await self._ask("POST", resource.path(body["metadata"]["namespace"]), body=body)

    async def merge(
        self, resource: Resource, namespace: str, name: str, body: Object, *, subresource: str | None = None
    ) -> Object:
        """Merge patch."""
        self._on_write(subresource or "metadata")
        path = resource.path(namespace, name, subresource)
        return await self._ask("PATCH", path, body=body, content=MERGE_PATCH)

    async def json_patch(self, resource: Resource, namespace: str, name: str, operations: Objects) -> Object:
        """JSON patch; a `test` that fails is a Conflict.

        Raises:
            Conflict: the object is not what the patch was made for.
        """
        self._on_write("metadata")
        try:
            return await self._ask("PATCH", resource.path(namespace, name), body=operations, content=JSON_PATCH)
        except Invalid as error:
            raise Conflict(str(error), status=error.status) from error

    async def apply(self, resource: Resource, body: Object, *, manager: str, dry_run: bool = False) -> Object:
        """Server-side apply, by force. The answer is the whole object as it is, or as it would be."""
        self._on_write("dry_run" if dry_run else "object")
        metadata = body["metadata"]
        query = {"fieldManager": manager, "force": "true", "fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if dry_run else {}
        path = f"{resource.path(metadata['namespace'], metadata['name'])}?{urlencode(query)}"
        return await self._ask("PATCH", path, body=body, content=APPLY_PATCH)

    async def delete(self, resource: Resource, namespace: str, name: str, *, uid: str | None = None) -> None:
        """Deletes an object, in the background; with `uid` only that very one."""
        self._on_write("object")
        body: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        body |= {"preconditions": {"uid": uid}} if uid else {}
        await self._ask("DELETE", resource.path(namespace, name), body=body)

    async def _list(self, resource: Resource, namespace: str | None, labels: str, *, accept: str) -> Objects:
        path = resource.path(namespace)
        answer = await self._ask(
            "GET", f"{path}?{urlencode({'labelSelector': labels})}" if labels else path, accept=accept
        )
        items: Objects = answer.get("items") or []  # an empty list of metadata is null
        return items

    async def _ask(
        self, method: str, path: str, *, body: Any = None, content: str = "application/json", accept: str = ""
    ) -> Object:
        headers = {"Content-Type": content, "Accept": accept or "application/json"}
        data = None if body is None else json.dumps(body).encode()
        try:
            async with self._session.request(method, self._server + path, data=data, headers=headers) as answer:
                text = await answer.text()
                status = answer.status
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ApiError(f"{method} {path}: {error!r}") from error
        if status >= 400:
            raise _error(method, path, status, text)
        answered: Object = json.loads(text)
        return answered


def _error(method: str, path: str, status: int, text: str) -> ApiError:
    try:
        answer: Mapping[str, Any] = json.loads(text)
    except ValueError:
        answer = {}
    causes = (answer.get("details") or {}).get("causes") or []
    return _BY_STATUS.get(status, ApiError)(
        f"{method} {path.split('?')[0]}: {answer.get('message') or text[:300]}",
        status=status,
        causes=tuple((cause.get("field", ""), cause.get("message", "")) for cause in causes),
    )
