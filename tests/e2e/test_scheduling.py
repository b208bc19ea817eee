"""Accelerators: a pod that asks for one is scheduled where there is one left, and the condition says where not.

The node only says that it has them. The pods run on its CPU.
"""

import json
from collections.abc import Iterator

import pytest

from tests.e2e.node import STUDIO, Object, apply, condition, get, has, kubectl, pods, until

pytestmark = pytest.mark.timeout(600)
RESOURCE = "nvidia.com/gpu"


def advertise(node: str, count: int | None) -> None:
    """Makes a node say that it has so many accelerators; None: none at all, as before."""
    operation = {"op": "remove"} if count is None else {"op": "add", "value": str(count)}
    paths = [f"/status/{part}/{RESOURCE.replace('/', '~1')}" for part in ("capacity", "allocatable")]
    change = json.dumps([{**operation, "path": path} for path in paths])
    kubectl("patch", "node", node, "--subresource=status", "--type=json", "-p", change)


@pytest.fixture
def node() -> Iterator[str]:
    """The only node that advertises accelerators: two of them."""
    name = str(get("default", "nodes")["items"][0]["metadata"]["name"])
    advertise(name, 2)
    kubectl("label", "node", name, "nvidia.com/gpu.present=true", "--overwrite")
    kubectl("taint", "node", name, "nvidia.com/gpu=:PreferNoSchedule", "--overwrite")
    yield name
    kubectl("-n", STUDIO, "delete", "dsvc", "accelerated", "--ignore-not-found", "--timeout=120s")
    kubectl("taint", "node", name, "nvidia.com/gpu-")
    kubectl("label", "node", name, "nvidia.com/gpu.present-")
    advertise(name, None)


def scheduled() -> list[Object]:
    return [pod for pod in pods(name="accelerated") if pod["spec"].get("nodeName")]


def test_two_pods_get_the_two_accelerators_and_the_third_waits_and_is_told_of(node: str) -> None:
    service = {
        "apiVersion": "sojourn.dev/v1alpha1",
        "kind": "DiffusionService",
        "metadata": {"name": "accelerated"},
        "spec": {
            "model": {"builtIn": {}},
            "device": "CPU",
            "replicas": 3,
            "resources": {"requests": {"cpu": "10m", "memory": "256Mi"}, "gpu": {"count": 1}},
            "sharedHostMemory": {"size": "64Mi"},
            "scheduling": {
                "nodeSelector": {"nvidia.com/gpu.present": "true"},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            },
        },
    }
    apply(service, namespace=STUDIO)
    until(lambda: len(scheduled()) == 2, 60, "two pods scheduled")
    assert all(pod["spec"]["containers"][0]["resources"]["limits"][RESOURCE] == "1" for pod in scheduled())

    def told() -> bool:
        found = has(STUDIO, "accelerated", "Ready", "False")
        return bool(found and found["reason"] == "Unschedulable")

    until(told, 60, "the third pod told of")
    found = condition(get(STUDIO, "dsvc", "accelerated"), "Ready")
    assert f"Insufficient {RESOURCE}" in found["message"], found
    assert len(scheduled()) == 2
    advertise(node, 3)
    until(lambda: len(scheduled()) == 3, 90, "the third pod scheduled, once there is one for it")
