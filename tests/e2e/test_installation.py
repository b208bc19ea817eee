"""The operator's chart on a node: its own test, an upgrade and an uninstall, while a service serves on."""

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import install
from tests.e2e.node import STUDIO, SYSTEM, get, kubectl, pods, ready, run, until
from tests.operator.test_installation import older

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("demo")]
KINDS = "deploy,svc,sa,cm,networkpolicy,pod,role,rolebinding"


def running() -> dict[str, int]:
    """Restarts of each container of the demo, by pod and container."""
    return {
        f"{pod['metadata']['uid']}/{container['name']}": container["restartCount"]
        for pod in pods()
        for container in pod["status"]["containerStatuses"]
    }


def fields() -> dict[str, str]:
    spec = json.loads(kubectl("get", "crd", "adalncaches.sojourn.dev", "-o", "json"))["spec"]
    found: dict[str, str] = spec["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    return found


def test_the_test_of_the_chart_passes() -> None:
    assert "Succeeded" in run("helm", "test", "sojourn", "-n", SYSTEM, "--timeout=2m")


def test_an_upgrade_from_the_version_before_restarts_no_pod_and_writes_no_release(tmp_path: Path) -> None:
    before, revision = running(), get(STUDIO, "dsvc", "demo")["status"]["release"]["revision"]
    install(str(older(tmp_path / "older")), "--set", "operator.podAnnotations.version=older")
    assert "width" not in fields()
    install()
    assert "width" in fields()
    ready()
    assert running() == before
    assert get(STUDIO, "dsvc", "demo")["status"]["release"]["revision"] == revision


def test_an_uninstall_takes_all_but_the_definitions_and_the_services_serve_on() -> None:
    before = running()
    run("helm", "uninstall", "sojourn", "-n", SYSTEM, "--wait", "--timeout=2m")
    try:
        labels = ("-l", "app.kubernetes.io/component=operator")
        until(lambda: not get(SYSTEM, KINDS, *labels)["items"], 60, "objects of the operator gone")
        assert not get(SYSTEM, "clusterrole,clusterrolebinding", *labels)["items"]
        assert get(SYSTEM, "crd", *labels)["items"]
        assert running() == before
    finally:
        install()
    ready()
    assert running() == before, "a new operator takes over what the old one made"
