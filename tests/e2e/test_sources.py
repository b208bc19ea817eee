"""Where a checkpoint comes from: a claim on a volume made by hand, and an image that holds nothing else.

Both in a namespace that allows restricted pods only. The demo has its model built in, tests/e2e/test_sharing.py takes
one from a folder of the node.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.client import Client
from tests.e2e.keeper import keeper
from tests.e2e.node import PORT, STUDIO, Object, apply, condition, get, image, kubectl, metrics, pods, ready, until

pytestmark = pytest.mark.timeout(600)
FOLDER = "/tmp/sojourn-e2e-claim"
RESIDENCYD = 9465
SOURCES = {
    "claimed": {"persistentVolumeClaim": {"claimName": "weights", "subPath": "checkpoints/h3"}},
    "imaged": {"image": {"reference": image("e2e-model"), "pullPolicy": "Never", "subPath": "h3-digits"}},
}


def volume() -> tuple[Object, Object]:
    """A volume in a folder of the node, and the claim that it is for."""
    spec: dict[str, Any] = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    persistent: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "sojourn-e2e-weights"},
        "spec": spec | {
            "capacity": {"storage": "1Gi"},
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": FOLDER},
            "claimRef": {"namespace": STUDIO, "name": "weights"},
        },
    }  # fmt: skip
    claim: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "weights"},
        "spec": spec | {"volumeName": "sojourn-e2e-weights", "resources": {"requests": {"storage": "1Gi"}}},
    }
    return persistent, claim


def service(name: str) -> Object:
    return {
        "apiVersion": "sojourn.dev/v1alpha1",
        "kind": "DiffusionService",
        "metadata": {"name": name},
        "spec": {
            "model": {"name": name, **SOURCES[name]},
            "device": "CPU",
            "resources": {"requests": {"cpu": "20m", "memory": "512Mi"}},
            "sharedHostMemory": {"size": "64Mi"},
            "residency": {"intervalSeconds": 5},
        },
    }


@pytest.fixture(scope="module")
def sources(installed: None) -> Iterator[None]:
    """One service for each source, Ready."""
    with keeper(FOLDER, "claim") as found:
        copy = (
            f"mkdir {FOLDER}/checkpoints && cp -R /models/h3-digits {FOLDER}/checkpoints/h3 && chmod -R a+rX {FOLDER}"
        )
        found.run("sh", "-c", copy)
        apply(*volume(), *map(service, SOURCES), namespace=STUDIO)
        for name in SOURCES:
            ready(STUDIO, name, seconds=240)
        yield
        kubectl("-n", STUDIO, "delete", "dsvc", *SOURCES, "--timeout=120s")
        kubectl("-n", STUDIO, "delete", "pvc", "weights", "--timeout=120s")
        kubectl("delete", "pv", "sojourn-e2e-weights", "--timeout=120s")


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("name", list(SOURCES))
def test_its_weights_are_mapped_from_there(name: str) -> None:
    """Mapped bytes and all, as residencyd finds them in the kernel; nothing was copied."""
    assert get(STUDIO, "dsvc", name)["status"]["model"] == name
    (pod,) = [item["metadata"]["name"] for item in pods(STUDIO, name)]

    def mapped() -> float:
        page = metrics(STUDIO, pod, RESIDENCYD)
        return page.get('sojourn_residency_mapped_bytes{component="transformer",tier="host_mapped"}', 0.0)

    until(mapped, 60, f"{name}: mapped weights")
    found = condition(get(STUDIO, "dsvc", name), "ResidencyVisible")
    assert found["status"] == "True", found


@pytest.mark.usefixtures("sources", "demo")
def test_the_clip_is_the_same_wherever_the_checkpoint_comes_from(neighbour: Client) -> None:
    def clips(name: str) -> Any:
        server = f"dsvc-{name}.{STUDIO}.svc.cluster.local:{PORT}"
        return json.loads(neighbour.generate(server, "--steps", "4", "--seed", "11"))["completed"]["clips"]

    assert clips("claimed") == clips("imaged") == clips("demo")
