"""What the operator writes to custom resources: the finalizer, the status, events. Never what is equal already."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sojourn.operator.cache import Cache, Key
from sojourn.operator.clock import Clock
from sojourn.operator.conditions import PLAN_FITS, POLICY_RESOLVED, READY, STALLED, find, transitions
from sojourn.operator.errors import ApiError
from sojourn.operator.kube.client import (
    ADALN_CACHES,
    DIFFUSION_SERVICES,
    EVENTS,
    LAYERWISE_OFFLOADS,
    Kube,
    Object,
    Resource,
)
from sojourn.operator.naming import FINALIZER
from sojourn.operator.reporting import FIGURES, changes, ready_conditions
from sojourn.operator.resources.status import Condition

logger = logging.getLogger(__name__)

_BY_KIND: dict[str, Resource] = {
    resource.kind: resource for resource in (DIFFUSION_SERVICES, ADALN_CACHES, LAYERWISE_OFFLOADS)
}
# People get an event when one of these turns, not for every figure.
_TOLD = (READY, STALLED, POLICY_RESOLVED, PLAN_FITS)


@dataclass
class Writer:
    """Writes to custom resources, and puts the answers into the cache.

    Attributes:
        kube: the API server.
        cache: what was last seen.
        figures_seconds: between two writes of figures alone.
        clock: by which they are counted.
        now: the time of day.
    """

    kube: Kube
    cache: Cache
    figures_seconds: float
    clock: Clock = field(default_factory=Clock)
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    _written: dict[Key, float] = field(default_factory=dict)

    def stamp(self) -> str:
        """The time as the API writes it."""
        return self.now().strftime("%Y-%m-%dT%H:%M:%SZ")

    async def ensure_finalizer(self, key: Key, item: Object) -> Object:
        """The object with our finalizer."""
        finalizers = item["metadata"].get("finalizers")
        if FINALIZER in (finalizers or []):
            return item
        operation = (
            {"op": "add", "path": "/metadata/finalizers/-", "value": FINALIZER}
            if finalizers
            else {"op": "add", "path": "/metadata/finalizers", "value": [FINALIZER]}
        )
        return await self._patch(key, item, operation)

    async def remove_finalizer(self, key: Key, item: Object) -> None:
        """Lets the object go."""
        position = item["metadata"]["finalizers"].index(FINALIZER)
        await self._patch(key, item, {"op": "remove", "path": f"/metadata/finalizers/{position}"})

    async def write_status(self, key: Key, status: Object) -> None:
        """Writes what differs; figures alone only every `figures_seconds`."""
        before = self.cache.resources[key].get("status") or {}
        changed = changes(before, status)
        if not changed or (changed.keys() <= FIGURES and not self._due(key)):
            return
        body = {"status": changed}
        answer = await self.kube.merge(_BY_KIND[key.kind], key.namespace, key.name, body, subresource="status")
        self.cache.put(key, answer)
        self._written[key] = self.clock.now()
        if key.kind == DIFFUSION_SERVICES.kind:
            await self._tell_transitions(key, before, status)

    async def event(self, key: Key, type_: str, reason: str, message: str) -> None:
        """An event about an object; that it cannot be written stops nothing."""
        item = self.cache.resources.get(key)
        if item is None:
            return
        try:
            await self.kube.create(EVENTS, self._event(key, item, type_, reason, message), what="event")
        except ApiError as error:
            logger.debug("event about %s not written: %s", key, error)

    async def look_again(self, key: Key) -> None:
        """Reads the object anew.

        Raises:
            NotFound: it is gone.
        """
        self.cache.put(key, await self.kube.get(_BY_KIND[key.kind], key.namespace, key.name))

    def forget(self, key: Key) -> None:
        """The object is gone."""
        self._written.pop(key, None)

    def _due(self, key: Key) -> bool:
        last = self._written.get(key)
        return last is None or self.clock.now() - last >= self.figures_seconds

    async def _patch(self, key: Key, item: Object, operation: Object) -> Object:
        """A JSON patch that holds for this very version of the object only."""
        test = {"op": "test", "path": "/metadata/resourceVersion", "value": item["metadata"]["resourceVersion"]}
        answer = await self.kube.json_patch(_BY_KIND[key.kind], key.namespace, key.name, [test, operation])
        self.cache.put(key, answer)
        return answer

    async def _tell_transitions(self, key: Key, before: Object, after: Object) -> None:
        earlier, later = ready_conditions(before), ready_conditions(after)
        for turned in transitions(earlier, later):
            if turned.type in _TOLD and (type_ := _worth_telling(find(earlier, turned.type), turned)):
                await self.event(key, type_, turned.reason, f"{turned.type} {turned.status}: {turned.message}")

    def _event(self, key: Key, item: Object, type_: str, reason: str, message: str) -> Object:
        stamp = self.stamp()
        return {
            "metadata": {"generateName": f"{key.name}.", "namespace": key.namespace},
            "involvedObject": {
                "apiVersion": item["apiVersion"],
                "kind": key.kind,
                "name": key.name,
                "namespace": key.namespace,
                "uid": item["metadata"]["uid"],
            },
            "type": type_,
            "reason": reason,
            "message": message[:1024],
            "source": {"component": "sojourn-operator"},
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }


def _worth_telling(before: Condition | None, after: Condition) -> str | None:
    """The type of event for a condition that turned; None where it is no news."""
    bad = after.status == ("True" if after.type == STALLED else "False")
    if after.type == READY:
        return "Normal" if after.status == "True" else None
    if bad:
        return "Warning"
    recovered = before is not None and before.status == "False" and after.status == "True"
    return "Normal" if recovered else None
