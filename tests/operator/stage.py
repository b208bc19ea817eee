"""An operator whose requests go through the proxy, and what its services must be like in the end."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from sojourn.operator.errors import NotFound
from sojourn.operator.kube.access import from_kubeconfig
from sojourn.operator.kube.client import ADALN_CACHES, CHART_KINDS, CONFIG_MAPS, DIFFUSION_SERVICES, Kube
from sojourn.operator.manifest import digest, objects
from sojourn.operator.records import stored_manifest

from tests.operator.cluster import condition, custom, exists, fresh_namespace, status, until
from tests.operator.operators import OperatorProcess, account_kubeconfig, write_kubeconfig
from tests.operator.proxy import Proxy, Side, Trap, kill_children, proxy


@dataclass
class Stage:
    """An operator whose requests go through the proxy."""

    kube: Kube
    namespace: str
    operator: OperatorProcess
    proxy: Proxy

    def arm(self, at: int, side: Side, victim: str) -> Trap:
        def kill() -> None:
            process = self.operator.process
            assert process
            if victim == "operator":
                self.operator.kill()
            else:
                kill_children(process.pid, "helm")

        self.proxy.trap = Trap(at, side, kill, agent="" if victim == "operator" else "Helm")
        return self.proxy.trap

    def disarm(self) -> None:
        self.proxy.trap = None

    def ensure_running(self) -> None:
        if self.operator.process is None:
            self.operator.start()


@asynccontextmanager
async def open_stage(kube: Kube, kubeconfig: Path, folder: Path) -> AsyncIterator[Stage]:
    """A stage in a namespace of its own, with an AdaLNCache called small; its operator is not started yet."""
    folder.mkdir(parents=True, exist_ok=True)
    access = from_kubeconfig(kubeconfig)
    async with fresh_namespace(kube) as namespace:
        token = from_kubeconfig(await account_kubeconfig(kubeconfig, namespace, folder / "account")).token or ""
        async with proxy(access, token) as running:
            path = write_kubeconfig(folder / "proxied", running.server, None, token)
            operator = OperatorProcess(kubeconfig=path, folder=folder, namespaces=(namespace,))
            await kube.create(ADALN_CACHES, custom("AdaLNCache", namespace, "small", hostTierSize="1Gi"))
            try:
                yield Stage(kube, namespace, operator, running)
            finally:
                operator.kill()


async def settled(stage: Stage, name: str) -> None:
    """Until the release of the newest generation is said to be deployed."""

    async def ask() -> bool:
        item = await stage.kube.get(DIFFUSION_SERVICES, stage.namespace, name)
        released = condition(item.get("status") or {}, "Released")
        return released["status"] == "True" and released["observedGeneration"] == item["metadata"]["generation"]

    await until(ask, seconds=60)


async def assert_clean(stage: Stage, name: str) -> None:
    """The newest record is deployed, none pending; the objects are those of its manifest; the status is whole.

    An older record may be called deployed still: helm only warns where it cannot write that it is superseded.
    """
    release = f"dsvc-{name}"
    records = await stage.kube.list(CONFIG_MAPS, stage.namespace, labels=f"owner=helm,name={release}")
    records.sort(key=lambda item: int(item["metadata"]["labels"]["version"]))
    states = [item["metadata"]["labels"]["status"] for item in records]
    assert states[-1] == "deployed", states
    assert not [state for state in states if state.startswith("pending")], states
    deployed = records[-1]
    wanted = {(item["kind"], item["metadata"]["name"]) for item in objects(stored_manifest(deployed))}
    assert await present(stage, release) == wanted
    found = await status(stage.kube, stage.namespace, name)
    assert found["release"]["digest"] == digest(stored_manifest(deployed))
    assert condition(found, "Ready")["status"] in ("False", "Unknown")


async def present(stage: Stage, release: str) -> set[tuple[str, str]]:
    """Kind and name of every object of a release."""
    found = set()
    for resource in CHART_KINDS:
        try:
            items = await stage.kube.list_metadata(
                resource, stage.namespace, labels=f"app.kubernetes.io/instance={release}"
            )
        except NotFound:
            continue
        found |= {(resource.kind, item["metadata"]["name"]) for item in items}
    return found


async def gone(stage: Stage, name: str) -> None:
    async def ask() -> bool:
        return not await exists(stage.kube, DIFFUSION_SERVICES, stage.namespace, name)

    await until(ask, seconds=60)


async def remove(stage: Stage, name: str) -> None:
    await stage.kube.delete(DIFFUSION_SERVICES, stage.namespace, name)
    await gone(stage, name)
