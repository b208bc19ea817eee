"""A real API server for the tests of this folder; where none can be had they skip. See tests/kubernetes.py."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sojourn.operator.kube.access import from_kubeconfig, open_session
from sojourn.operator.kube.client import Kube

from tests.kubernetes import CLUSTER
from tests.operator.audit import Audit
from tests.operator.cluster import fresh_namespace, install_crds
from tests.operator.operators import OperatorProcess, account_kubeconfig
from tests.operator.served import Model, own_address, served
from tests.operator.stage import Stage, open_stage


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of the control plane that this session started."""
    if not CLUSTER.exists():
        pytest.skip(f"no cluster: set SOJOURN_TEST_KUBECONFIG (or SOJOURN_KUBE_CLUSTER; {CLUSTER} is not there)")
    folder = tmp_path_factory.mktemp("kube")
    up = subprocess.run([CLUSTER, "up", "--dir", folder], capture_output=True, text=True)
    assert up.returncode == 0, up.stderr
    yield folder
    subprocess.run([CLUSTER, "down", "--dir", folder], check=True, capture_output=True)


@pytest.fixture(scope="session")
def kubeconfig(request: pytest.FixtureRequest) -> Path:
    """A cluster with the custom resources installed."""
    given = os.environ.get("SOJOURN_TEST_KUBECONFIG")
    path = Path(given) if given else request.getfixturevalue("control_plane") / "kubeconfig"
    asyncio.run(install_crds(path))
    return path


@pytest.fixture
async def kube(kubeconfig: Path) -> AsyncIterator[Kube]:
    access = from_kubeconfig(kubeconfig)
    async with open_session(access) as session:
        yield Kube(session, access.server)


@pytest.fixture
async def namespace(kube: Kube) -> AsyncIterator[str]:
    """A namespace of the test's own."""
    async with fresh_namespace(kube) as name:
        yield name


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """The shipped model, served at an address of this session's own."""
    with served(tmp_path_factory.mktemp("served"), own_address(), "--allow-insecure", "--adaln-cache=on") as running:
        yield running


@pytest.fixture
async def operator(kubeconfig: Path, namespace: str, tmp_path: Path) -> AsyncIterator[OperatorProcess]:
    """An operator of the test's own namespace, with the chart's rights; not started yet."""
    account = await account_kubeconfig(kubeconfig, namespace, tmp_path / "kubeconfig")
    process = OperatorProcess(kubeconfig=account, folder=tmp_path, namespaces=(namespace,))
    yield process
    process.kill()


@pytest.fixture
def audit(request: pytest.FixtureRequest) -> Audit:
    """The audit log of the API server."""
    if given := os.environ.get("SOJOURN_TEST_AUDIT_LOG"):
        return Audit(Path(given))
    if os.environ.get("SOJOURN_TEST_KUBECONFIG"):
        pytest.skip("no audit log: set SOJOURN_TEST_AUDIT_LOG beside SOJOURN_TEST_KUBECONFIG")
    return Audit(request.getfixturevalue("control_plane") / "audit.log")


@pytest.fixture
async def stage(kube: Kube, kubeconfig: Path, tmp_path: Path) -> AsyncIterator[Stage]:
    """An operator behind a proxy that fails at will."""
    async with open_stage(kube, kubeconfig, tmp_path) as opened:
        yield opened
