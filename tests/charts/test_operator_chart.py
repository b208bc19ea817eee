"""charts/sojourn: the operator's chart, value by value."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from sojourn.operator.defaults import Defaults

from tests.charts.conftest import Refused, Render
from tests.charts.test_service_chart import only
from tests.kubernetes import ROOT

CHART = ROOT / "charts/sojourn"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())

# A value other than the default for every leaf of the values.
ALTERED: dict[str, Any] = {
    "crds.install": False,
    "operator.image.repository": "registry/operator",
    "operator.image.tag": "9",
    "operator.image.pullPolicy": "Always",
    "operator.pullSecrets": ["registry"],
    "operator.namespaces": ["studio"],
    "operator.readServiceSecrets": True,
    "operator.clientCertificate.secretName": "operator-client",
    "operator.workers": 4,
    "operator.resyncSeconds": 1000000,
    "operator.observeSeconds": 60,
    "operator.unreadySeconds": 5,
    "operator.refusedSeconds": 60,
    "operator.logLevel": "debug",
    "operator.logFormat": "text",
    "operator.resources.requests.cpu": "100m",
    "operator.resources.requests.memory": "256Mi",
    "operator.resources.limits.memory": "512Mi",
    "operator.nodeSelector": {"a": "b"},
    "operator.tolerations": [{"key": "a"}],
    "operator.priorityClassName": "high",
    "operator.podLabels": {"a": "b"},
    "operator.podAnnotations": {"a": "b"},
    "helm.driver": "secret",
    "helm.timeoutSeconds": 90,
    "helm.concurrency": 8,
    "services.inferenceImage": "a:1",
    "services.residencydImage": "b:1",
    "services.pullPolicy": "Always",
    "services.pullSecrets": ["registry"],
    "services.podMonitor": True,
    "services.checkNodes": False,
    "services.monitoringNamespaceLabels": {"a": "b"},
    "webhook.enabled": True,
    "monitoring.podMonitor": True,
    "monitoring.dashboards": True,
    "monitoring.rules": True,
    "networkPolicy.enabled": False,
    "networkPolicy.monitoringNamespaceLabels": {"a": "b"},
}
# Have an effect only together with monitoring.dashboards and monitoring.rules.
WITH_MONITORING = {
    "monitoring.dashboardLabels": {"other": "1"},
    "monitoring.dashboardAnnotations": {"grafana_folder": "Other"},
    "monitoring.ruleLabels": {"release": "monitoring"},
    "monitoring.runbookUrl": "https://wiki.example/sojourn",
}
# Have an effect only with a webhook whose certificate is not drawn anew by each rendering.
ISSUED = {"webhook": {"enabled": True, "certManager": {"enabled": True}}}
WITH_WEBHOOK = {
    "webhook.timeoutSeconds": 9,
    "webhook.certManager.enabled": False,
    "webhook.certManager.issuerRef": {"kind": "ClusterIssuer", "name": "internal"},
}


def leaves(values: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value and not name.startswith(("dashboard", "rule")):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    result: dict[str, Any] = value
    return result


def test_every_value_is_altered_below() -> None:
    assert set(leaves(VALUES)) == set(ALTERED) | set(WITH_MONITORING) | set(WITH_WEBHOOK)


@pytest.mark.parametrize("path", list(ALTERED))
def test_every_value_has_an_effect(render_text: Callable[..., str], path: str) -> None:
    assert render_text("sojourn", {}) != render_text("sojourn", nested(path, ALTERED[path]))


@pytest.mark.parametrize("path", list(WITH_MONITORING))
def test_every_value_of_monitoring_has_an_effect(render_text: Callable[..., str], path: str) -> None:
    given = {"dashboards": True, "rules": True}
    altered = given | {path.split(".")[1]: WITH_MONITORING[path]}
    assert render_text("sojourn", {"monitoring": given}) != render_text("sojourn", {"monitoring": altered})


@pytest.mark.parametrize("path", list(WITH_WEBHOOK))
def test_every_value_of_the_webhook_has_an_effect(render_text: Callable[..., str], path: str) -> None:
    altered = render_text("sojourn", ISSUED, "--set-json", f"{path}={json.dumps(WITH_WEBHOOK[path])}")
    assert render_text("sojourn", ISSUED) != altered


def test_the_webhook_is_never_in_the_way_and_trusts_the_certificate_of_its_secret(render: Render) -> None:
    objects = render("sojourn", {"webhook": {"enabled": True}, "operator": {"namespaces": ["a"]}})
    (webhook,) = only(objects, "ValidatingWebhookConfiguration")["webhooks"]
    assert (webhook["failurePolicy"], webhook["sideEffects"]) == ("Ignore", "None")
    assert webhook["namespaceSelector"]["matchExpressions"][0]["values"] == ["a"]
    secret = only(objects, "Secret")
    assert webhook["clientConfig"]["caBundle"] == secret["data"]["ca.crt"]
    pod = only(objects, "Deployment")["spec"]["template"]["spec"]
    assert secret["metadata"]["name"] in [volume.get("secret", {}).get("secretName") for volume in pod["volumes"]]
    (service,) = [item for item in objects if item["kind"] == "Service" and "webhook" in item["metadata"]["name"]]
    assert webhook["clientConfig"]["service"]["name"] == service["metadata"]["name"]


def test_cert_manager_may_issue_it(render: Render) -> None:
    objects = render("sojourn", ISSUED)
    certificate, issuer = only(objects, "Certificate"), only(objects, "Issuer")
    assert certificate["spec"]["issuerRef"]["name"] == issuer["metadata"]["name"]
    annotations = only(objects, "ValidatingWebhookConfiguration")["metadata"]["annotations"]
    assert annotations["cert-manager.io/inject-ca-from"].endswith(f"/{certificate['metadata']['name']}")
    assert not [item for item in objects if item["kind"] == "Secret"]


@pytest.mark.parametrize(
    "bad",
    [
        {"helm": {"driver": "sql"}},
        {"operator": {"workers": 0}},
        {"operator": {"logLevel": "loud"}},
        {"operator": {"unreadySeconds": 0}},
        {"operator": {"refusedSeconds": 0}},
        {"services": {"inferenceImage": ""}},
        {"unknown": 1},
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused(render: Render, bad: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="values don't meet"):
        render("sojourn", bad)


# Options of the operator that no value sets, and why.
LEFT_OUT = {
    "--helm": "the image has the program where it is looked for",
    "--listen": "the ports of the Service, the probes and the NetworkPolicy are the default's",
    "--help": "prints",
}


def test_every_option_of_the_operator_can_be_rendered_or_is_left_out_for_a_reason(render: Render) -> None:
    from sojourn.operator.cli import app
    from typer.main import get_command

    known = {option for parameter in get_command(app).commands["run"].params for option in parameter.opts}  # type: ignore[attr-defined]
    rendered: set[str] = set()
    for path, value in ALTERED.items():
        (found,) = only(render("sojourn", nested(path, value)), "Deployment")["spec"]["template"]["spec"]["containers"]
        rendered |= {argument.split("=")[0] for argument in found["args"] if argument.startswith("--")}
    assert rendered <= known
    assert known | {"--help"} == rendered | set(LEFT_OUT)


def test_helm_lint_finds_nothing(helm: Path) -> None:
    done = subprocess.run([helm, "lint", "--strict", CHART], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_definitions_are_kept_and_upgraded(render: Render) -> None:
    definitions = [item for item in render("sojourn", {}) if item["kind"] == "CustomResourceDefinition"]
    assert len(definitions) == 3
    for item in definitions:
        assert item["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert not (CHART / "crds").exists(), "helm never upgrades what lies there"


def test_the_settings_are_what_the_operator_reads(render: Render) -> None:
    given = {"services": {"podMonitor": True, "monitoringNamespaceLabels": {"a": "b"}, "pullSecrets": ["registry"]}}
    text = only(render("sojourn", given, release="sojourn"), "ConfigMap")["data"]["defaults.yaml"]
    defaults = Defaults.model_validate(yaml.safe_load(text))
    assert defaults.pod_monitor
    assert defaults.monitoring_namespace_labels == {"a": "b"}
    assert defaults.operator_namespace_labels == {"kubernetes.io/metadata.name": "studio"}
    assert defaults.operator_pod_labels == {
        "app.kubernetes.io/name": "sojourn",
        "app.kubernetes.io/instance": "sojourn",
    }


def test_named_namespaces_need_no_cluster_wide_right(render: Render) -> None:
    objects = render("sojourn", {"operator": {"namespaces": ["a", "b"]}})
    roles = [item["metadata"]["namespace"] for item in objects if item["kind"] == "Role"]
    assert roles == ["a", "b"]
    wide = [item for item in objects if item["kind"] == "ClusterRole"]
    assert all("rbac.authorization.k8s.io/aggregate-to" in json.dumps(item["metadata"]["labels"]) for item in wide)
    assert not [item for item in objects if item["kind"] == "ClusterRoleBinding"]


def test_with_config_maps_no_secret_may_be_read(render: Render) -> None:
    for driver, readable in (("configmap", False), ("secret", True)):
        objects = render("sojourn", {"helm": {"driver": driver}})
        rules = next(
            item for item in objects if item["kind"] == "ClusterRole" and "operator" in item["metadata"]["name"]
        )
        assert any("secrets" in rule["resources"] for rule in rules["rules"]) is readable
        assert not any("*" in [*rule["resources"], *rule["verbs"]] for rule in rules["rules"])


def test_the_operator_runs_once_restricted_and_with_a_read_only_root(render: Render) -> None:
    spec = only(render("sojourn", {}), "Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_no_number_is_ever_written_as_a_float(render_text: Callable[..., str]) -> None:
    text = render_text("sojourn", {"operator": {"resyncSeconds": 1000000}})
    assert "--resync-seconds=1000000" in text
    assert not re.search(r"[0-9]e\+[0-9]", text)


def test_dashboards_and_rules_come_through_unchanged(render: Render) -> None:
    """Grafana's and Prometheus' own templates among them."""
    objects = render("sojourn", {"monitoring": {"dashboards": True, "rules": True}})
    rules = yaml.safe_load((CHART / "rules/sojourn.yaml").read_text())
    assert only(objects, "PrometheusRule")["spec"] == rules
    boards = [item for item in objects if "grafana_dashboard" in item["metadata"].get("labels", {})]
    shipped = {f"sojourn-{path.name}": path.read_text() for path in (CHART / "dashboards").glob("*.json")}
    assert {name: text.rstrip() for board in boards for name, text in board["data"].items()} == {
        name: text.rstrip() for name, text in shipped.items()
    }


def datasources(part: Any) -> Iterator[Any]:
    """Every data source that a piece of a board names, however deep."""
    if isinstance(part, dict):
        yield from (part["datasource"],) if "datasource" in part else ()
    for child in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from datasources(child)


def test_a_board_as_a_sidecar_finds_it_asks_the_data_source_that_people_choose(render: Render) -> None:
    """`${DS_PROMETHEUS}` is not found: NVIDIA/dcgm-exporter#90, grafana/grafana#10786, dragonfly-operator#256."""
    objects = render("sojourn", {"monitoring": {"dashboards": True}})
    texts = [text for item in objects if item["kind"] == "ConfigMap" for text in item.get("data", {}).values()]
    boards = [json.loads(text) for text in texts if '"templating"' in text]
    assert len(boards) == 4
    for board in boards:
        assert "__inputs" not in board
        (chosen,) = [item for item in board["templating"]["list"] if item["type"] == "datasource"]
        assert (chosen["name"], chosen["query"], chosen.get("hide", 0)) == ("datasource", "prometheus", 0)
        found = list(datasources(board))
        assert len(found) > 10
        assert [named for named in found if named != {"type": "prometheus", "uid": "${datasource}"}] == []


def test_the_runbook_is_where_the_values_say(render_text: Callable[..., str]) -> None:
    given = {"dashboards": True, "rules": True, "runbookUrl": "https://wiki.example/sojourn"}
    text = render_text("sojourn", {"monitoring": given})
    assert "https://wiki.example/sojourn#sojournheadroomshort" in text
    assert "sojourn.dev/docs" not in text
