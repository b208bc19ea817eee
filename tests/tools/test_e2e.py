"""`make e2e` where it cannot run, and what it tells a builder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kubernetes import ROOT
from tools.e2e import images


@pytest.mark.parametrize(("required", "code"), [("", 0), ("1", 1)])
def test_without_a_cluster_it_says_what_is_missing_and_how_to_get_it(required: str, code: int) -> None:
    environ = os.environ | {"SOJOURN_KUBE_CLUSTER": "/nowhere/cluster", "SOJOURN_E2E_REQUIRED": required}
    environ.pop("SOJOURN_E2E_KUBECONFIG", None)
    done = subprocess.run([sys.executable, "-m", "tools.e2e"], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == code
    assert "SKIPPED: no " in done.stdout
    assert any(remedy in done.stdout for remedy in ("SOJOURN_E2E_KUBECONFIG", "on the PATH", "apt-get install"))


def test_settings_of_pip_reach_the_build_and_what_they_name_is_mounted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PIP_CERT", raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "https://packages.example/simple")
    words = [
        "--build-arg",
        f"PIP_FIND_LINKS={tmp_path}",
        "--build-arg",
        "PIP_INDEX_URL=https://packages.example/simple",
    ]
    assert images._pip(images.DOCKER) == words
    assert images._pip(images.BUILDAH) == [*words, "--volume", f"{tmp_path}:{tmp_path}:ro"]


def test_an_address_is_not_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*images.PIP_PATHS, *images.PIP_WORDS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", "https://wheels.example/")
    assert images._pip(images.BUILDAH) == ["--build-arg", "PIP_FIND_LINKS=https://wheels.example/"]
