"""What the operator last saw of the custom resources and of the services' Deployments.

Filled by events, by resyncs and by the answers to our own writes; an older version never replaces a newer one, so a
pass after our own write does not see the state before it.
"""

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from sojourn.operator.desired import canonical
from sojourn.operator.kube.client import ADALN_CACHES, DIFFUSION_SERVICES, LAYERWISE_OFFLOADS, Object
from sojourn.operator.naming import RECONCILE_AT, release_name

WATCHED = (DIFFUSION_SERVICES, ADALN_CACHES, LAYERWISE_OFFLOADS)


class Key(NamedTuple):
    """A custom resource."""

    kind: str
    namespace: str
    name: str


def key_of(kind: str, item: Object) -> Key:
    """The key of an object."""
    return Key(kind, item["metadata"]["namespace"], item["metadata"]["name"])


def policy_keys(service: Object) -> list[Key]:
    """The policies that a service refers to."""
    spec, namespace = service.get("spec", {}), service["metadata"]["namespace"]
    references = ((ADALN_CACHES.kind, "adaLNCacheRef"), (LAYERWISE_OFFLOADS.kind, "layerwiseOffloadRef"))
    return [Key(kind, namespace, spec[field]["name"]) for kind, field in references if spec.get(field)]


def wish(item: Object) -> tuple[object, ...]:
    """What people want of an object. Labels, foreign annotations and status are not part of it."""
    metadata = item["metadata"]
    return (
        metadata["uid"],
        metadata.get("generation"),
        metadata.get("deletionTimestamp"),
        (metadata.get("annotations") or {}).get(RECONCILE_AT),
    )


def shape(item: Object) -> str:
    """Hash of what drift can change: all but status and what the API server counts."""
    metadata = item["metadata"]
    kept = {name: metadata.get(name) for name in ("labels", "ownerReferences", "finalizers")}
    # The Deployment controller counts rollouts in an annotation.
    kept["annotations"] = {
        name: value
        for name, value in (metadata.get("annotations") or {}).items()
        if not name.startswith("deployment.kubernetes.io/")
    }
    body = {name: value for name, value in item.items() if name not in ("metadata", "status")}
    return hashlib.sha256(canonical([kept, body]).encode()).hexdigest()


def last_changed_by(item: Object) -> set[str]:
    """Managers of the newest change to an object's fields, by the second; its status apart."""
    entries = [entry for entry in item["metadata"].get("managedFields") or [] if entry.get("subresource") != "status"]
    newest = max((entry.get("time", "") for entry in entries), default="")
    return {entry.get("manager", "") for entry in entries if entry.get("time", "") == newest}


@dataclass
class Cache:
    """Objects by key."""

    resources: dict[Key, Object] = field(default_factory=dict)
    deployments: dict[tuple[str, str], Object] = field(default_factory=dict)

    def put(self, key: Key, item: Object) -> Object | None:
        """Stores an object unless a newer version is known; returns what was known before."""
        before = self.resources.get(key)
        if before is None or is_newer(item, before):
            self.resources[key] = item
        return before

    def drop(self, key: Key) -> Object | None:
        """Forgets an object; returns what was known."""
        return self.resources.pop(key, None)

    def put_deployment(self, item: Object) -> Object | None:
        """Stores a Deployment of a release unless a newer version is known; returns what was known before."""
        key = (item["metadata"]["namespace"], item["metadata"]["name"])
        before = self.deployments.get(key)
        if before is None or is_newer(item, before):
            self.deployments[key] = item
        return before

    def deployment_of(self, service: Key) -> Object | None:
        """The Deployment of a service."""
        return self.deployments.get((service.namespace, release_name(service.name)))

    def of_kind(self, kind: str) -> Iterator[tuple[Key, Object]]:
        """Every object of a kind."""
        return ((key, item) for key, item in self.resources.items() if key.kind == kind)

    def users_of(self, policy: Key) -> list[Key]:
        """Services that refer to a policy, in order of their names."""
        return sorted(key for key, item in self.of_kind(DIFFUSION_SERVICES.kind) if policy in policy_keys(item))

    def replace(self, kind: str, items: Iterable[Object], known: Mapping[Key, Object]) -> list[Key]:
        """Takes a whole listing of a kind: what is not in it is gone. Returns the keys that are.

        After a watch that ended in 410 nobody is told of deletions; this is where they are noticed.

        Args:
            kind: of the items.
            items: the listing.
            known: what was cached when it was asked for. What a watch told of since then is newer than the listing.
        """
        listed = {key_of(kind, item): item for item in items}
        cached = dict(self.of_kind(kind))
        gone = _lost(cached, listed, known)
        for key in gone:
            self.drop(key)
        for key, item in listed.items():
            if not _ended(key, item, cached, known):
                self.put(key, item)
        return gone

    def replace_deployments(self, items: Iterable[Object], known: Mapping[tuple[str, str], Object]) -> None:
        """The same for Deployments."""
        listed = {(item["metadata"]["namespace"], item["metadata"]["name"]): item for item in items}
        cached = dict(self.deployments)
        for key in _lost(cached, listed, known):
            del self.deployments[key]
        for key, item in listed.items():
            if not _ended(key, item, cached, known):
                self.put_deployment(item)


Name = TypeVar("Name", bound=Hashable)


def _lost(cached: Mapping[Name, Object], listed: Mapping[Name, Object], known: Mapping[Name, Object]) -> list[Name]:
    """What was there before the listing was asked for, is not in it, and was not made anew since."""
    return [key for key, item in cached.items() if key not in listed and key in known and _same(item, known[key])]


def _ended(key: Name, item: Object, cached: Mapping[Name, Object], known: Mapping[Name, Object]) -> bool:
    """Whether a watch told of the end of a listed object while the listing was on its way."""
    return key not in cached and key in known and _same(item, known[key])


def _same(item: Object, other: Object) -> bool:
    return bool(item["metadata"]["uid"] == other["metadata"]["uid"])


def is_newer(item: Object, other: Object) -> bool:
    """Whether a version of an object is newer than another. Versions of one object are numbers that grow."""
    metadata, known = item["metadata"], other["metadata"]
    if metadata["uid"] != known["uid"]:
        return True
    return int(metadata["resourceVersion"]) >= int(known["resourceVersion"])
