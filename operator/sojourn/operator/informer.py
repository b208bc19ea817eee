"""kopf as an informer: its watches fill the cache and put keys into the queue. It stores nothing and decides nothing.

Only raw events are used. kopf's change handlers, timers and progress storage write to the objects, and a handler that
is gated by state that it also writes loses events; none of that is needed for a level-based reconcile.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import aiohttp
import kopf
from sojourn.operator.cache import WATCHED, Cache, Key, key_of, last_changed_by, policy_keys, shape, wish
from sojourn.operator.clock import Clock
from sojourn.operator.kube.client import DEPLOYMENTS, DIFFUSION_SERVICES, NETWORK_POLICIES, SERVICES, Object, Resource
from sojourn.operator.naming import FINALIZER, HELM_MANAGER, INSTANCE_LABEL, WORKLOAD_SELECTOR, service_name
from sojourn.operator.queueing import KeyedQueue
from sojourn.operator.telemetry import Telemetry

# Children whose changes are noticed at once; of the others a resync takes care.
CHILDREN = (DEPLOYMENTS, SERVICES, NETWORK_POLICIES)


@dataclass
class Informer:
    """Takes events and listings.

    Attributes:
        suspects: services whose objects are to be compared with their manifest; shared with the reconciler.
    """

    cache: Cache
    queue: KeyedQueue[Key]
    telemetry: Telemetry
    suspects: set[Key]

    def saw(self, resource: Resource, event_type: str | None, item: Object) -> None:
        """One event of a watch on a custom resource."""
        self.telemetry.last_event.set_to_current_time()
        key = key_of(resource.kind, item)
        if event_type == "DELETED":
            before = self.cache.drop(key)
            self._wake(key, before or item)
            return
        before = self.cache.put(key, item)
        if before is None or wish(before) != wish(item) or _released_too_early(before, item):
            self._wake(key, item)
            if before is not None:
                self._wake_policies(before)

    def saw_child(self, resource: Resource, event_type: str | None, item: Object) -> None:
        """One event of a watch on an object of a release."""
        self.telemetry.last_event.set_to_current_time()
        metadata = item["metadata"]
        name = service_name((metadata.get("labels") or {}).get(INSTANCE_LABEL, ""))
        if name is None:
            return
        key = Key(DIFFUSION_SERVICES.kind, metadata["namespace"], name)
        known = self.cache.deployment_of(key) if resource is DEPLOYMENTS else None
        before = self._remember(resource, event_type, item)
        if event_type == "DELETED" or (event_type == "MODIFIED" and before != shape(item) and not _by_us(item)):
            self.suspects.add(key)
        news = resource is DEPLOYMENTS and (
            event_type == "DELETED" or known is None or _said(known) != _said(slim(item))
        )
        if news or key in self.suspects:
            self.queue.nudge(key)

    def _remember(self, resource: Resource, event_type: str | None, item: Object) -> str | None:
        """Stores what a later event is compared with; returns the shape known before."""
        name = (resource.kind, item["metadata"]["namespace"], item["metadata"]["name"])
        before = self._shapes.get(name)
        if event_type == "DELETED":
            self._shapes.pop(name, None)
            if resource is DEPLOYMENTS:
                self.cache.deployments.pop(name[1:], None)
            return before
        self._shapes[name] = shape(item)
        if resource is DEPLOYMENTS:
            self.cache.put_deployment(slim(item))
        return before

    def _wake(self, key: Key, item: Object) -> None:
        """The object itself, and what depends on it."""
        self.queue.renew(key)
        if key.kind == DIFFUSION_SERVICES.kind:
            self._wake_policies(item)
        else:
            for user in self.cache.users_of(key):
                self.queue.renew(user)

    def _wake_policies(self, service: Object) -> None:
        for policy in policy_keys(service):
            self.queue.add(policy)

    def __post_init__(self) -> None:
        self._shapes: dict[tuple[str, str, str], str] = {}


def _released_too_early(before: Object, item: Object) -> bool:
    """Whether somebody took our finalizer away."""
    return FINALIZER in (before["metadata"].get("finalizers") or []) and FINALIZER not in (
        item["metadata"].get("finalizers") or []
    )


def _by_us(item: Object) -> bool:
    """Whether helm made the newest change: nothing to compare then. What hides in the same second a resync finds."""
    return last_changed_by(item) == {HELM_MANAGER}


def slim(deployment: Object) -> Object:
    """A Deployment without what a verdict does not need: of 500 of them every kilobyte counts."""
    metadata, spec = deployment["metadata"], deployment["spec"]
    kept = ("name", "namespace", "uid", "resourceVersion", "generation", "deletionTimestamp")
    return {
        "metadata": {name: metadata[name] for name in kept if name in metadata},
        "spec": {"replicas": spec.get("replicas", 1)},
        "status": deployment.get("status") or {},
    }


def _said(deployment: Object) -> Object:
    """What a verdict over a slim Deployment rests on. Its controller also counts in annotations, which is no news."""
    metadata = {name: value for name, value in deployment["metadata"].items() if name != "resourceVersion"}
    return {**deployment, "metadata": metadata}


def registry(
    informer: Informer, *, server: str, open_session: Callable[[], aiohttp.ClientSession]
) -> kopf.OperatorRegistry:
    """Kopf's handlers: raw events, and a login.

    kopf closes the session that it is given when it ends, or when it takes a failure for an expired login; it gets
    one of its own each time, over connections that are shared.
    """
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    def login(**_: Any) -> kopf.AiohttpSession:
        return kopf.AiohttpSession(server=server, aiohttp_session=open_session())

    for resource in WATCHED:
        _watch(handlers, resource, informer.saw)
    for resource in CHILDREN:
        _watch(handlers, resource, informer.saw_child)
    return handlers


def _watch(handlers: kopf.OperatorRegistry, resource: Resource, saw: Any) -> None:
    group, _, version = resource.api_version.rpartition("/")

    @kopf.on.event(group=group, version=version, plural=resource.plural, registry=handlers, id=resource.plural)
    async def on_event(event: kopf.RawEvent, **_: Any) -> None:
        saw(resource, event["type"], event["object"])


class _NoDiffs(kopf.DiffBaseStorage):
    """Nothing to compare with. Kopf would copy each object twice for every event, a third of the operator's work."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        """There is nothing to store."""


class _NoProgress(kopf.ProgressStorage):
    """No handler makes progress: raw events only."""

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        """There is nothing to store."""

    def purge(self, **_: Any) -> None:
        """There is nothing to purge."""

    def touch(self, **_: Any) -> None:
        """There is nothing to touch."""

    def clear(self, *, essence: Any) -> Any:
        return essence


def settings(clock: Clock) -> kopf.OperatorSettings:
    """Kopf's settings: no writes of its own, and watches that end and begin anew."""
    chosen = kopf.OperatorSettings()
    chosen.persistence.diffbase_storage = _NoDiffs()
    chosen.persistence.progress_storage = _NoProgress()
    chosen.peering.standalone = True
    chosen.posting.enabled = False
    chosen.scanning.disabled = True
    # The API server takes whole seconds.
    chosen.watching.server_timeout = round(clock.on_the_machine(600))
    chosen.networking.request_timeout = 30
    for child in CHILDREN:
        chosen.watching.label_selectors[child.plural] = WORKLOAD_SELECTOR
    return chosen


def scope(namespaces: Collection[str]) -> dict[str, Any]:
    """Kopf's arguments for some namespaces, or for all where none is named."""
    return {"namespaces": tuple(namespaces)} if namespaces else {"clusterwide": True}
