"""kubectl apply to a served video, on a node that runs pods.

SOJOURN_E2E_KUBECONFIG names a cluster whose nodes have the images localhost/sojourn-{inference,residencyd,operator}
with the tag SOJOURN_E2E_TAG (dev). `make e2e` starts such a cluster, builds and loads them. Else the tests skip.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kubernetes import ROOT, program

KUBECONFIG = os.environ.get("SOJOURN_E2E_KUBECONFIG", "")
TAG = os.environ.get("SOJOURN_E2E_TAG", "dev")
SYSTEM, STUDIO, ELSEWHERE = "sojourn-system", "studio", "elsewhere"
ENDPOINT = f"dsvc-demo.{STUDIO}.svc.cluster.local:50051"

pytestmark = [
    pytest.mark.skipif(not KUBECONFIG, reason="no node: set SOJOURN_E2E_KUBECONFIG, or run make e2e"),
    pytest.mark.timeout(900),
]


def run(name: str, *arguments: object, given: str | None = None, check: bool = True) -> str:
    """Output of kubectl or helm."""
    command = [str(program(name)), "--kubeconfig", KUBECONFIG, *map(str, arguments)]
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + ("" if check else done.stderr)


def kubectl(*arguments: object, given: str | None = None, check: bool = True) -> str:
    return run("kubectl", *arguments, given=given, check=check)


def get(namespace: str, *what: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kubectl("-n", namespace, "get", *what, "-o", "json"))
    return found


def until(ready: Callable[[], Any], seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while not (answer := ready()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{diagnosis()}"
        time.sleep(1)
    return answer


def diagnosis() -> str:
    parts = [
        kubectl("-n", STUDIO, "get", "dsvc,deploy,pods", "-o", "wide", check=False),
        kubectl("-n", STUDIO, "get", "dsvc", "-o", "jsonpath={.items[*].status}", check=False),
        kubectl("-n", STUDIO, "logs", "deploy/dsvc-demo", "--all-containers", "--tail=20", check=False),
        kubectl("-n", SYSTEM, "logs", "deploy/sojourn-operator", "--tail=20", check=False),
    ]
    return "\n".join(parts)


def ready(status: str = "True") -> bool:
    item = get(STUDIO, "dsvc", "demo")
    found = {c["type"]: c for c in item.get("status", {}).get("conditions", [])}.get("Ready", {})
    return bool(found.get("status") == status and found["observedGeneration"] == item["metadata"]["generation"])


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    """The operator from its chart; a namespace that allows restricted pods only, and another one."""
    for namespace in (SYSTEM, STUDIO, ELSEWHERE):
        labels = "pod-security.kubernetes.io/enforce=restricted"
        kubectl("create", "namespace", namespace, check=False)
        kubectl("label", "namespace", namespace, labels, "--overwrite")
    sets = [
        f"operator.image.tag={TAG}",
        f"services.inferenceImage=localhost/sojourn-inference:{TAG}",
        f"services.residencydImage=localhost/sojourn-residencyd:{TAG}",
        "operator.observeSeconds=5",
    ]
    run("helm", "upgrade", "--install", "sojourn", ROOT / "charts/sojourn", "-n", SYSTEM, "--wait", "--timeout=3m",
        *(word for one in sets for word in ("--set", one)))  # fmt: skip
    kubectl("-n", STUDIO, "apply", "-f", ROOT / "examples/demo.yaml")
    yield
    kubectl("-n", STUDIO, "delete", "-f", ROOT / "examples/demo.yaml", "--ignore-not-found", "--timeout=120s")
    run("helm", "uninstall", "sojourn", "-n", SYSTEM)
    kubectl("delete", "namespace", SYSTEM, STUDIO, ELSEWHERE, "--wait=false")


def client(namespace: str, name: str, *arguments: str) -> str:
    """Phase and log of a pod that runs `sojourn` as a client."""
    security = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "client",
                    "image": f"localhost/sojourn-inference:{TAG}",
                    "imagePullPolicy": "Never",
                    "args": list(arguments),
                    "securityContext": security,
                    "resources": {"requests": {"cpu": "20m"}},
                    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                }
            ],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    }
    kubectl("apply", "-f", "-", given=json.dumps(pod))

    def ended() -> str:
        phase: str = get(namespace, "pod", name)["status"].get("phase", "")
        return phase if phase in ("Succeeded", "Failed") else ""

    phase = until(ended, 240, f"client pod {name}")
    log = kubectl("-n", namespace, "logs", name)
    kubectl("-n", namespace, "delete", "pod", name, "--wait=false")
    return f"{phase}\n{log}"


def test_the_demo_is_ready_with_its_figures() -> None:
    until(ready, 180, "demo Ready")
    kubectl("-n", STUDIO, "get", "dsvc", "demo")

    def figures() -> bool:
        status = get(STUDIO, "dsvc", "demo")["status"]
        return bool(status.get("model") and status.get("residency", {}).get("components"))

    until(figures, 60, "figures of the demo")
    status = get(STUDIO, "dsvc", "demo")["status"]
    assert status["model"] == "h3-digits"
    visible = next(c for c in status["conditions"] if c["type"] == "ResidencyVisible")
    assert visible["status"] == "True", visible


def test_a_client_of_the_namespace_gets_a_video_through_the_service() -> None:
    until(ready, 180, "demo Ready")
    answer = client(
        STUDIO, "client", "generate", "a moving seven", "--server", ENDPOINT, "-o", "/tmp/out.mp4", "--json"
    )
    assert answer.startswith("Succeeded"), answer


def test_a_client_of_another_namespace_is_refused_by_the_network_policy() -> None:
    until(ready, 180, "demo Ready")
    arguments = ("generate", "a seven", "--server", ENDPOINT, "-o", "/tmp/out.mp4", "--timeout", "20")
    assert client(ELSEWHERE, "client", *arguments).startswith("Failed")


def test_no_token_of_a_service_account_is_in_the_workload() -> None:
    until(ready, 180, "demo Ready")
    where = "/var/run/secrets/kubernetes.io/serviceaccount"
    for container in ("inference", "residencyd"):
        found = kubectl("-n", STUDIO, "exec", "deploy/dsvc-demo", "-c", container, "--", "ls", where, check=False)
        assert "No such file" in found


def test_an_edit_of_a_policy_rolls_the_pods() -> None:
    until(ready, 180, "demo Ready")
    before = {
        pod["metadata"]["name"] for pod in get(STUDIO, "pods", "-l", "app.kubernetes.io/part-of=sojourn")["items"]
    }
    kubectl("-n", STUDIO, "patch", "adaln", "demo", "--type=merge", "-p", '{"spec":{"plans":60}}')
    until(lambda: not ready(), 30, "not Ready after the edit")
    until(ready, 240, "Ready after the edit")
    after = {pod["metadata"]["name"] for pod in get(STUDIO, "pods", "-l", "app.kubernetes.io/part-of=sojourn")["items"]}
    assert after - before


def test_an_oom_kill_is_told_with_its_code() -> None:
    """A pod with too small a limit: the model does not fit."""
    kubectl("-n", STUDIO, "patch", "dsvc", "demo", "--type=merge", "-p",
            '{"spec":{"resources":{"limits":{"memory":"180Mi"},"requests":{"memory":"100Mi"}}}}')  # fmt: skip

    def told() -> bool:
        return bool(get(STUDIO, "dsvc", "demo")["status"].get("lastFailure", {}).get("reason") == "OOMKilled")

    try:
        until(told, 180, "OOMKilled in lastFailure")
        assert get(STUDIO, "dsvc", "demo")["status"]["lastFailure"]["exitCode"] == 137
        assert not ready()
    finally:
        kubectl("-n", STUDIO, "apply", "-f", ROOT / "examples/demo.yaml")


def test_deleting_leaves_nothing() -> None:
    kubectl("-n", STUDIO, "delete", "dsvc", "demo", "--timeout=120s")
    kinds = "deploy,svc,sa,networkpolicy,hpa,pdb,cm"
    left = get(STUDIO, kinds, "-l", "app.kubernetes.io/instance=dsvc-demo")["items"]
    assert left == []
    assert get(STUDIO, "cm", "-l", "owner=helm")["items"] == []
