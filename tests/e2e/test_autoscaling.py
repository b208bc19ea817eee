"""Autoscaling on a node, by Kubernetes' own controller.

No metric is to be had here, so it holds the replicas within their bounds and leaves them as they are otherwise. So must
the operator.
"""

import json
from collections.abc import Iterator

import pytest

from tests.e2e.client import Client
from tests.e2e.node import PORT, STUDIO, Object, apply, condition, get, kubectl, patch, pods, ready, until
from tests.e2e.watching import Watch

pytestmark = pytest.mark.timeout(600)
NAME = "scaled"
# The controller looks every 15 s.
SCALING_SECONDS = 60


@pytest.fixture(scope="module")
def three(installed: None) -> Iterator[None]:
    """A service with three replicas, Ready, and none that scales them."""
    service = {
        "apiVersion": "sojourn.dev/v1alpha1",
        "kind": "DiffusionService",
        "metadata": {"name": NAME},
        "spec": {
            "model": {"builtIn": {}},
            "device": "CPU",
            "replicas": 3,
            "resources": {"requests": {"cpu": "20m", "memory": "512Mi"}},
            "sharedHostMemory": {"size": "64Mi"},
        },
    }
    apply(service, namespace=STUDIO)
    ready(STUDIO, NAME, seconds=240)
    yield
    kubectl("-n", STUDIO, "delete", "dsvc", NAME, "--timeout=120s")


def replicas() -> int:
    return int(get(STUDIO, "deploy", f"dsvc-{NAME}")["spec"]["replicas"])


def scaler() -> Object:
    """The HorizontalPodAutoscaler; empty before it is made."""
    found = get(STUDIO, "hpa", "-l", f"app.kubernetes.io/instance=dsvc-{NAME}")["items"]
    return found[0] if found else {}


def test_switched_on_the_replicas_stay_and_the_service_serves(three: None, neighbour: Client) -> None:
    before = {pod["metadata"]["uid"] for pod in pods(STUDIO, NAME)}
    with Watch(STUDIO, "deploy", f"dsvc-{NAME}") as watch:
        patch(STUDIO, "dsvc", NAME, replicas=1, autoscaling={"minReplicas": 2, "maxReplicas": 4})
        until(lambda: condition(scaler(), "AbleToScale")["status"] == "True", SCALING_SECONDS, "the controller's look")
        until(lambda: condition(scaler(), "ScalingActive")["status"] == "False", SCALING_SECONDS, "no metric: told")
        made = neighbour.generate(f"dsvc-{NAME}.{STUDIO}.svc.cluster.local:{PORT}")
        assert json.loads(made)["files"]
        ready(STUDIO, NAME)
    assert {event["spec"]["replicas"] for event in watch.events} == {3}, "never 1"
    assert {pod["metadata"]["uid"] for pod in pods(STUDIO, NAME)} == before, "no pod was touched"
    assert condition(scaler(), "ScalingActive")["reason"] == "FailedGetResourceMetric"
    assert scaler()["status"]["currentReplicas"] == 3


def test_the_controllers_bounds_are_followed_and_its_number_is_left_alone(three: None) -> None:
    """It needs no metric for them. Two masters that pull at one number: defilantech/LLMKube#485."""
    patch(STUDIO, "dsvc", NAME, replicas=1, autoscaling={"minReplicas": 1, "maxReplicas": 2})
    until(lambda: replicas() == 2, SCALING_SECONDS, "scaled down to maxReplicas")
    with Watch(STUDIO, "deploy", f"dsvc-{NAME}") as watch:
        # A pass with a look for drift, which finds nothing: the number is the controller's.
        kubectl("-n", STUDIO, "annotate", "dsvc", NAME, "sojourn.dev/reconcile-at=now", "--overwrite")
        until(lambda: get(STUDIO, "dsvc", NAME)["status"].get("lastHandledReconcileAt") == "now", 60, "the forced pass")
        ready(STUDIO, NAME)
    assert {event["spec"]["replicas"] for event in watch.events} == {2}
    assert get(STUDIO, "dsvc", NAME)["status"]["replicasSummary"] == "2/2"
