"""Where the tests find Kubernetes' programs and a cluster.

SOJOURN_TEST_KUBECONFIG names any cluster. Where it is not set, the script named by SOJOURN_KUBE_CLUSTER (by default
../shared/kube/cluster beside the checkout) starts a control plane. Programs (helm, kubectl) are those of the PATH,
else those that the script brings.
"""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = Path(os.environ.get("SOJOURN_KUBE_CLUSTER", ROOT.parent / "shared/kube/cluster"))


def program(name: str) -> Path | None:
    """A program of Kubernetes, or None where there is none."""
    if found := shutil.which(name):
        return Path(found)
    if not CLUSTER.exists():
        return None
    lines = subprocess.run([CLUSTER, "env"], capture_output=True, text=True, check=True).stdout.splitlines()
    folder = next(line for line in lines if line.startswith("export PATH=")).split("=", 1)[1].removesuffix(":$PATH")
    return Path(folder) / name if (Path(folder) / name).exists() else None
