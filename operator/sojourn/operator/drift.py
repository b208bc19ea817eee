"""Drift: what others changed of a release's objects, found and undone by server-side apply.

A dry-run apply of the stored manifest, under helm's own name, answers with the object as it would be. Where that
differs from what is there, somebody changed a field of ours; the same apply without dry-run undoes it, and makes no
new revision. Fields that are not in the manifest (replicas under an autoscaler, foreign labels, injected containers)
are in neither.
"""

from dataclasses import dataclass

from sojourn.operator.errors import NotFound
from sojourn.operator.kube.client import Kube, Object, Resource
from sojourn.operator.manifest import as_applied, objects, resource_of
from sojourn.operator.naming import HELM_MANAGER

_VOLATILE = ("managedFields", "resourceVersion", "generation", "creationTimestamp", "uid", "selfLink")


@dataclass(frozen=True)
class Drift:
    """One object that was put back.

    Attributes:
        fields: paths of what differed, the first few; empty where the object was missing.
    """

    kind: str
    name: str
    fields: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.name} " + (f"({', '.join(self.fields)})" if self.fields else "(missing)")


async def correct(kube: Kube, manifest: str, *, release: str, namespace: str) -> list[Drift]:
    """Puts every object of a manifest back to what it says; returns what had drifted."""
    found = []
    for item in objects(manifest):
        resource = resource_of(item)
        if resource and (
            drift := await _correct(kube, resource, as_applied(item, release=release, namespace=namespace))
        ):
            found.append(drift)
    return found


async def _correct(kube: Kube, resource: Resource, item: Object) -> Drift | None:
    name, namespace = item["metadata"]["name"], item["metadata"]["namespace"]
    try:
        live = await kube.get(resource, namespace, name)
    except NotFound:
        live = None
    if live is not None:
        would_be = await kube.apply(resource, item, manager=HELM_MANAGER, dry_run=True)
        changed = differences(comparable(live), comparable(would_be))
        if not changed or "deletionTimestamp" in live["metadata"]:
            return None
    await kube.apply(resource, item, manager=HELM_MANAGER)
    return Drift(resource.kind, name, tuple(changed[:5]) if live is not None else ())


def comparable(item: Object) -> Object:
    """The object without what changes by itself."""
    metadata = {key: value for key, value in item["metadata"].items() if key not in _VOLATILE}
    return {**{key: value for key, value in item.items() if key != "status"}, "metadata": metadata}


def differences(live: object, wanted: object, path: str = "") -> list[str]:
    """Paths at which two objects differ."""
    if isinstance(live, dict) and isinstance(wanted, dict):
        return [
            found
            for key in sorted(live.keys() | wanted.keys())
            for found in differences(live.get(key), wanted.get(key), f"{path}.{key}" if path else key)
        ]
    if isinstance(live, list) and isinstance(wanted, list) and len(live) == len(wanted):
        return [
            found
            for index, (one, other) in enumerate(zip(live, wanted, strict=True))
            for found in differences(one, other, f"{path}[{index}]")
        ]
    return [] if live == wanted else [path]


async def sweep(
    kube: Kube, resources: tuple[Resource, ...], manifest: str, *, release: str, namespace: str, owner: str
) -> list[str]:
    """Deletes objects of a release that its manifest lacks: what a killed or failed upgrade leaves for ever.

    Only objects that bear the owner reference of the service are touched.

    Args:
        kube: the API server.
        resources: kinds to look at; kinds that the cluster does not know are left out.
        manifest: what belongs to the release.
        release: name of the release.
        namespace: where it is.
        owner: uid of the service.

    Returns:
        Kind and name of what was deleted.
    """
    wanted = {(item["kind"], item["metadata"]["name"]) for item in objects(manifest)}
    swept = []
    for resource in resources:
        for item in await _owned(kube, resource, release, namespace, owner):
            name = item["metadata"]["name"]
            if (resource.kind, name) not in wanted and "deletionTimestamp" not in item["metadata"]:
                await kube.delete(resource, namespace, name, uid=item["metadata"]["uid"])
                swept.append(f"{resource.kind} {name}")
    return swept


async def _owned(kube: Kube, resource: Resource, release: str, namespace: str, owner: str) -> list[Object]:
    try:
        items = await kube.list_metadata(resource, namespace, labels=f"app.kubernetes.io/instance={release}")
    except NotFound:
        return []
    return [item for item in items if any(ref["uid"] == owner for ref in item["metadata"].get("ownerReferences") or [])]
