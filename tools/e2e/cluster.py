"""The cluster that the pods run on: one that is there, or one node that the script of tests.kubernetes starts."""

import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.kubernetes import CLUSTER
from tools.e2e.programs import Missing, have, run, step

# What the script needs for a node, as Debian calls it.
NODE_PROGRAMS = {"runc": "runc", "iptables": "iptables", "ipset": "ipset", "ip": "iproute2"}


@dataclass(frozen=True)
class Cluster:
    """Where tests go.

    Attributes:
        kubeconfig: with the rights of an administrator.
        load: command that brings an image archive, its last argument, to every node; empty where images come otherwise.
    """

    kubeconfig: Path
    load: tuple[str, ...]


@contextmanager
def cluster(folder: Path, *, keep: bool) -> Iterator[Cluster]:
    """SOJOURN_E2E_KUBECONFIG's cluster, which stays, or a new one in `folder`, which goes unless it is kept.

    Raises:
        Missing: neither is to be had here.
    """
    if given := os.environ.get("SOJOURN_E2E_KUBECONFIG"):
        yield Cluster(Path(given), tuple(shlex.split(os.environ.get("SOJOURN_E2E_LOAD", ""))))
        return
    _check_script()
    script = (str(CLUSTER),)
    where = ("--dir", str(folder))
    with step("one node of Kubernetes"):
        # What an interrupted run left.
        run([*script, "down", *where])
        run([*script, "up", "--node", *where])
    try:
        yield Cluster(folder / "kubeconfig", (*script, "load", *where))
    finally:
        if keep:
            print(f"e2e: kept; end it with: {CLUSTER} down --dir {folder}")
        else:
            run([*script, "down", *where])
            shutil.rmtree(folder, ignore_errors=True)


def _check_script() -> None:
    if not CLUSTER.exists():
        raise Missing(
            f"no cluster: set SOJOURN_E2E_KUBECONFIG (and SOJOURN_E2E_LOAD, such as 'kind load image-archive'), or "
            f"SOJOURN_KUBE_CLUSTER to a script that starts one; there is none at {CLUSTER}"
        )
    if os.geteuid():
        raise Missing("a node runs containers, which needs root: run as root, or set SOJOURN_E2E_KUBECONFIG")
    packages = [package for program, package in NODE_PROGRAMS.items() if not have(program)]
    if packages:
        raise Missing(f"a node needs programs that are not here: apt-get install {' '.join(packages)}")
