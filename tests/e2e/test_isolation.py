"""Who may reach a service, and what its pods may do."""

import json

import pytest

from tests.e2e.client import Client, client
from tests.e2e.node import PORT, STUDIO, apply, get, kubectl, patch, ready, shell, until

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("demo")]
ENDPOINT = f"dsvc-demo.{STUDIO}.svc.cluster.local:{PORT}"
TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"


def reached(client: Client, seconds: int = 20) -> bool:
    """Whether a client gets a video. One that is refused by the network gets no answer at all."""
    said = client.generate(ENDPOINT, "--timeout", str(seconds), check=False)
    if '"completed"' in said:
        return True
    assert "UNAVAILABLE" in said or "DEADLINE_EXCEEDED" in said, said
    return False


def test_a_pod_of_another_namespace_is_refused_and_one_of_its_own_is_served(
    neighbour: Client, stranger: Client
) -> None:
    assert reached(neighbour, 60)
    assert not reached(stranger, 5)


def test_a_peer_that_the_service_names_is_served_and_no_other(neighbour: Client) -> None:
    """By labels of its namespace and of its pod."""
    labels = {"kubernetes.io/metadata.name": "elsewhere"}
    uids = {pod["metadata"]["uid"] for pod in get(STUDIO, "pods", "-l", "app.kubernetes.io/part-of=sojourn")["items"]}
    patch(STUDIO, "dsvc", "demo", network={"allowFrom": [{"namespaceLabels": labels, "podLabels": {"role": "editor"}}]})
    ready()
    with client("elsewhere", "editor", role="editor") as editor:
        until(lambda: reached(editor), 60, "the named peer is served")
        assert not reached(neighbour, 5)
    now = {pod["metadata"]["uid"] for pod in get(STUDIO, "pods", "-l", "app.kubernetes.io/part-of=sojourn")["items"]}
    assert now == uids, "who may call is no reason to restart a model"


@pytest.mark.parametrize("container", ["inference", "residencyd"])
def test_no_token_of_a_service_account_is_in_the_workload(container: str) -> None:
    assert "No such file" in shell(STUDIO, "deploy/dsvc-demo", container, "ls", TOKEN_FOLDER, check=False)


@pytest.mark.parametrize("container", ["inference", "residencyd"])
def test_a_container_is_nobody_with_nothing_to_write(container: str) -> None:
    code = "import os; print(os.getuid(), os.statvfs('/').f_flag & os.ST_RDONLY, open('/proc/self/status').read())"
    said = shell(STUDIO, "deploy/dsvc-demo", container, "python3", "-c", code)
    assert said.startswith("10001 1 "), said
    assert "CapEff:\t0000000000000000" in said
    assert "NoNewPrivs:\t1" in said


def test_the_namespace_of_the_demo_takes_restricted_pods_only() -> None:
    """Else the tests above would say nothing of Pod Security."""
    bad = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "root"},
        "spec": {"containers": [{"name": "a", "image": "localhost/pause:1"}]},
    }
    said = kubectl("-n", STUDIO, "apply", "-f", "-", given=json.dumps(bad), check=False)
    assert 'violates PodSecurity "restricted:' in said


def test_a_namespace_that_refuses_the_pods_is_told() -> None:
    """Volumes of the node's folders are for privileged namespaces: the condition says what the API server said."""
    bad = {
        "apiVersion": "sojourn.dev/v1alpha1",
        "kind": "DiffusionService",
        "metadata": {"name": "folder"},
        "spec": {"model": {"hostPath": {"path": "/tmp"}}, "device": "CPU"},
    }
    apply(bad, namespace=STUDIO)

    def told() -> bool:
        return "PodSecurity" in json.dumps(get(STUDIO, "dsvc", "folder").get("status", {}).get("conditions", []))

    try:
        until(told, 60, "PodSecurity named in a condition")
    finally:
        kubectl("-n", STUDIO, "delete", "dsvc", "folder", "--timeout=60s")
