"""An operator as its own process, with the rights of the chart and nothing else."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any

import yaml
from sojourn.operator.kube.access import from_kubeconfig, open_session
from sojourn.operator.kube.client import Kube, Resource

from tests.kubernetes import ROOT, program

DEFAULTS = {"inferenceImage": "localhost/sojourn-inference:dev", "residencydImage": "localhost/sojourn-residencyd:dev"}
ACCOUNT = "sojourn-operator"
SERVICE_ACCOUNTS = Resource("v1", "ServiceAccount", "serviceaccounts")
ROLES = Resource("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
# Fast, so that what takes minutes takes seconds: resyncs every 2 to 4 s, helm locks stale after 3 s.
FAST = ("--resync-seconds=2", "--observe-seconds=1", "--unready-seconds=1", "--helm-timeout=3", "--log-level=debug")


def free_port() -> int:
    with socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def rendered(namespace: str, *sets: str) -> list[dict[str, Any]]:
    """Objects of the operator's chart."""
    helm = program("helm")
    assert helm, "a cluster without helm"
    command: list[str | Path] = [helm, "template", "sojourn", ROOT / "charts/sojourn", "-n", namespace]
    command += [word for one in sets for word in ("--set", one)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [item for item in yaml.safe_load_all(text) if item]


def rights(namespace: str, *sets: str) -> list[dict[str, Any]]:
    """Role and RoleBinding as the chart makes them for one namespace."""
    objects = rendered(namespace, f"operator.namespaces={{{namespace}}}", *sets)
    return [item for item in objects if item["kind"] in ("Role", "RoleBinding")]


async def account_kubeconfig(kubeconfig: Path, namespace: str, target: Path, *sets: str) -> Path:
    """A kubeconfig of the operator's service account, which may do what the chart says."""
    access = from_kubeconfig(kubeconfig)
    async with open_session(access) as session:
        kube = Kube(session, access.server)
        account = {"metadata": {"name": ACCOUNT, "namespace": namespace}}
        await kube.apply(SERVICE_ACCOUNTS, {"apiVersion": "v1", "kind": "ServiceAccount", **account}, manager="test")
        for item in rights(namespace, *sets):
            await kube.apply(ROLES if item["kind"] == "Role" else ROLE_BINDINGS, item, manager="test")
        path = SERVICE_ACCOUNTS.path(namespace, ACCOUNT, "token")
        token = await kube._ask("POST", path, body={"spec": {"expirationSeconds": 86400}})
    return write_kubeconfig(target, access.server, access.ca, token["status"]["token"])


def write_kubeconfig(target: Path, server: str, ca: str | None, token: str) -> Path:
    authority = target.with_suffix(".crt")
    authority.write_text(ca or "")
    cluster = {"server": server} | ({"certificate-authority": str(authority)} if ca else {})
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "operator", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "operator"}}],
    }
    target.write_text(json.dumps(config))
    return target


@dataclass
class OperatorProcess:
    """One operator; `start` and `kill` may follow each other."""

    kubeconfig: Path
    folder: Path
    namespaces: tuple[str, ...]
    flags: tuple[str, ...] = FAST
    chart: Path = ROOT / "charts/sojourn-service"
    defaults: dict[str, Any] = field(default_factory=lambda: dict(DEFAULTS))
    process: subprocess.Popen[bytes] | None = None
    port: int = 0
    # How many times as fast as the machine's its clock runs.
    speed: float = 1

    @property
    def log_path(self) -> Path:
        return self.folder / "operator.log"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def start(self, *flags: str) -> "OperatorProcess":
        self.port = free_port()
        (self.folder / "defaults.yaml").write_text(json.dumps(self.defaults))
        module = ("sojourn.operator",) if self.speed == 1 else ("tests.operator.hurried", str(self.speed))
        command = [
            *(sys.executable, "-m", *module, "run", f"--chart={self.chart}", *self.flags),
            *(f"--defaults={self.folder / 'defaults.yaml'}", f"--scratch={self.folder / 'scratch'}"),
            *(f"--helm={program('helm')}", f"--listen=127.0.0.1:{self.port}"),
            *(f"--namespace={namespace}" for namespace in self.namespaces),
            *flags,
        ]
        environ = os.environ | {
            "KUBECONFIG": str(self.kubeconfig),
            "PYTHONPATH": f"{ROOT / 'proto'}:{ROOT / 'operator'}:{ROOT}",
        }
        with self.log_path.open("ab") as log:
            # A session of its own, so that `kill` takes its helm processes too.
            self.process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
        return self

    def healthy(self) -> bool:
        assert self.process, "not started"
        assert self.process.poll() is None, self.log()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def wait_healthy(self, seconds: float = 30) -> "OperatorProcess":
        deadline = time.monotonic() + seconds
        while not self.healthy():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)
        return self

    def metrics(self) -> dict[str, float]:
        """Samples by name with labels, as they stand on the page."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    def end(self, number: int = signal.SIGTERM) -> None:
        """Ends it and its helm processes; SIGTERM lets it go in peace."""
        if self.process is None:
            return
        try:
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)
        except ProcessLookupError:
            pass
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(5)
        self.process = None

    def kill(self) -> None:
        self.end(signal.SIGKILL)
