from collections.abc import Iterator

import pytest

from tests.e2e import node
from tests.e2e.client import Client, client
from tests.e2e.node import ELSEWHERE, KUBECONFIG, MONITORING, SHARED, STUDIO, SYSTEM, TAG, image, kubectl, run
from tests.kubernetes import ROOT

# What a namespace allows. Volumes of the node's folders are for `privileged` ones.
LEVELS = dict.fromkeys((SYSTEM, STUDIO, ELSEWHERE, MONITORING), "restricted") | {SHARED: "privileged"}


def install(chart: str = "charts/sojourn", *more: str) -> None:
    """Installs or upgrades the operator from its chart."""
    sets = [
        f"operator.image.tag={TAG}",
        f"services.inferenceImage={image('inference')}",
        f"services.residencydImage={image('residencyd')}",
        "operator.observeSeconds=5",
    ]
    run("helm", "upgrade", "--install", "sojourn", ROOT / chart, "-n", SYSTEM, "--wait", "--timeout=3m",
        *(word for one in sets for word in ("--set", one)), *more)  # fmt: skip


def forget(namespace: str) -> None:
    """Lets go of services that an interrupted run has left, whose operator may be gone."""
    for name in kubectl("-n", namespace, "get", "dsvc", "-o", "name", check=False).split():
        # Where the definitions are not there yet, there are words of an error instead.
        if name.startswith("diffusionservice.sojourn.dev/"):
            kubectl("-n", namespace, "patch", name, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')


@pytest.fixture(scope="session", autouse=True)
def installed() -> Iterator[None]:
    """The operator from its chart, and namespaces of both kinds."""
    if not KUBECONFIG:
        pytest.skip("no node that runs pods: set SOJOURN_E2E_KUBECONFIG, or run make e2e")
    for namespace, level in LEVELS.items():
        forget(namespace)
        kubectl("delete", "namespace", namespace, "--ignore-not-found", "--timeout=120s")
        kubectl("create", "namespace", namespace)
        kubectl("label", "namespace", namespace, f"pod-security.kubernetes.io/enforce={level}")
    install()
    yield
    for namespace in (STUDIO, SHARED):
        kubectl("-n", namespace, "delete", "dsvc,adaln,lwo", "--all", "--timeout=120s")
    run("helm", "uninstall", "sojourn", "-n", SYSTEM)
    kubectl("delete", "namespace", *LEVELS, "--wait=false")


@pytest.fixture
def demo(installed: None) -> None:
    """examples/demo.yaml, as it is written and Ready."""
    node.demo_as_written()
    node.ready()


@pytest.fixture(scope="session")
def neighbour(installed: None) -> Iterator[Client]:
    """A client in the namespace of the demo."""
    with client(STUDIO) as found:
        yield found


@pytest.fixture(scope="session")
def stranger(installed: None) -> Iterator[Client]:
    """A client in another namespace."""
    with client(ELSEWHERE) as found:
        yield found
