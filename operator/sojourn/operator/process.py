"""The process: one session, one queue, a few workers, a resync, and two pages over HTTP."""

import asyncio
import logging
import random
import sys
import time
from collections.abc import Collection
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from typing import Any, cast

import aiohttp
import kopf
from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from sojourn.operator import informer as informing
from sojourn.operator import logs
from sojourn.operator.admission import Admission, WebhookSettings
from sojourn.operator.admission import serve as serve_admission
from sojourn.operator.cache import WATCHED, Cache, Key
from sojourn.operator.certificate import ClientCertificate
from sojourn.operator.clock import Clock
from sojourn.operator.defaults import Defaults
from sojourn.operator.errors import OperatorError
from sojourn.operator.helm import Helm, HelmSettings
from sojourn.operator.kube.access import Access, open_connector, open_session
from sojourn.operator.kube.client import DEPLOYMENTS, DIFFUSION_SERVICES, Kube, Object, Resource
from sojourn.operator.manifest import chart_digest, chart_label
from sojourn.operator.naming import WORKLOAD_SELECTOR
from sojourn.operator.nodes import Nodes
from sojourn.operator.queueing import Backoff, KeyedQueue
from sojourn.operator.reconcile import Pace, Reconciler
from sojourn.operator.records import RecordBook
from sojourn.operator.releases import Releases
from sojourn.operator.telemetry import Problem, Snapshot, Telemetry
from sojourn.operator.writing import Writer

logger = logging.getLogger(__name__)

# Whether the pass that runs in this context has changed anything; passes at the same time do not count for it.
_changed: ContextVar[bool] = ContextVar("changed", default=False)
# What is written without a change to any object of people's: events are news, dry runs are questions.
_NO_CHANGE = frozenset({"event", "dry_run"})
# Conditions that are wrong when they are what is said here.
_WRONG = {
    "Ready": "False",
    "Stalled": "True",
    "PolicyResolved": "False",
    "PlanFits": "False",
    "ResidencyVisible": "False",
}


@dataclass(frozen=True)
class Settings:
    """How the process runs.

    Attributes:
        namespaces: that it looks after; empty for all.
        workers: passes at once. Most of a pass is waiting for helm.
        resync_seconds: shortest and longest time between two whole listings.
        listen: address and port of /healthz and /metrics.
        helm: how helm is called.
        pace: how often things are looked at.
        backoff: pauses after failed passes.
        webhook: where admission is served; None for nowhere.
        certificate: shown to models that demand one; None for none.
        clock: by which all of these intervals are counted.
    """

    namespaces: tuple[str, ...] = ()
    workers: int = 8
    resync_seconds: tuple[float, float] = (300.0, 600.0)
    listen: tuple[str, int] = ("0.0.0.0", 8080)
    helm: HelmSettings = field(default_factory=HelmSettings)
    pace: Pace = field(default_factory=Pace)
    backoff: Backoff = field(default_factory=Backoff)
    webhook: WebhookSettings | None = None
    certificate: ClientCertificate | None = None
    clock: Clock = field(default_factory=Clock)


@dataclass
class Heartbeat:
    """When the last resync ended. An idle cluster sends nothing for hours, so only this tells deafness from peace."""

    resync_seconds: tuple[float, float]
    clock: Clock = field(default_factory=Clock)
    last: float | None = None

    def beat(self) -> None:
        """A resync has ended well."""
        self.last = self.clock.now()

    def healthy(self) -> bool:
        """Whether the last resync is no older than one and a half of the longest pause."""
        return self.last is not None and self.clock.now() - self.last < 1.5 * self.resync_seconds[1]


