"""What the charts render is allowed by Kubernetes' own schemas, in the oldest version that they name and the newest."""

import copy
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.charts.conftest import Render
from tests.charts.test_operator_chart import ALTERED, nested
from tests.charts.test_service_chart import CASES, values
from tests.kubernetes import ROOT

OLDEST, NEWEST = "1.29", "1.37"
# Of the Prometheus operator; its definitions are not among Kubernetes'.
FOREIGN = {"PodMonitor", "PrometheusRule"}
# Image volumes came with 1.31.
SINCE = {"image": "1.31"}
SERVICES = CASES | {
    "hostPath": values({"model": {"hostPath": {"path": "/models"}}, "replicas": 2}),
    "image": values({"model": {"image": {"reference": "registry/model:1", "subPath": "h3"}}}),
}


def wrong(objects: list[dict[str, Any]], version: str) -> list[str]:
    """What is wrong, by object; fields that the schema does not know are."""
    found = []
    for item in objects:
        if item["kind"] in FOREIGN:
            continue
        try:
            kubernetes_validate.validate(item, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{item['kind']} {item['metadata']['name']}: {error.message} at {list(error.path)}")
    return found


def test_the_oldest_version_is_what_the_charts_say() -> None:
    for chart in ("sojourn", "sojourn-service"):
        said = yaml.safe_load((ROOT / "charts" / chart / "Chart.yaml").read_text())["kubeVersion"]
        assert said == f">={OLDEST}.0-0"


@pytest.mark.parametrize("case", list(SERVICES))
def test_a_service_is_valid(render: Render, case: str) -> None:
    objects = render("sojourn-service", SERVICES[case])
    for version in (SINCE.get(case, OLDEST), NEWEST):
        assert wrong(objects, version) == [], version


@pytest.fixture(scope="module")
def plain(render: Render) -> list[dict[str, Any]]:
    """The operator's objects with the chart's own values."""
    return render("sojourn", {})


def test_the_operator_is_valid(plain: list[dict[str, Any]]) -> None:
    for version in (OLDEST, NEWEST):
        assert wrong(plain, version) == [], version


@pytest.mark.parametrize("path", list(ALTERED))
def test_what_a_value_changes_is_valid(render: Render, plain: list[dict[str, Any]], path: str) -> None:
    changed = [item for item in render("sojourn", nested(path, ALTERED[path])) if item not in plain]
    for version in (OLDEST, NEWEST):
        assert wrong(changed, version) == [], version


def test_what_is_wrong_is_found(render: Render) -> None:
    (good,) = (item for item in render("sojourn-service", CASES["plain"]) if item["kind"] == "Deployment")
    unknown, mistyped = copy.deepcopy(good), copy.deepcopy(good)
    unknown["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    mistyped["spec"]["replicas"] = "1"
    assert len(wrong([good, unknown, mistyped], NEWEST)) == 2
