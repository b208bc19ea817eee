"""A pod that makes folders on the node: it is root there, in a namespace that allows that."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.e2e.node import SHARED, Object, apply, image, kubectl, running, shell


def _pod(name: str) -> Object:
    container = {
        "name": "keeper",
        "image": image("inference"),
        "imagePullPolicy": "Never",
        "command": ["sleep", "infinity"],
        "securityContext": {"runAsUser": 0, "runAsNonRoot": False},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    spec = {
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
        "volumes": [{"name": "tmp", "hostPath": {"path": "/tmp"}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


class Keeper:
    """Runs commands in such a pod."""

    def __init__(self, name: str):
        self.name = name

    def run(self, *command: str) -> str:
        """Output of a command; /tmp is the node's."""
        return shell(SHARED, self.name, "keeper", *command)


@contextmanager
def keeper(folder: str, name: str) -> Iterator[Keeper]:
    """A keeper, and an empty folder of the node that goes with it."""
    apply(_pod(name), namespace=SHARED)
    try:
        running(SHARED, name)
        found = Keeper(name)
        found.run("sh", "-c", f"rm -rf {folder} && mkdir -p {folder}")
        yield found
        found.run("rm", "-rf", folder)
    finally:
        kubectl("-n", SHARED, "delete", "pod", name, "--wait=false")
