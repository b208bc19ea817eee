"""What the tests of this folder share: kubectl and helm, waiting, and what to show when it was in vain.

SOJOURN_E2E_KUBECONFIG names a cluster whose nodes have the images localhost/sojourn-{inference,residencyd,operator}
and localhost/sojourn-e2e-{prometheus,model} with the tag SOJOURN_E2E_TAG (dev). `make e2e` starts such a cluster,
builds the images and loads them. Else the tests skip.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

from tests.kubernetes import ROOT, program

KUBECONFIG = os.environ.get("SOJOURN_E2E_KUBECONFIG", "")
TAG = os.environ.get("SOJOURN_E2E_TAG", "dev")
# The operator's namespace; one that allows restricted pods only; another such one; one that allows hostPath volumes.
SYSTEM, STUDIO, ELSEWHERE, SHARED, MONITORING = "sojourn", "studio", "elsewhere", "shared", "monitoring"
# On a machine that is busy with other things everything takes longer.
PATIENCE = float(os.environ.get("SOJOURN_TEST_PATIENCE", "1"))
DEMO = ROOT / "examples/demo.yaml"
PORT = 50051

Object = dict[str, Any]


def image(name: str) -> str:
    return f"localhost/sojourn-{name}:{TAG}"


def run(name: str, *arguments: object, given: str | None = None, check: bool = True) -> str:
    """Output of kubectl or helm; with what it said of errors where those are expected."""
    command = [str(program(name)), "--kubeconfig", KUBECONFIG, *map(str, arguments)]
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + ("" if check else done.stderr)


def kubectl(*arguments: object, given: str | None = None, check: bool = True) -> str:
    return run("kubectl", *arguments, given=given, check=check)


def get(namespace: str, *what: object) -> Object:
    found: Object = json.loads(kubectl("-n", namespace, "get", *what, "-o", "json"))
    return found


def apply(*objects: Object, namespace: str) -> None:
    kubectl(
        "-n", namespace, "apply", "-f", "-", given=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    )


def patch(namespace: str, kind: str, name: str, **spec: Any) -> None:
    kubectl("-n", namespace, "patch", kind, name, "--type=merge", "-p", json.dumps({"spec": spec}))


def demo_as_written() -> None:
    """examples/demo.yaml, without what a test has added to it."""
    if "NotFound" in kubectl("-n", STUDIO, "replace", "-f", DEMO, check=False):
        kubectl("-n", STUDIO, "apply", "-f", DEMO)


def until(ready: Callable[[], Any], seconds: float, what: str, *, namespace: str = STUDIO) -> Any:
    """What `ready` answers, once it is true."""
    deadline = time.monotonic() + seconds * PATIENCE
    while not (answer := ready()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{diagnosis(namespace)}"
        time.sleep(1)
    return answer


def diagnosis(namespace: str) -> str:
    parts = [
        kubectl("-n", namespace, "get", "dsvc,deploy,pods", "-o", "wide", check=False),
        kubectl("-n", namespace, "get", "dsvc", "-o", "jsonpath={.items[*].status}", check=False),
        kubectl("-n", namespace, "logs", "-l", "app.kubernetes.io/part-of=sojourn", "--all-containers", "--tail=20",
                check=False),
        kubectl("-n", SYSTEM, "logs", "deploy/sojourn-operator", "--tail=20", check=False),
    ]  # fmt: skip
    return "\n".join(parts)


def condition(service: Object, type_: str) -> Object:
    """A condition of an object; with status Absent where it is not there."""
    found = (c for c in service.get("status", {}).get("conditions", []) if c["type"] == type_)
    return next(found, {"type": type_, "status": "Absent", "reason": "", "message": "", "observedGeneration": 0})


def has(namespace: str, name: str, type_: str, wanted: str) -> Object | None:
    """A condition of a DiffusionService's newest generation, where it has the status that is wanted."""
    service = get(namespace, "dsvc", name)
    found = condition(service, type_)
    seen = found.get("observedGeneration") == service["metadata"]["generation"]
    return found if found["status"] == wanted and seen else None


def ready(namespace: str = STUDIO, name: str = "demo", *, seconds: float = 180) -> None:
    """Waits until a DiffusionService is Ready."""
    until(lambda: has(namespace, name, "Ready", "True"), seconds, f"{name} Ready", namespace=namespace)


def running(namespace: str, name: str) -> None:
    """Waits until a pod is Ready."""
    said = kubectl(
        "-n", namespace, "wait", "pod", name, "--for=condition=Ready", f"--timeout={90 * PATIENCE:.0f}s", check=False
    )
    if "condition met" not in said:
        words = [kubectl("-n", namespace, *what, name, check=False) for what in (("describe", "pod"), ("logs",))]
        raise AssertionError("\n".join([said, *words]))


def pods(namespace: str = STUDIO, name: str = "demo") -> list[Object]:
    """The pods of a DiffusionService that are not on their way out."""
    items = get(namespace, "pods", "-l", f"app.kubernetes.io/instance=dsvc-{name}")["items"]
    return [item for item in items if "deletionTimestamp" not in item["metadata"]]


def shell(namespace: str, pod: str, container: str, *command: str, given: str | None = None, check: bool = True) -> str:
    """Output of a command in a container; `pod` may be deploy/NAME."""
    return kubectl("-n", namespace, "exec", "-i", pod, "-c", container, "--", *command, given=given, check=check)


def metrics(namespace: str, pod: str, port: int) -> dict[str, float]:
    """The metrics page of a process of a pod, read inside of it: value by name and labels as they are written."""
    code = f"import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:{port}/metrics').read().decode())"
    lines = shell(namespace, pod, "residencyd", "python3", "-c", code).splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line and line[0] != "#"}
