"""What pods of one node share: the page cache of one copy of the weights, and plans that one of them built.

The folders lie on the node, so the namespace is one that allows that, and a pod that is root there makes them.
"""

from collections.abc import Iterator

import pytest

from tests.e2e.client import client
from tests.e2e.keeper import Keeper, keeper
from tests.e2e.node import (
    PORT,
    SHARED,
    Object,
    apply,
    condition,
    get,
    has,
    kubectl,
    metrics,
    patch,
    pods,
    ready,
    shell,
    until,
)

pytestmark = pytest.mark.timeout(600)
FOLDER = "/tmp/sojourn-e2e"
INFERENCE, RESIDENCYD = 9464, 9465


@pytest.fixture(scope="module")
def folders(installed: None) -> Iterator[Keeper]:
    """A checkpoint that belongs to root, and two folders of the pods' user for what they share."""
    with keeper(FOLDER, "sharing") as found:
        make = (
            f"mkdir -p {FOLDER}/models {FOLDER}/plans && cp -R /models/h3-digits {FOLDER}/foreign && "
            f"chown -R root:root {FOLDER}/foreign && chmod -R a+rX {FOLDER}/foreign && "
            f"chown 10001:10001 {FOLDER}/models {FOLDER}/plans"
        )
        found.run("sh", "-c", make)
        yield found
        kubectl("-n", SHARED, "delete", "dsvc,adaln,lwo", "--all", "--timeout=120s")


@pytest.fixture(scope="module")
def foreign(folders: Keeper) -> Object:
    """PageOutEffective of a service whose checkpoint belongs to somebody else."""
    service = {
        "apiVersion": "sojourn.dev/v1alpha1",
        "kind": "DiffusionService",
        "metadata": {"name": "both"},
        "spec": {
            "model": {"name": "h3-digits", "hostPath": {"path": f"{FOLDER}/foreign"}},
            "device": "CPU",
            "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}},
            "sharedHostMemory": {"size": "64Mi"},
            "residency": {"intervalSeconds": 5},
        },
    }
    apply(service, namespace=SHARED)
    ready(SHARED, "both")
    until(lambda: has(SHARED, "both", "PageOutEffective", "False"), 60, "no effect told", namespace=SHARED)
    return condition(get(SHARED, "dsvc", "both"), "PageOutEffective")


@pytest.fixture(scope="module")
def two(foreign: Object) -> list[str]:
    """Names of two pods of that service, which share a copy of the checkpoint and a store of plans."""
    policy = {
        "apiVersion": "sojourn.dev/v1alpha1",
        "kind": "AdaLNCache",
        "metadata": {"name": "both"},
        "spec": {"mode": "Enabled", "planStore": {"hostPath": f"{FOLDER}/plans", "size": "64Mi"}},
    }
    apply(policy, namespace=SHARED)
    memory = {"size": "64Mi", "modelCache": {"hostPath": f"{FOLDER}/models"}}
    patch(SHARED, "dsvc", "both", replicas=2, sharedHostMemory=memory, adaLNCacheRef={"name": "both"})
    ready(SHARED, "both", seconds=240)
    return [pod["metadata"]["name"] for pod in pods(SHARED, "both")]


@pytest.fixture(scope="module")
def served(two: list[str], installed: None) -> list[str]:
    """The same two, after each has made a clip of the same schedule: the first one first."""
    with client(SHARED) as caller:
        for pod in two:
            caller.generate(f"{get(SHARED, 'pod', pod)['status']['podIP']}:{PORT}", "--steps", "5")
    return two


def sums(pod: str, port: int, name: str, label: str = "") -> float:
    """Sum over the series of a metric that bear a label."""
    found = metrics(SHARED, pod, port).items()
    return sum(value for series, value in found if series.split("{")[0] == name and label in series)


def test_weights_of_another_owner_are_told_to_stay_in_memory(foreign: Object) -> None:
    assert foreign["reason"] == "NotOwner"
    assert "modelCache" in foreign["message"], "what to do"


def test_a_copy_of_ones_own_ends_that(folders: Keeper, two: list[str]) -> None:
    until(lambda: has(SHARED, "both", "PageOutEffective", "True"), 60, "effect told", namespace=SHARED)
    (copy,) = folders.run("ls", f"{FOLDER}/models").split()
    owner = folders.run("stat", "-c", "%u", f"{FOLDER}/models/{copy}/vae/config.json")
    assert owner.strip() == "10001"


def test_a_plan_that_one_pod_built_is_read_by_the_other(served: list[str]) -> None:
    name = "sojourn_plan_cache_requests_total"
    results = [[sums(pod, INFERENCE, name, f'"{what}"') for what in ("built", "store")] for pod in served]
    assert results == [[1, 0], [0, 1]]


def test_two_pods_share_the_pages_of_the_weights(served: list[str]) -> None:
    """In the kernel's words, as residencyd passes them on: cold weights that another process has mapped as well."""
    files = {shell(SHARED, pod, "inference", "sh", "-c", "stat -c %d:%i /model-cache/*/transformer/*.safetensors")
             for pod in served}  # fmt: skip
    assert len(files) == 1
    for pod in served:

        def shared(pod: str = pod) -> bool:
            page = metrics(SHARED, pod, RESIDENCYD)
            own = page['sojourn_headroom_cold_bytes{component="transformer"}']
            others = page['sojourn_headroom_stuck_bytes{component="transformer",reason="shared"}']
            return others > 9 * own

        until(shared, 90, f"pages of {pod} shared", namespace=SHARED)


def test_figures_are_those_of_both_pods(served: list[str]) -> None:
    """Status sums up over pods: mapped twice, though the pages are there once."""

    def mapped() -> float:
        components = get(SHARED, "dsvc", "both")["status"]["residency"]["components"]
        return float(next(row["mappedBytes"] for row in components if row["component"] == "transformer"))

    one = sums(served[0], RESIDENCYD, "sojourn_residency_mapped_bytes", 'component="transformer"')
    until(lambda: mapped() >= 1.9 * one, 60, "sum over two pods", namespace=SHARED)
    assert condition(get(SHARED, "dsvc", "both"), "ResidencyVisible")["message"].startswith("2 pods")
