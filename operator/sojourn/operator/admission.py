"""The validating webhook: a spec that no pass could follow is refused before it is stored.

Optional, and told to the API server as ignorable: while the operator is away nobody is kept from anything, and a pass
says later, in conditions, what admission would have said at once.
"""

import asyncio
import contextlib
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from sojourn.operator.cache import Cache, Key, policy_keys
from sojourn.operator.checks import check
from sojourn.operator.errors import ApiError, BadConfiguration
from sojourn.operator.kube.client import ADALN_CACHES, LAYERWISE_OFFLOADS, Kube, Object
from sojourn.operator.nodes import Nodes
from sojourn.operator.resources.base import quantity_value
from sojourn.operator.telemetry import Telemetry

logger = logging.getLogger(__name__)

PATH = "/validate"
_POLICIES = {resource.kind: resource for resource in (ADALN_CACHES, LAYERWISE_OFFLOADS)}
# Secrets are renewed under a running process; a look at two files costs nothing.
_RENEWAL_SECONDS = 30.0


@dataclass(frozen=True)
class WebhookSettings:
    """Where admission is served.

    Attributes:
        listen: address and port.
        certificates: folder with tls.crt and tls.key, read anew when they change.
    """

    listen: tuple[str, int]
    certificates: Path


@dataclass(frozen=True)
class Ruling:
    """The answer to one review.

    Attributes:
        refused: why the object is not stored; empty if it is.
        warnings: what people are told all the same.
    """

    refused: str = ""
    warnings: tuple[str, ...] = ()


@dataclass
class Admission:
    """Judges objects with what the operator knows, and asks the API server for what it has not seen yet."""

    kube: Kube
    cache: Cache
    nodes: Nodes
    telemetry: Telemetry

    async def review(self, request: Object) -> Ruling:
        """The ruling over the `request` of an AdmissionReview."""
        if request["operation"] == "DELETE":
            return self._deleted(request)
        item, old = request["object"], request.get("oldObject") or {}
        # Labels, finalizers and the end of an object are nobody's business here, however bad its spec is.
        if "deletionTimestamp" in item["metadata"] or item.get("spec") == old.get("spec"):
            return Ruling()
        policies = {key: await self._policy(key) for key in policy_keys(item)}
        checked = check(item, policies.get, self.nodes)
        if checked.fault:
            return Ruling(f"{checked.fault.reason}: {checked.fault.message}")
        return Ruling(warnings=_tight(item))

    def _deleted(self, request: Object) -> Ruling:
        """A policy that is followed may be deleted; whoever does so is told."""
        key = Key(request["kind"]["kind"], request["namespace"], request["name"])
        users = [user.name for user in self.cache.users_of(key)] if key.kind in _POLICIES else []
        if not users:
            return Ruling()
        others = f" and {len(users) - 5} more" if len(users) > 5 else ""
        return Ruling(warnings=(f"{key.kind} {key.name} is followed by {', '.join(users[:5])}{others}",))

    async def _policy(self, key: Key) -> Object | None:
        """A policy as cached; else as it is, since it may be younger than the cache."""
        if (known := self.cache.resources.get(key)) is not None:
            return known
        try:
            return await self.kube.get(_POLICIES[key.kind], key.namespace, key.name)
        except ApiError:
            return None

    async def answer(self, request: web.Request) -> web.Response:
        """One AdmissionReview over HTTP."""
        review = await request.json()
        asked = review["request"]
        ruling = await self.review(asked)
        self.telemetry.admissions.labels("refused" if ruling.refused else "allowed").inc()
        response: Object = {"uid": asked["uid"], "allowed": not ruling.refused, "warnings": list(ruling.warnings)}
        if ruling.refused:
            logger.debug("refused %s %s: %s", asked.get("namespace"), asked.get("name"), ruling.refused)
            response["status"] = {"code": 422, "reason": "Invalid", "message": ruling.refused}
        return web.json_response({"apiVersion": review["apiVersion"], "kind": "AdmissionReview", "response": response})


def _tight(item: Object) -> tuple[str, ...]:
    """A limit below what the model of this very service planned to take when it was last loaded."""
    limit = item["spec"].get("resources", {}).get("limits", {}).get("memory")
    entries = (item.get("status") or {}).get("memoryPlan") or []
    peak = next((entry["size"] for entry in entries if entry["name"] == "hostPeak"), None)
    if limit is None or peak is None or quantity_value(peak) < quantity_value(str(limit)):
        return ()
    return (f"the model took up to {peak} of host memory, and resources.limits.memory is {limit}",)


async def serve(stack: contextlib.AsyncExitStack, admission: Admission, settings: WebhookSettings) -> None:
    """Serves reviews over TLS until the stack ends.

    Raises:
        BadConfiguration: the certificate cannot be read.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    stamp = _load(context, settings.certificates)
    application = web.Application()
    application.router.add_post(PATH, admission.answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, *settings.listen, ssl_context=context).start()
    renewing = asyncio.create_task(_renew(context, settings.certificates, stamp))
    stack.callback(renewing.cancel)


async def _renew(
    context: ssl.SSLContext, folder: Path, stamp: tuple[int, ...], *, pause_seconds: float = _RENEWAL_SECONDS
) -> None:
    """New handshakes take the files as they are."""
    while True:
        await asyncio.sleep(pause_seconds)
        try:
            if _stamp(folder) != stamp:
                stamp = _load(context, folder)
                logger.info("the webhook's certificate was renewed")
        except (BadConfiguration, OSError) as error:
            logger.warning("the webhook's certificate was not renewed: %s", error)


def _load(context: ssl.SSLContext, folder: Path) -> tuple[int, ...]:
    try:
        stamp = _stamp(folder)
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    except (OSError, ssl.SSLError) as error:
        raise BadConfiguration(f"the webhook's certificate in {folder} cannot be read: {error}") from error
    return stamp


def _stamp(folder: Path) -> tuple[int, ...]:
    return tuple((folder / name).stat().st_mtime_ns for name in ("tls.crt", "tls.key"))
