"""A pod that calls the service as a user's program would, with the same command line."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.e2e.node import Object, apply, image, kubectl, running, shell

# What a namespace asks of its pods that is labelled `restricted`.
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "runAsGroup": 10001,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def pod(name: str, labels: dict[str, str]) -> Object:
    container = {
        "name": "client",
        "image": image("inference"),
        "imagePullPolicy": "Never",
        "command": ["sleep", "infinity"],
        "securityContext": CONTAINER_SECURITY,
        "resources": {"requests": {"cpu": "20m"}},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    spec = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "securityContext": POD_SECURITY,
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


class Client:
    """A pod from which `sojourn generate` is run."""

    def __init__(self, namespace: str, name: str):
        self.namespace, self.name = namespace, name

    def generate(self, server: str, *options: str, check: bool = True) -> str:
        """What `sojourn generate` says; four steps unless the options say otherwise."""
        steps = () if "--steps" in options else ("--steps", "4")
        command = ("sojourn", "generate", "a moving seven", "--server", server, "-o", "/tmp/out.mp4", "--json")
        return shell(self.namespace, self.name, "client", *command, *steps, *options, check=check)

    def write(self, path: str, text: str) -> None:
        shell(self.namespace, self.name, "client", "sh", "-c", f"cat > {path}", given=text)


@contextmanager
def client(namespace: str, name: str = "client", **labels: str) -> Iterator[Client]:
    apply(pod(name, labels), namespace=namespace)
    try:
        running(namespace, name)
        yield Client(namespace, name)
    finally:
        kubectl("-n", namespace, "delete", "pod", name, "--wait=false")
