"""The whole line: python -m tools.e2e [--keep] [--tag TAG] [-- arguments of pytest].

Starts one node of Kubernetes (or takes SOJOURN_E2E_KUBECONFIG), builds the images and loads them, runs tests/e2e
against it and takes everything down. Where something is missing that a machine could have, it says what and ends with
code 0, as a skipped test does; with SOJOURN_E2E_REQUIRED=1 that is an error.
"""

import argparse
import os
import subprocess
import sys

from tests.kubernetes import ROOT, program
from tools.e2e import images
from tools.e2e.cluster import Cluster, cluster
from tools.e2e.programs import Missing, run, step

FOLDER = ROOT / "out/e2e"


def main() -> int:
    """Exit code: that of the tests, or 0 where they cannot run here."""
    given = _arguments()
    try:
        return end_to_end(given.tag, given.arguments, keep=given.keep)
    except Missing as missing:
        print(f"e2e: SKIPPED: {missing}")
        return 1 if os.environ.get("SOJOURN_E2E_REQUIRED") else 0


def end_to_end(tag: str, arguments: list[str], *, keep: bool) -> int:
    """The whole line; returns pytest's exit code.

    Raises:
        Missing: this machine cannot do it, for want of something that it could have.
    """
    for name in ("kubectl", "helm"):
        if program(name) is None:
            raise Missing(f"no {name}: put it on the PATH")
    builder = images.builder()
    with cluster(FOLDER / "cluster", keep=keep) as found:
        if found.load or not os.environ.get("SOJOURN_E2E_KUBECONFIG"):
            _bring_images(builder, found, tag)
        return _test(found, tag, arguments)


def _bring_images(builder: images.Builder, found: Cluster, tag: str) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    images.build(builder, tag=tag, folder=FOLDER)
    files = images.archives(builder, tag=tag, folder=FOLDER)
    with step("images onto the node"):
        for file in files:
            run([*found.load, file])
            file.unlink()


def _test(found: Cluster, tag: str, arguments: list[str]) -> int:
    environ = os.environ | {"SOJOURN_E2E_KUBECONFIG": str(found.kubeconfig), "SOJOURN_E2E_TAG": tag}
    command = [sys.executable, "-m", "pytest", "tests/e2e", "--no-cov", "-p", "no:cacheprovider", *arguments]
    with step("tests"):
        return subprocess.run(command, cwd=ROOT, env=environ).returncode


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave the cluster running, to look at")
    parser.add_argument("--tag", default="dev", help="tag of the images")
    parser.add_argument("arguments", nargs="*", help="of pytest, after --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
