"""charts/sojourn on a real API server: installed, upgraded from an older version, uninstalled."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from sojourn.operator.kube.client import DEPLOYMENTS, DIFFUSION_SERVICES, SECRETS, Kube

from tests.kubernetes import ROOT, program
from tests.operator.cluster import CRDS, exists, install_crds, service

CHART = ROOT / "charts/sojourn"


def helm(kubeconfig: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(program("helm")), "--kubeconfig", str(kubeconfig), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def older(target: Path) -> Path:
    """The chart as it was when AdaLNCache had no field `width`."""
    chart = Path(shutil.copytree(CHART, target))
    path = chart / "templates/crds/adalncaches.yaml"
    text, count = re.subn(r"\n +width:\n(?: {16,}.*\n)+", "\n", path.read_text())
    assert count == 1
    path.write_text(text)
    metadata = chart / "Chart.yaml"
    metadata.write_text(metadata.read_text().replace("version: 0.1.0", "version: 0.0.9", 1))
    return chart


async def has_width(kube: Kube) -> bool:
    crd = await kube.get(CRDS, "", "adalncaches.sojourn.dev")
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return "width" in schema["properties"]["spec"]["properties"]


@pytest.mark.timeout(900)
async def test_an_upgrade_brings_new_fields_and_an_uninstall_keeps_everybodys_objects(
    kube: Kube, namespace: str, kubeconfig: Path, tmp_path: Path
) -> None:
    """What lies in a chart's crds/ folder is never upgraded, and what a template makes goes with an uninstall.

    See https://helm.sh/docs/chart_best_practices/custom_resource_definitions/.
    """
    try:
        foreign = helm(kubeconfig, "install", "sojourn", older(tmp_path / "older"), "-n", namespace)
        assert foreign.returncode, "definitions of somebody else are not taken over without being told to"
        assert "cannot be imported" in foreign.stderr
        helm(kubeconfig, "uninstall", "sojourn", "-n", namespace)
        scope = ("--set", f"operator.namespaces={{{namespace}}}", "--set", "webhook.enabled=true")
        taken = helm(
            kubeconfig, "install", "sojourn", tmp_path / "older", "-n", namespace, "--take-ownership",
            "--force-conflicts", *scope,
        )  # fmt: skip
        assert taken.returncode == 0, taken.stderr
        assert not await has_width(kube)
        trusted = (await kube.get(SECRETS, namespace, "sojourn-operator-webhook"))["data"]
        await kube.create(DIFFUSION_SERVICES, service(namespace))
        done = helm(kubeconfig, "upgrade", "sojourn", CHART, "-n", namespace, *scope)
        assert done.returncode == 0, done.stderr
        assert await has_width(kube)
        kept = (await kube.get(SECRETS, namespace, "sojourn-operator-webhook"))["data"]
        assert kept == trusted, "the webhook's certificate outlives an upgrade"
        assert await exists(kube, DEPLOYMENTS, namespace, "sojourn-operator")
        gone = helm(kubeconfig, "uninstall", "sojourn", "-n", namespace)
        assert gone.returncode == 0, gone.stderr
        assert await exists(kube, DIFFUSION_SERVICES, namespace, "demo")
        assert not await exists(kube, DEPLOYMENTS, namespace, "sojourn-operator")
        again = helm(kubeconfig, "install", "sojourn", CHART, "-n", namespace, *scope)
        assert again.returncode == 0, again.stderr
    finally:
        helm(kubeconfig, "uninstall", "sojourn", "-n", namespace)
        await install_crds(kubeconfig)
        await kube.delete(DIFFUSION_SERVICES, namespace, "demo")