class Operator:
    """Everything of one run."""

    def __init__(
        self,
        settings: Settings,
        access: Access,
        defaults: Defaults,
        connector: aiohttp.TCPConnector,
        session: aiohttp.ClientSession,
    ) -> None:
        self.settings = settings
        self.telemetry = Telemetry(version=_version())
        self.kube = Kube(session, access.server, on_write=self._on_write)
        self.nodes = Nodes(self.kube, enabled=defaults.check_nodes and not settings.namespaces)
        self.cache = Cache()
        self.queue: KeyedQueue[Key] = KeyedQueue(settings.backoff, settings.clock)
        self.heartbeat = Heartbeat(settings.resync_seconds, settings.clock)
        self.book = RecordBook(self.kube, "secret" if settings.helm.driver == "secret" else "configmap")
        helm = Helm(settings.helm, observe=self.telemetry.helm_call)
        releases = Releases(self.kube, helm, self.book, chart_digest=chart_digest(settings.helm.chart))
        self.reconciler = Reconciler(
            kube=self.kube,
            releases=releases,
            cache=self.cache,
            defaults=defaults,
            chart=chart_label(settings.helm.chart),
            telemetry=self.telemetry,
            nodes=self.nodes,
            writer=Writer(self.kube, self.cache, settings.pace.observe_seconds, settings.clock),
            pace=settings.pace,
            certificate=settings.certificate,
            clock=settings.clock,
        )
        self.admission = Admission(self.kube, self.cache, self.nodes, self.telemetry)
        self.informer = informing.Informer(self.cache, self.queue, self.telemetry, self.reconciler.suspects)
        self._registry = informing.registry(
            self.informer, server=access.server, open_session=lambda: open_session(access, connector)
        )
        self.telemetry.watch_resources(self.snapshot, self._oldest_pending)

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until `stop` is set, or a signal comes."""
        await self._first_listing()
        tasks = [asyncio.create_task(self._work()) for _ in range(self.settings.workers)]
        tasks.append(asyncio.create_task(self._resync_forever()))
        tasks.append(asyncio.create_task(self._count_forever()))
        try:
            await kopf.operator(
                registry=self._registry,
                # Else kopf asks for the user's name, which a container's user has not.
                identity=cast(Any, "sojourn-operator"),
                settings=informing.settings(self.settings.clock),
                stop_flag=stop,
                **informing.scope(self.settings.namespaces),
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _first_listing(self) -> None:
        """Nothing is decided before everything was seen: a policy that was not listed yet is not missing."""
        failures = 0
        while True:
            try:
                return await self.resync(suspect=False)
            except OperatorError as error:
                failures += 1
                pause = self.settings.backoff.pause(failures)
                logger.warning("first listing: %s (again in %.0f s)", error, pause)
                await self.settings.clock.sleep(pause)

    async def resync(self, *, suspect: bool) -> None:
        """Lists every kind once: what is gone is dropped, what was missed is found.

        Args:
            suspect: whether to compare every release with its manifest as well.
        """
        scopes = self.settings.namespaces or (None,)
        await self.book.read_all(scopes)
        await self.nodes.refresh()
        known_deployments = dict(self.cache.deployments)
        deployments = map(informing.slim, await self._list_all(DEPLOYMENTS, scopes))
        self.cache.replace_deployments(deployments, known_deployments)
        for resource in WATCHED:
            known = dict(self.cache.of_kind(resource.kind))
            items = await self._list_all(resource, scopes)
            typed = [_typed(item, resource.api_version, resource.kind) for item in items]
            for gone in self.cache.replace(resource.kind, typed, known):
                self._wake_after_loss(gone)
        for key in list(self.cache.resources):
            if suspect and key.kind == DIFFUSION_SERVICES.kind:
                self.reconciler.suspects.add(key)
            self.queue.remind(key)
        self.telemetry.last_event.set_to_current_time()
        self.heartbeat.beat()

    async def _list_all(self, resource: Resource, scopes: Collection[str | None]) -> list[Object]:
        labels = WORKLOAD_SELECTOR if resource is DEPLOYMENTS else ""
        return [item for scope in scopes for item in await self.kube.list(resource, scope, labels=labels)]

    def _wake_after_loss(self, gone: Key) -> None:
        """A deletion that no watch told of."""
        for user in self.cache.users_of(gone):
            self.queue.add(user)

    async def _work(self) -> None:
        while True:
            key = await self.queue.take()
            try:
                await self._pass(key)
            finally:
                self.queue.done(key)

    async def _pass(self, key: Key) -> None:
        started = time.monotonic()
        _changed.set(False)
        try:
            again = await self.reconciler.reconcile(key)
        except OperatorError as error:
            pause = self.queue.failed(key)
            self.telemetry.reconciles.labels(key.kind, "retried").inc()
            logger.warning("%s %s/%s: %s (again in %.0f s)", *key, error, pause)
            await self.reconciler.report(key, error)
        except Exception:
            pause = self.queue.failed(key)
            self.telemetry.reconciles.labels(key.kind, "failed").inc()
            logger.exception("%s %s/%s: a fault of the operator (again in %.0f s)", *key, pause)
        else:
            self.queue.succeeded(key)
            result = "applied" if _changed.get() else "unchanged"
            self.telemetry.reconciles.labels(key.kind, result).inc()
            if again is not None:
                self.queue.add(key, after=again)
        finally:
            self.telemetry.reconcile_seconds.labels(key.kind).observe(time.monotonic() - started)

    def _on_write(self, what: str) -> None:
        self.telemetry.written(what)
        if what not in _NO_CHANGE:
            _changed.set(True)

    async def _resync_forever(self) -> None:
        while True:
            await self.settings.clock.sleep(random.uniform(*self.settings.resync_seconds))
            try:
                await self.resync(suspect=True)
            except OperatorError as error:
                self.telemetry.resyncs.labels("failed").inc()
                logger.warning("resync: %s", error)
            else:
                self.telemetry.resyncs.labels("completed").inc()

    async def _count_forever(self) -> None:
        while True:
            self.telemetry.queue_depth.set(self.queue.waiting())
            await asyncio.sleep(1)

    def _oldest_pending(self) -> float | None:
        due = self.queue.oldest_due()
        clock = self.settings.clock
        return None if due is None else time.time() - clock.on_the_machine(clock.now() - due)

    def snapshot(self) -> Snapshot:
        """States of the cached resources, for the metrics."""
        ready: dict[tuple[str, str], int] = {}
        problems = []
        for key, item in self.cache.resources.items():
            conditions = {c["type"]: c for c in (item.get("status") or {}).get("conditions") or []}
            status = conditions.get("Ready", {}).get("status", "Unknown")
            ready[key.kind, status] = ready.get((key.kind, status), 0) + 1
            problems += [
                Problem(*key, type_, conditions[type_]["reason"])
                for type_, wrong in _WRONG.items()
                if conditions.get(type_, {}).get("status") == wrong
            ]
        return Snapshot(ready, tuple(problems))


def _version() -> str:
    try:
        return distribution_version("sojourn")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"


def _typed(item: Object, api_version: str, kind: str) -> Object:
    """Items of a list lack what the list says once."""
    return {"apiVersion": api_version, "kind": kind, **item}


def pages(operator: Operator) -> web.Application:
    """/healthz and /metrics."""

    async def health(request: web.Request) -> web.Response:
        healthy = operator.heartbeat.healthy()
        return web.Response(
            text="ok" if healthy else "the last resync failed or is overdue", status=200 if healthy else 503
        )

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(operator.telemetry.registry),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    application = web.Application()
    application.router.add_get("/healthz", health)
    application.router.add_get("/metrics", metrics)
    return application


async def run(settings: Settings, access: Access, defaults: Defaults, stop: asyncio.Event | None = None) -> None:
    """Runs the operator until it is told to stop.

    Raises:
        BadConfiguration: a certificate cannot be used.
    """
    if settings.certificate:
        settings.certificate.check()
    if sys.version_info < (3, 12):  # Where it is the default; until then asyncio takes a thread for each helm process.
        watcher = asyncio.PidfdChildWatcher()
        watcher.attach_loop(asyncio.get_running_loop())
        asyncio.set_child_watcher(watcher)
    async with AsyncExitStack() as stack:
        connector = open_connector(access)
        stack.push_async_callback(connector.close)
        kube = await stack.enter_async_context(open_session(access, connector))
        operator = Operator(settings, access, defaults, connector, kube)
        logs.count(operator.telemetry)
        ProcessCollector(registry=operator.telemetry.registry)
        PlatformCollector(registry=operator.telemetry.registry)
        runner = web.AppRunner(pages(operator), access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, *settings.listen).start()
        if settings.webhook:
            await serve_admission(stack, operator.admission, settings.webhook)
        await operator.run(stop or asyncio.Event())
