"""What the operator costs at 500 DiffusionServices, held against a bare loop of helm in the same run.

    python bench/operator_scale.py [--services 500] [--json]

Needs a control plane (see tests/kubernetes.py) and no node: the chart is a stub whose Deployment has no pods, so that
what is measured is the operator, helm and the API server on the cores that they share. In both halves the clock starts
with the creation of the services, which own the releases' objects, whoever makes these. Progress is read from the audit
log; asking the operator or the API server for it would cost what is measured.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "proto", ROOT / "operator"):
    sys.path.insert(0, str(folder))

from sojourn.operator.defaults import Defaults  # noqa: E402
from sojourn.operator.desired import Owner, Policies, desired  # noqa: E402
from sojourn.operator.helm import Helm, HelmSettings  # noqa: E402
from sojourn.operator.kube.access import from_kubeconfig, open_session  # noqa: E402
from sojourn.operator.kube.client import DIFFUSION_SERVICES, Kube, Object  # noqa: E402
from sojourn.operator.naming import release_name  # noqa: E402
from sojourn.operator.resources import DiffusionServiceSpec  # noqa: E402

from tests.kubernetes import CLUSTER, program  # noqa: E402
from tests.operator.audit import Audit  # noqa: E402
from tests.operator.cluster import NAMESPACES, condition, install_crds, service  # noqa: E402
from tests.operator.operators import DEFAULTS, OperatorProcess, account_kubeconfig  # noqa: E402

STUB = ROOT / "bench/stub-chart"
AT_ONCE = 8
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
FLAGS = ("--workers=12", f"--helm-concurrency={AT_ONCE}", "--log-level=warning")


@dataclass(frozen=True)
class Figure:
    """One line of the result."""

    name: str
    value: float
    goal: float
    unit: str

    @property
    def met(self) -> bool:
        """Whether the value is within its goal."""
        return self.value <= self.goal

    def __str__(self) -> str:
        verdict = "ok" if self.met else "MISSED"
        return f"{self.name:58} {self.value:10.2f} {self.unit:6} goal ≤ {self.goal:g} {verdict}"


async def bare_loop(kubeconfig: Path, namespace: str, services: list[Object], scratch: Path) -> float:
    """Seconds that helm alone needs, eight at a time, for the very releases that the operator makes.

    The same flags, values, owner references and rights; only nobody watches, decides or reports.
    """
    settings = HelmSettings(program=str(program("helm")), chart=STUB, scratch=scratch, concurrency=AT_ONCE)
    helm = Helm(settings, environ={**os.environ, "KUBECONFIG": str(kubeconfig)})
    labels = {"sojourn.dev/digest": "x" * 40, "sojourn.dev/inputs": "x" * 40, "sojourn.dev/sweep": "done"}
    releases = [(release_name(item["metadata"]["name"]), values_of(item)) for item in services]
    started = time.monotonic()
    await asyncio.gather(*(helm.upgrade(release, namespace, values, labels) for release, values in releases))
    return time.monotonic() - started


def values_of(item: Object) -> Object:
    """Values of the release of a service, as the operator computes them."""
    metadata = item["metadata"]
    owner = Owner(metadata["namespace"], metadata["name"], metadata["uid"])
    spec = DiffusionServiceSpec.model_validate(item["spec"])
    return desired(owner, spec, Policies(), Defaults.model_validate(DEFAULTS))


async def create(kube: Kube, namespace: str, count: int) -> list[Object]:
    bodies = [service(namespace, f"s{i}") for i in range(count)]
    return list(await asyncio.gather(*(kube.create(DIFFUSION_SERVICES, body) for body in bodies)))


@dataclass
class Reported:
    """Services whose status was written, by the audit log: asking the operator or the API server would cost them."""

    audit: Audit
    namespace: str
    since: int
    names: set[bytes] = field(default_factory=set)

    async def at_least(self, count: int) -> bool:
        """Whether that many services have one."""
        lines, self.since = self.audit.lines(self.since)
        pattern = re.compile(rb"/namespaces/%s/diffusionservices/([^/\"?]+)/status" % self.namespace.encode())
        self.names.update(found[1] for line in lines if (found := pattern.search(line)))
        return len(self.names) >= count


def cpu_seconds(pid: int) -> Counter[str]:
    """What the control plane, a process that calls helm, and its ended helm processes have used until now."""
    used: Counter[str] = Counter()
    for process in psutil.process_iter(["name", "cpu_times"]):
        if process.info["name"] in CONTROL_PLANE and (times := process.info["cpu_times"]):
            used[process.info["name"]] += times.user + times.system
    times = psutil.Process(pid).cpu_times()
    used["caller of helm"] = times.user + times.system
    used["helm"] = times.children_user + times.children_system
    return used


def shares(before: Counter[str], after: Counter[str]) -> dict[str, float]:
    """Seconds of a processor by program between two readings, largest first."""
    return {name: round(seconds, 2) for name, seconds in (after - before).most_common()}


async def all_released(kube: Kube, namespace: str, count: int) -> bool:
    items = await kube.list(DIFFUSION_SERVICES, namespace)
    return sum(condition(item.get("status") or {}, "Released")["status"] == "True" for item in items) == count


async def all_quiet(kube: Kube, namespace: str, count: int) -> bool:
    """Whether the Deployment controller has answered for every service, and the operator for that."""
    items = await kube.list(DIFFUSION_SERVICES, namespace)
    return sum(condition(item.get("status") or {}, "Ready")["reason"] == "ScaledToZero" for item in items) == count


async def seconds_until(done: Callable[[], Awaitable[bool]], *, limit: float, pause: float = 1.0) -> float:
    started = time.monotonic()
    while not await done():
        if time.monotonic() - started > limit:
            raise SystemExit(f"not done within {limit} s")
        await asyncio.sleep(pause)
    return time.monotonic() - started


def rss_mib(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


async def measure(kubeconfig: Path, audit: Audit, count: int, folder: Path) -> list[Figure]:
    access = from_kubeconfig(kubeconfig)
    async with open_session(access) as session:
        kube = Kube(session, access.server)
        for namespace in ("bare", "scale", "real"):
            await kube.create(NAMESPACES, {"metadata": {"name": namespace, "namespace": ""}})
        account = await account_kubeconfig(kubeconfig, "bare", folder / "kubeconfig-bare")
        # Nobody looks after this namespace; helm's objects have living owners all the same.
        before = cpu_seconds(os.getpid())
        started = time.monotonic()
        services = await create(kube, "bare", count)
        created = time.monotonic() - started
        bare = created + await bare_loop(account, "bare", services, folder / "helm")
        used = shares(before, cpu_seconds(os.getpid()))
        print(
            f"bare loop: {count} releases in {bare:.1f} s, {created:.1f} of it their owners, of processors {used}",
            flush=True,
        )
        account = await account_kubeconfig(kubeconfig, "scale", folder / "kubeconfig")
        operator = OperatorProcess(account, folder, ("scale",), FLAGS, chart=STUB)
        try:
            figures = await at_scale(kube, operator, audit, count, bare)
        finally:
            operator.kill()
        return [*figures, await latency(kubeconfig, kube, folder)]


async def at_scale(kube: Kube, operator: OperatorProcess, audit: Audit, count: int, bare: float) -> list[Figure]:
    operator.start().wait_healthy()
    assert operator.process
    before = cpu_seconds(operator.process.pid)
    reported = Reported(audit, "scale", audit.mark())
    started = time.monotonic()
    await create(kube, "scale", count)
    await seconds_until(lambda: reported.at_least(count), limit=30 * bare, pause=0.1)
    await seconds_until(lambda: all_released(kube, "scale", count), limit=30 * bare, pause=0.2)
    settle = time.monotonic() - started
    used = shares(before, cpu_seconds(operator.process.pid))
    rss = rss_mib(operator.process.pid)
    print(f"operator: {count} services in {settle:.1f} s, {rss:.0f} MiB, of processors {used}", flush=True)
    await seconds_until(lambda: all_quiet(kube, "scale", count), limit=120)
    mark = audit.mark()
    await asyncio.sleep(60)
    idle = len(audit.writes("scale", mark))
    operator.end()
    mark = audit.mark()
    started = time.monotonic()
    operator.start().wait_healthy()

    async def seen() -> bool:
        samples = operator.metrics()
        return (
            sum(
                value
                for name, value in samples.items()
                if name.startswith('sojourn_operator_reconciles_total{kind="DiffusionService"')
            )
            >= count
        )

    await seconds_until(seen, limit=120, pause=0.2)
    restart = time.monotonic() - started
    samples = operator.metrics()
    calls = sum(value for name, value in samples.items() if name.startswith("sojourn_operator_helm_calls_total"))
    return [
        Figure(f"settle {count} services / bare helm loop", settle / bare, 1.25, "×"),
        Figure("resident memory of the operator at the first settle", rss, 150, "MiB"),
        Figure("writes in an idle minute", idle, 0, ""),
        Figure(f"restart until {count} settled services are seen", restart, 15, "s"),
        Figure("helm calls of the restart", calls, 0, ""),
        Figure("writes of the restart", len(audit.writes("scale", mark)), 0, ""),
    ]


async def latency(kubeconfig: Path, kube: Kube, folder: Path, samples: int = 15) -> Figure:
    """Median seconds from `kubectl apply` to a deployed release, with the real chart."""
    account = await account_kubeconfig(kubeconfig, "real", folder / "kubeconfig-real")
    operator = OperatorProcess(account, folder, ("real",), FLAGS)
    operator.start().wait_healthy()
    found = []
    try:
        for index in range(samples):
            started = time.monotonic()
            await kube.create(DIFFUSION_SERVICES, service("real", f"s{index}"))

            async def released(name: str = f"s{index}") -> bool:
                item = await kube.get(DIFFUSION_SERVICES, "real", name)
                return condition(item.get("status") or {}, "Released")["status"] == "True"

            await seconds_until(released, limit=60, pause=0.02)
            found.append(time.monotonic() - started)
    finally:
        operator.kill()
    return Figure("apply → release with the real chart, median", statistics.median(found), 2, "s")


@asynccontextmanager
async def control_plane(folder: Path) -> AsyncIterator[tuple[Path, Audit]]:
    """The cluster that is given by the environment, or one of our own."""
    if given := os.environ.get("SOJOURN_TEST_KUBECONFIG"):
        yield Path(given), Audit(Path(os.environ["SOJOURN_TEST_AUDIT_LOG"]))
        return
    if not CLUSTER.exists():
        raise SystemExit("no cluster: set SOJOURN_TEST_KUBECONFIG and SOJOURN_TEST_AUDIT_LOG, or SOJOURN_KUBE_CLUSTER")
    subprocess.run([CLUSTER, "up", "--dir", folder / "kube"], check=True, capture_output=True)
    try:
        yield folder / "kube/kubeconfig", Audit(folder / "kube/audit.log")
    finally:
        subprocess.run([CLUSTER, "down", "--dir", folder / "kube"], check=True, capture_output=True)


async def run(count: int) -> list[Figure]:
    with tempfile.TemporaryDirectory() as name:
        async with control_plane(Path(name)) as (kubeconfig, audit):
            await install_crds(kubeconfig)
            return await measure(kubeconfig, audit, count, Path(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--services", type=int, default=500)
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args()
    figures = asyncio.run(run(arguments.services))
    if arguments.json:
        rows: list[dict[str, Any]] = [vars(figure) | {"met": figure.met} for figure in figures]
        print(json.dumps(rows))
    else:
        print(*figures, sep="\n")
    return 0 if all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
