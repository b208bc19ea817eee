"""charts/sojourn-service: what is rendered for a service, field by field, and to the byte."""

import logging
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from sojourn.operator.defaults import Defaults
from sojourn.operator.desired import Owner, Policies, Values, canonical, desired
from sojourn.operator.resources import AdaLNCacheSpec, DiffusionServiceSpec, LayerwiseOffloadSpec
from sojourn.operator.resources.schema import structural

from tests.charts.conftest import Refused, Render
from tests.kubernetes import ROOT

TABLES = "/etc/sojourn/quality"
GOLDEN = Path(__file__).parent / "golden"
OWNER = Owner("studio", "demo", "11111111-2222-3333-4444-555555555555")
DEFAULTS = Defaults(
    inference_image="localhost/sojourn-inference:dev",
    residencyd_image="localhost/sojourn-residencyd:dev",
    operator_namespace_labels={"kubernetes.io/metadata.name": "sojourn-system"},
    operator_pod_labels={"app.kubernetes.io/name": "sojourn"},
)
BUILT_IN: dict[str, Any] = {"model": {"builtIn": {}}}
TRACED: dict[str, Any] = {"endpoint": "http://collector.tracing:4318"}


def values(spec: dict[str, Any], adaln: dict[str, Any] | None = None, offload: dict[str, Any] | None = None) -> Values:
    policies = Policies(AdaLNCacheSpec.model_validate(adaln or {}), LayerwiseOffloadSpec.model_validate(offload or {}))
    return desired(OWNER, DiffusionServiceSpec.model_validate({**BUILT_IN, **spec}), policies, DEFAULTS)


def only(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (item for item in objects if item["kind"] == kind)
    return found


def container(objects: list[dict[str, Any]], name: str = "inference") -> dict[str, Any]:
    pod = only(objects, "Deployment")["spec"]["template"]["spec"]
    found: dict[str, Any] = next(item for item in pod["containers"] if item["name"] == name)
    return found


# A value other than the default for every leaf of every spec. Where the leaf needs company, the company is in both.
ALTERED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "service.model.name": ({}, {"model": {"builtIn": {}, "name": "digits"}}),
    "service.model.builtIn.path": ({}, {"model": {"builtIn": {"path": "/m"}}}),
    "service.model.persistentVolumeClaim.claimName": (
        {"model": {"persistentVolumeClaim": {"claimName": "a"}}},
        {"model": {"persistentVolumeClaim": {"claimName": "b"}}},
    ),
    "service.model.persistentVolumeClaim.subPath": (
        {"model": {"persistentVolumeClaim": {"claimName": "a"}}},
        {"model": {"persistentVolumeClaim": {"claimName": "a", "subPath": "x"}}},
    ),
    "service.model.hostPath.path": (
        {"model": {"hostPath": {"path": "/a"}}},
        {"model": {"hostPath": {"path": "/b"}}},
    ),
    "service.model.image.reference": (
        {"model": {"image": {"reference": "a"}}},
        {"model": {"image": {"reference": "b"}}},
    ),
    "service.model.image.pullPolicy": (
        {"model": {"image": {"reference": "a"}}},
        {"model": {"image": {"reference": "a", "pullPolicy": "Always"}}},
    ),
    "service.model.image.subPath": (
        {"model": {"image": {"reference": "a"}}},
        {"model": {"image": {"reference": "a", "subPath": "x"}}},
    ),
    "service.device": ({}, {"device": "CPU"}),
    "service.dtype": ({}, {"dtype": "Float32"}),
    "service.quality.fusions": ({}, {"quality": {"fusions": "Enabled"}}),
    "service.quality.stepCacheTable.configMapName": ({}, {"quality": {"stepCacheTable": {"configMapName": "errors"}}}),
    "service.quality.stepCacheTable.key": (
        {"quality": {"stepCacheTable": {"configMapName": "errors"}}},
        {"quality": {"stepCacheTable": {"configMapName": "errors", "key": "a.json"}}},
    ),
    "service.logging.level": ({}, {"logging": {"level": "Debug"}}),
    "service.logging.format": ({}, {"logging": {"format": "Text"}}),
    "service.tracing.endpoint": ({}, {"tracing": TRACED}),
    "service.tracing.protocol": ({"tracing": TRACED}, {"tracing": {**TRACED, "protocol": "GRPC"}}),
    "service.tracing.samplePercent": ({"tracing": TRACED}, {"tracing": {**TRACED, "samplePercent": 5}}),
    "service.tracing.headers.secretName": (
        {"tracing": TRACED},
        {"tracing": {**TRACED, "headers": {"secretName": "a"}}},
    ),
    "service.tracing.headers.key": (
        {"tracing": {**TRACED, "headers": {"secretName": "a"}}},
        {"tracing": {**TRACED, "headers": {"secretName": "a", "key": "b"}}},
    ),
    "service.tracing.collector.namespaceLabels": (
        {"tracing": {**TRACED, "collector": {}}},
        {"tracing": {**TRACED, "collector": {"namespaceLabels": {"team": "tracing"}}}},
    ),
    "service.tracing.collector.podLabels": (
        {"tracing": {**TRACED, "collector": {}}},
        {"tracing": {**TRACED, "collector": {"podLabels": {"app": "collector"}}}},
    ),
    "service.replicas": ({}, {"replicas": 2}),
    "service.autoscaling.minReplicas": (
        {"autoscaling": {"maxReplicas": 4}},
        {"autoscaling": {"maxReplicas": 4, "minReplicas": 2}},
    ),
    "service.autoscaling.maxReplicas": ({}, {"autoscaling": {"maxReplicas": 4}}),
    "service.autoscaling.targetWaitingRequests": (
        {"autoscaling": {"maxReplicas": 4}},
        {"autoscaling": {"maxReplicas": 4, "targetWaitingRequests": 3}},
    ),
    "service.autoscaling.targetCpuPercent": (
        {"autoscaling": {"maxReplicas": 4}},
        {"autoscaling": {"maxReplicas": 4, "targetCpuPercent": 50}},
    ),
    "service.resources.requests": ({}, {"resources": {"requests": {"cpu": "50m"}}}),
    "service.resources.limits": ({}, {"resources": {"limits": {"memory": "4Gi"}}}),
    "service.resources.gpu.count": ({"resources": {"gpu": {}}}, {"resources": {"gpu": {"count": 2}}}),
    "service.resources.gpu.resourceName": (
        {"resources": {"gpu": {}}},
        {"resources": {"gpu": {"resourceName": "amd.com/gpu"}}},
    ),
    "service.sharedHostMemory.size": ({}, {"sharedHostMemory": {"size": "2Gi"}}),
    "service.sharedHostMemory.modelCache.hostPath": ({}, {"sharedHostMemory": {"modelCache": {"hostPath": "/c"}}}),
    "service.scheduling.nodeSelector": ({}, {"scheduling": {"nodeSelector": {"a": "b"}}}),
    "service.scheduling.tolerations[].key": ({}, {"scheduling": {"tolerations": [{"key": "gpu"}]}}),
    "service.scheduling.tolerations[].operator": (
        {"scheduling": {"tolerations": [{"key": "gpu", "value": "a"}]}},
        {"scheduling": {"tolerations": [{"key": "gpu", "value": "a", "operator": "Equal"}]}},
    ),
    "service.scheduling.tolerations[].value": (
        {"scheduling": {"tolerations": [{"key": "gpu", "operator": "Equal", "value": "a"}]}},
        {"scheduling": {"tolerations": [{"key": "gpu", "operator": "Equal", "value": "b"}]}},
    ),
    "service.scheduling.tolerations[].effect": (
        {"scheduling": {"tolerations": [{}]}},
        {"scheduling": {"tolerations": [{"effect": "NoSchedule"}]}},
    ),
    "service.scheduling.runtimeClassName": ({}, {"scheduling": {"runtimeClassName": "nvidia"}}),
    "service.scheduling.priorityClassName": ({}, {"scheduling": {"priorityClassName": "high"}}),
    "service.scheduling.placement": ({}, {"scheduling": {"placement": "Pack"}}),
    "service.grpc.port": ({}, {"grpc": {"port": 50099}}),
    "service.grpc.maxWaiting": ({}, {"grpc": {"maxWaiting": 0}}),
    "service.grpc.maxMessageSize": ({}, {"grpc": {"maxMessageSize": "8Mi"}}),
    "service.grpc.stallSeconds": ({}, {"grpc": {"stallSeconds": 5}}),
    "service.grpc.tls.secretName": ({}, {"grpc": {"tls": {"secretName": "cert"}}}),
    "service.grpc.tls.clientCa": (
        {"grpc": {"tls": {"secretName": "cert"}}},
        {"grpc": {"tls": {"secretName": "cert", "clientCa": "Required"}}},
    ),
    "service.grpc.token.secretName": ({}, {"grpc": {"token": {"secretName": "tokens"}}}),
    "service.grpc.token.key": (
        {"grpc": {"token": {"secretName": "tokens"}}},
        {"grpc": {"token": {"secretName": "tokens", "key": "other"}}},
    ),
    "service.residency.intervalSeconds": ({}, {"residency": {"intervalSeconds": 5}}),
    "service.residency.deepScanMillicores": ({}, {"residency": {"deepScanMillicores": 5}}),
    "service.residency.resources.requests": ({}, {"residency": {"resources": {"requests": {"cpu": "10m"}}}}),
    "service.residency.resources.limits": ({}, {"residency": {"resources": {"limits": {"memory": "128Mi"}}}}),
    "service.network.allowFrom[].namespaceLabels": ({}, {"network": {"allowFrom": [{"namespaceLabels": {"a": "b"}}]}}),
    "service.network.allowFrom[].podLabels": ({}, {"network": {"allowFrom": [{"podLabels": {"a": "b"}}]}}),
    "service.images.inference": ({}, {"images": {"inference": "other:1"}}),
    "service.images.residencyd": ({}, {"images": {"residencyd": "other:1"}}),
    "service.images.pullPolicy": ({}, {"images": {"pullPolicy": "Always"}}),
    "service.images.pullSecrets": ({}, {"images": {"pullSecrets": ["registry"]}}),
    "service.loadTimeoutSeconds": ({}, {"loadTimeoutSeconds": 60}),
    "service.terminationGraceSeconds": ({}, {"terminationGraceSeconds": 60}),
    "service.podLabels": ({}, {"podLabels": {"team": "a"}}),
    "service.podAnnotations": ({}, {"podAnnotations": {"note": "a"}}),
    "adaln.mode": ({}, {"mode": "Enabled"}),
    "adaln.plans": ({}, {"plans": 65}),
    "adaln.width": ({}, {"width": 2}),
    "adaln.hostTierSize": ({}, {"hostTierSize": "0"}),
    "adaln.planStore.hostPath": ({}, {"planStore": {"hostPath": "/plans"}}),
    "adaln.planStore.size": ({"planStore": {"hostPath": "/p"}}, {"planStore": {"hostPath": "/p", "size": "1Gi"}}),
    "adaln.precision": ({}, {"precision": "Fp32"}),
    "adaln.families[].component": (
        {"families": [{"component": "transformer", "family": "minimax-h3"}]},
        {"families": [{"component": "transformer_ref", "family": "minimax-h3"}]},
    ),
    "adaln.families[].family": (
        {"families": [{"component": "transformer", "family": "minimax-h3"}]},
        {"families": [{"component": "transformer", "family": "qwen-image"}]},
    ),
    "offload.mode": ({}, {"mode": "Layerwise"}),
    "offload.residentLayers": ({}, {"residentLayers": 0}),
    "offload.prefetchLayers": ({}, {"prefetchLayers": 0}),
    "offload.residentPolicy": ({}, {"residentPolicy": "Strided"}),
    "offload.pinning": ({}, {"pinning": "Disabled"}),
    "offload.coldPageAdvice": ({}, {"coldPageAdvice": "Disabled"}),
    "offload.nextStageHeadroom": ({}, {"nextStageHeadroom": "12Gi"}),
    "offload.deviceMemory": ({}, {"deviceMemory": "24Gi"}),
    "offload.hostMemory": ({}, {"hostMemory": "64Gi"}),
    "offload.components[].name": ({}, {"components": [{"name": "text_encoder"}]}),
    "offload.components[].mode": ({"components": [{"name": "a"}]}, {"components": [{"name": "a", "mode": "Resident"}]}),
    "offload.components[].residentLayers": (
        {"components": [{"name": "a"}]},
        {"components": [{"name": "a", "residentLayers": 2}]},
    ),
    "offload.components[].prefetchLayers": (
        {"components": [{"name": "a"}]},
        {"components": [{"name": "a", "prefetchLayers": 2}]},
    ),
    "offload.components[].residentPolicy": (
        {"components": [{"name": "a"}]},
        {"components": [{"name": "a", "residentPolicy": "Strided"}]},
    ),
}
# What has its effect in the operator and not in the release; each is tested in tests/operator.
ELSEWHERE = {
    "service.workflows",
    "service.model.family",
    "service.adaLNCacheRef.name",
    "service.layerwiseOffloadRef.name",
    "service.suspend",
}
# Said to be without effect in its own description.
WITHOUT_EFFECT = {"service.residency.resources.gpu.count", "service.residency.resources.gpu.resourceName"}
SPECS = {"service": DiffusionServiceSpec, "adaln": AdaLNCacheSpec, "offload": LayerwiseOffloadSpec}


def leaves(schema: dict[str, Any], path: str) -> Iterator[str]:
    if "properties" in schema:
        for name, child in schema["properties"].items():
            yield from leaves(child, f"{path}.{name}")
    elif "properties" in schema.get("items", {}):
        yield from leaves(schema["items"], f"{path}[]")
    else:
        yield path


def test_every_field_of_every_spec_is_altered_below() -> None:
    """A field that the hash leaves out is an edit that is ignored: ray-project/kuberay#2331."""
    fields = {leaf for part, model in SPECS.items() for leaf in leaves(structural(model), part)}
    assert fields - ELSEWHERE - WITHOUT_EFFECT == set(ALTERED)


@pytest.mark.parametrize("field", list(ALTERED))
def test_every_field_reaches_the_manifest(render_text: Callable[..., str], field: str) -> None:
    part = field.split(".")[0]
    before, after = ({"spec": {}, part: given} if part != "service" else {"spec": given} for given in ALTERED[field])
    assert render_text("sojourn-service", values(**before)) != render_text("sojourn-service", values(**after))


EVERYTHING: dict[str, Any] = {
    "model": {"persistentVolumeClaim": {"claimName": "weights", "subPath": "h3"}, "name": "h3"},
    "device": "CUDA",
    "autoscaling": {"minReplicas": 2, "maxReplicas": 4, "targetWaitingRequests": 3},
    "resources": {"requests": {"cpu": 2}, "limits": {"memory": 2147483648}, "gpu": {"count": 2}},
    "sharedHostMemory": {"size": 1000000, "modelCache": {"hostPath": "/var/lib/sojourn/models"}},
    "scheduling": {
        "nodeSelector": {"nvidia.com/gpu.present": "true"},
        "tolerations": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}],
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
        "placement": "Pack",
    },
    "grpc": {
        "maxMessageSize": 2147483648,
        "tls": {"secretName": "cert", "clientCa": "Required"},
        "token": {"secretName": "tokens"},
    },
    "residency": {"resources": {"limits": {"memory": "128Mi"}}},
    "network": {"allowFrom": [{"namespaceLabels": {"team": "a"}, "podLabels": {"app": "b"}}]},
    "images": {"pullSecrets": ["registry"]},
    "dtype": "Float32",
    "quality": {"fusions": "Enabled", "stepCacheTable": {"configMapName": "errors"}},
    "logging": {"level": "Debug", "format": "Text"},
    "tracing": {
        **TRACED,
        "samplePercent": 10,
        "headers": {"secretName": "collector"},
        "collector": {"namespaceLabels": {"team": "tracing"}},
    },
    "podLabels": {"team": "a"},
    "podAnnotations": {"note": "y"},
}
CASES: dict[str, Values] = {
    "plain": values({}),
    "everything": values(
        EVERYTHING,
        {
            "mode": "Enabled",
            "hostTierSize": "8Gi",
            "planStore": {"hostPath": "/var/lib/sojourn/plans"},
            "families": [{"component": "transformer", "family": "minimax-h3"}],
        },
        {
            "mode": "Layerwise",
            "residentLayers": 0,
            "prefetchLayers": 2,
            "nextStageHeadroom": "12Gi",
            "deviceMemory": "24Gi",
            "hostMemory": 2147483648,
            "components": [{"name": "text_encoder", "mode": "Component"}],
        },
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_the_manifest_is_the_golden_one(render_text: Callable[..., str], case: str) -> None:
    """SOJOURN_WRITE_GOLDEN=1 writes it anew; read the difference before committing it."""
    text = render_text("sojourn-service", CASES[case])
    path = GOLDEN / f"service-{case}.yaml"
    if os.environ.get("SOJOURN_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_no_number_is_ever_written_as_a_float(render_text: Callable[..., str]) -> None:
    """helm turns 10485760 into 1.048576e+07: helm/helm#11130, #6867."""
    text = render_text("sojourn-service", CASES["everything"])
    assert not re.search(r"[0-9](\.[0-9]+)?e\+[0-9]", text)
    assert "--max-message-bytes=2147483648" in text
    assert 'sizeLimit: "1000000"' in text
    assert 'memory: "2147483648"' in text


def test_big_numbers_given_by_hand_stay_whole(render_text: Callable[..., str]) -> None:
    for given in (("--set", "grpc.maxMessageBytes=1000000"), ("--set-json", "grpc.maxMessageBytes=1000000")):
        assert "--max-message-bytes=1000000\n" in render_text("sojourn-service", CASES["plain"], *given)


@pytest.mark.parametrize(
    "bad",
    [
        {"shmSize": "64 MB"},
        {"shmSize": 64},
        {"replicas": -1},
        {"replicas": 1.5},
        {"unknown": 1},
        {"grpc": {"port": 80}},
        {"images": {"inference": "a"}},
        {"adaln": {"mode": "sometimes"}},
        {"adaln": {"families": [{"component": "transformer"}]}},
        {"dtype": "int4"},
        {"quality": {"fusions": "fast"}},
        {"logging": {"level": "loud"}},
        {"logging": {"format": "xml"}},
        {"tracing": {"endpoint": "http://collector"}},
        {"tracing": {"protocol": "udp"}},
        {"tracing": {"samplePercent": 101}},
        {"offload": {"hostMemoryBytes": -1}},
        {"offload": {"residentLayers": "100%"}},
        {"offload": {"prefetchLayers": "2"}},
        {"model": {"source": "ftp"}},
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused_by_the_schema(render: Render, bad: dict[str, Any]) -> None:
    images = {"images": {"inference": "a", "residencyd": "b"}}
    given = {**images, **bad} if "images" not in bad else bad
    with pytest.raises(Refused, match=r"values don't meet|is required"):
        render("sojourn-service", given)


def test_helm_lint_finds_nothing(helm: Path) -> None:
    command = [helm, "lint", "--strict", ROOT / "charts/sojourn-service", "-f", "-"]
    done = subprocess.run(command, input=canonical(CASES["plain"]), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", list(CASES))
def test_every_object_has_the_owner_and_the_labels(render: Render, case: str) -> None:
    for item in render("sojourn-service", CASES[case]):
        (owner,) = item["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("DiffusionService", OWNER.uid, True)
        labels = item["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == item["metadata"]["name"] == "dsvc-demo"
        assert labels["app.kubernetes.io/part-of"] == "sojourn"


@pytest.mark.parametrize("case", list(CASES))
def test_the_chart_version_is_nowhere_in_the_manifest(render_text: Callable[..., str], case: str) -> None:
    """Else an upgrade of the operator would restart every pod."""
    version = yaml.safe_load((ROOT / "charts/sojourn-service/Chart.yaml").read_text())["version"]
    assert version not in render_text("sojourn-service", CASES[case])


def test_templates_ask_the_cluster_nothing() -> None:
    for path in (ROOT / "charts/sojourn-service/templates").rglob("*"):
        if path.is_file():
            assert not re.search(r"\.Capabilities|\blookup\b|\brand|genCA|\bnow\b", path.read_text()), path


def test_pods_meet_the_restricted_standard(render: Render) -> None:
    pod = only(render("sojourn-service", CASES["plain"]), "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert {volume.keys() - {"name"} == {"emptyDir"} for volume in pod["volumes"]} == {True}
    for item in pod["containers"]:
        assert item["securityContext"]["allowPrivilegeEscalation"] is False
        assert item["securityContext"]["readOnlyRootFilesystem"] is True
        assert item["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_startup_probe_covers_the_load_and_liveness_never_asks_the_model(render: Render) -> None:
    """Killed while loading, or waited for in vain: kserve/kserve#5062, tenstorrent/tt-inference-server#4870."""
    for seconds in (2, 1200, 1801):
        probes = container(render("sojourn-service", values({"loadTimeoutSeconds": seconds})))
        startup = probes["startupProbe"]
        assert seconds <= startup["periodSeconds"] * startup["failureThreshold"] <= seconds + 2
        assert startup["grpc"] == probes["readinessProbe"]["grpc"] == {"port": 50051}
        assert "grpc" not in probes["livenessProbe"]
        assert "initialDelaySeconds" not in startup


def test_shared_memory_is_mounted_and_sized_by_default(render: Render) -> None:
    """64 MiB, and no way to change it: vllm-project/vllm#37982, production-stack#899, #44."""
    pod = only(render("sojourn-service", CASES["plain"]), "Deployment")["spec"]["template"]["spec"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in pod["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]


@pytest.mark.parametrize(
    ("limit", "size"), [(None, "1Gi"), ("4Gi", "1Gi"), ("8G", "1Gi"), ("2Gi", "536870912"), ("100Mi", "26214400")]
)
def test_the_default_of_shared_memory_leaves_room_under_any_limit(render: Render, limit: str | None, size: str) -> None:
    limits = {"resources": {"limits": {"memory": limit}}} if limit else {}
    pod = only(render("sojourn-service", values(limits)), "Deployment")["spec"]["template"]["spec"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}} in pod["volumes"]
    given = only(render("sojourn-service", values({**limits, "sharedHostMemory": {"size": "64Mi"}})), "Deployment")
    volumes = given["spec"]["template"]["spec"]["volumes"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}} in volumes


def test_with_autoscaling_the_deployment_names_no_replicas(render: Render) -> None:
    objects = render("sojourn-service", CASES["everything"])
    assert "replicas" not in only(objects, "Deployment")["spec"]
    assert only(objects, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"] == "dsvc-demo"


def test_an_empty_list_of_peers_lets_nobody_in(render: Render) -> None:
    policy = only(render("sojourn-service", values({"network": {"allowFrom": []}})), "NetworkPolicy")
    callers = [rule["from"] for rule in policy["spec"]["ingress"] if {"port": "grpc"} in rule["ports"]]
    assert callers == [
        [
            {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "sojourn-system"}},
                "podSelector": {"matchLabels": {"app.kubernetes.io/name": "sojourn"}},
            }
        ]
    ]


def test_values_are_equal_however_the_spec_was_ordered() -> None:
    one = {"podLabels": {"a": "1", "b": "2"}, "images": {"pullSecrets": ["x", "a"]}}
    other = {"images": {"pullSecrets": ["a", "x"]}, "podLabels": {"b": "2", "a": "1"}}
    assert canonical(values(one)) == canonical(values(other))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[list[str]], tuple[Any, ...]]:
    """What `sojourn serve` would start with these arguments: the server's configuration and the model's options.

    A table of measured errors has to be there; the folder that a pod would mount is one of the test's own.
    """
    import importlib

    from sojourn.inference.cli import app
    from typer.testing import CliRunner

    command = importlib.import_module("sojourn.inference.cli.serve")

    def call(arguments: list[str]) -> tuple[Any, ...]:
        started: list[Any] = []

        def lazily_loaded(model: Path, **options: Any) -> Callable[[], None]:
            started.append(options)
            return lambda: None

        monkeypatch.setattr(command, "lazily_loaded", lazily_loaded)
        monkeypatch.setattr(command, "run", lambda config, load, **rest: started.append(config) or 0)
        monkeypatch.setattr(command.logs, "configure", lambda **rest: started.append(rest))
        tables = [path for argument in arguments if (path := argument.partition(f"{TABLES}/")[2])]
        for name in tables:
            (tmp_path / name).write_text("[]")
        done = CliRunner().invoke(app, [argument.replace(TABLES, str(tmp_path)) for argument in arguments])
        assert done.exit_code == 0, (arguments, done.output, done.exception)
        printing, options, config = started
        return config, {**options, "printing": printing}

    return call


@pytest.mark.parametrize("field", list(ALTERED))
def test_serve_takes_whatever_any_field_is_rendered_to(
    render: Render, served: Callable[[list[str]], tuple[Any, ...]], field: str
) -> None:
    part, given = field.split(".")[0], ALTERED[field][1]
    rendered = render(
        "sojourn-service", values(**({"spec": {}, part: given} if part != "service" else {"spec": given}))
    )
    served(container(rendered)["args"])


def test_shares_of_layers_are_shares_and_numbers_are_numbers(
    render: Render, served: Callable[[list[str]], tuple[Any, ...]]
) -> None:
    """100% would be read as one layer; it is mode Resident."""
    policy = {
        "residentLayers": "50%", "prefetchLayers": "7%",
        "components": [{"name": "vae", "residentLayers": "99%", "prefetchLayers": 1, "residentPolicy": "Strided"}],
    }  # fmt: skip
    _, options = served(container(render("sojourn-service", values({}, None, policy)))["args"])
    default, vae = (options["offload"].settings.of(name) for name in ("transformer", "vae"))
    assert (default.resident, default.prefetch, default.policy) == (0.5, 0.07, "leading")
    assert (vae.resident, vae.prefetch, vae.policy) == (0.99, 1, "strided")


@pytest.mark.parametrize("mode", ["Auto", "Resident", "Component", "Layerwise"])
def test_serve_takes_every_mode(render: Render, served: Callable[[list[str]], tuple[Any, ...]], mode: str) -> None:
    offload = {"mode": mode, "components": [{"name": "vae", "mode": mode}]}
    _, options = served(container(render("sojourn-service", values({}, None, offload)))["args"])
    settings = options["offload"].settings
    assert settings.default.mode == settings.of("vae").mode == mode.lower()


def test_serve_understands_every_field_of_the_policy_as_it_is_meant(
    render: Render, served: Callable[[list[str]], tuple[Any, ...]]
) -> None:
    from sojourn.inference.offload.settings import Mode, OffloadSettings, ResidentPolicy

    policy = {
        "mode": "Layerwise", "residentLayers": 0, "prefetchLayers": 2, "residentPolicy": "Strided",
        "pinning": "Disabled", "coldPageAdvice": "Disabled", "nextStageHeadroom": "12Gi",
        "deviceMemory": "24Gi", "hostMemory": "64G",
        "components": [
            {"name": "text_encoder", "mode": "Component"},
            {"name": "transformer", "mode": "Auto", "residentLayers": 7, "prefetchLayers": 3},
        ],
    }  # fmt: skip
    assert {field.split("[")[0] for field in policy} == {
        field.split(".")[1].split("[")[0] for field in ALTERED if field.startswith("offload.")
    }
    _, options = served(container(render("sojourn-service", values({}, None, policy)))["args"])
    placement, strided = options["offload"], ResidentPolicy.STRIDED
    assert placement.settings.of("vae") == OffloadSettings(mode=Mode.LAYERWISE, resident=0, prefetch=2, policy=strided)
    assert placement.settings.of("text_encoder").mode is Mode.COMPONENT
    assert placement.settings.of("transformer") == OffloadSettings(resident=7, prefetch=3, policy=strided)
    assert (placement.pinning, placement.cold_advice) == (False, False)
    assert placement.next_stage_headroom_bytes == 12 * 2**30
    assert (placement.device_memory_bytes, placement.host_memory_bytes) == (24 * 2**30, 64 * 10**9)


def test_serve_understands_every_field_of_the_plan_cache_as_it_is_meant(
    render: Render, served: Callable[[list[str]], tuple[Any, ...]]
) -> None:
    from sojourn.inference.adaln.settings import Mode, PlanCacheSettings, Precision

    policy = {
        "mode": "Enabled", "plans": 65, "width": 2, "hostTierSize": "1Gi", "precision": "Fp32",
        "planStore": {"hostPath": "/plans", "size": "2Gi"},
        "families": [
            {"component": "transformer_ref", "family": "minimax-h3"},
            {"component": "transformer", "family": "minimax-h3"},
        ],
    }  # fmt: skip
    assert {field.split("[")[0] for field in policy} == {
        field.split(".")[1].split("[")[0] for field in ALTERED if field.startswith("adaln.")
    }
    _, options = served(container(render("sojourn-service", values({}, policy)))["args"])
    assert options["plan_settings"] == PlanCacheSettings(
        mode=Mode.ON, plans=65, width=2, host_bytes=2**30, precision=Precision.FP32,
        store=Path("/var/lib/sojourn/plans"), store_bytes=2 * 2**30,
        families={"transformer": "minimax-h3", "transformer_ref": "minimax-h3"},
    )  # fmt: skip
    _, options = served(container(render("sojourn-service", values({})))["args"])
    assert options["plan_settings"] == PlanCacheSettings(), "what nobody has said is the engine's own default"


def test_every_family_of_the_engine_may_be_named_in_a_policy_and_no_other() -> None:
    from sojourn.inference.families.projections import TRANSFORMERS
    from sojourn.operator.resources.adaln_cache import FamilyName

    assert list(get_args(FamilyName)) == list(TRANSFORMERS)


def test_serve_understands_dtype_quality_and_logging_as_they_are_meant(
    render: Render, served: Callable[[list[str]], tuple[Any, ...]], tmp_path: Path
) -> None:
    from sojourn.inference.quality.settings import Fusions, QualitySettings

    spec = {
        "dtype": "Float32",
        "quality": {"fusions": "Disabled", "stepCacheTable": {"configMapName": "errors", "key": "a.json"}},
        "logging": {"level": "Warning", "format": "Text"},
    }
    objects = render("sojourn-service", values(spec))
    _, options = served(container(objects)["args"])
    assert options["dtype"] == "float32"
    assert options["quality_settings"] == QualitySettings(fusions=Fusions.OFF, table=tmp_path / "a.json")
    assert (options["printing"]["human"], options["printing"]["print_level"]) == (True, logging.WARNING)
    pod = only(objects, "Deployment")["spec"]["template"]["spec"]
    assert {"name": "quality", "mountPath": TABLES, "readOnly": True} in container(objects)["volumeMounts"]
    assert {"name": "quality", "configMap": {"name": "errors"}} in pod["volumes"]


def test_traces_go_where_the_policy_says_and_the_network_lets_them(render: Render) -> None:
    from sojourn.inference.tracing import wanted

    tracing = {
        **TRACED,
        "samplePercent": 5,
        "headers": {"secretName": "a"},
        "collector": {"podLabels": {"app": "otel"}},
    }
    objects = render("sojourn-service", values({"tracing": tracing}))
    env = {item["name"]: item.get("value") for item in container(objects)["env"]}
    assert wanted({name: value for name, value in env.items() if value})
    assert env["OTEL_EXPORTER_OTLP_ENDPOINT"] == TRACED["endpoint"]
    assert (env["OTEL_EXPORTER_OTLP_PROTOCOL"], env["OTEL_TRACES_SAMPLER_ARG"]) == ("http/protobuf", "0.05")
    assert env["OTEL_RESOURCE_ATTRIBUTES"] == "k8s.namespace.name=studio,k8s.pod.name=$(POD_NAME)"
    names = list(env)
    assert names.index("POD_NAME") < names.index("OTEL_RESOURCE_ATTRIBUTES"), "a reference has to come after its name"
    dns, collector = only(objects, "NetworkPolicy")["spec"]["egress"]
    assert {port["protocol"] for port in dns["ports"]} == {"UDP", "TCP"}
    assert collector["ports"] == [{"port": 4318, "protocol": "TCP"}]
    assert collector["to"] == [{"podSelector": {"matchLabels": {"app": "otel"}}}]


@pytest.mark.parametrize(
    "endpoint", ["http://a:4318", "https://a.b:443/otlp", "http://[fd00::1]:4317/", "http://10.0.0.1:55"]
)
def test_the_port_of_any_endpoint_is_opened(render: Render, endpoint: str) -> None:
    from urllib.parse import urlsplit

    objects = render("sojourn-service", values({"tracing": {"endpoint": endpoint}}))
    *_, collector = only(objects, "NetworkPolicy")["spec"]["egress"]
    assert collector == {"ports": [{"port": urlsplit(endpoint).port, "protocol": "TCP"}]}


def test_without_traces_the_pods_call_nobody_and_know_no_collector(render: Render) -> None:
    objects = render("sojourn-service", CASES["plain"])
    assert only(objects, "NetworkPolicy")["spec"]["egress"] == []
    assert [item["name"] for item in container(objects)["env"]] == ["SOJOURN_COMPONENT_MAP"]


# Options of the processes that no field sets, and why.
LEFT_OUT = {
    "inference": {
        "--failed-grace-seconds": "its default outlasts three looks of the operator, which asks why",
        "--help": "prints",
    },
    "residencyd": {
        "--proc": "a pod has its own",
        "--cgroup-root": "a pod has its own",
        "--host-pids": "for a process namespace of the host; the containers of a pod share one",
        "--grace-seconds": "its calls take milliseconds",
        "--help": "prints",
    },
}


@pytest.mark.parametrize("process", list(LEFT_OUT))
def test_every_option_of_a_process_can_be_rendered_or_is_left_out_for_a_reason(render: Render, process: str) -> None:
    known = _options(process)
    rendered: set[str] = set()
    for field, (_, given) in ALTERED.items():
        part = field.split(".")[0]
        case = values(**({"spec": {}, part: given} if part != "service" else {"spec": given}))
        found = container(render("sojourn-service", case), process)
        variables = {item["name"] for item in found.get("env", [])}
        rendered |= {argument.split("=")[0] for argument in found["args"] if argument.startswith("--")}
        rendered |= {option for option, variable in known.items() if variable in variables}
    assert rendered <= set(known)
    assert set(known) - rendered == set(LEFT_OUT[process])


def _options(process: str) -> dict[str, str | None]:
    """The options of a process's `serve`, each with the variable that may stand for it."""
    from sojourn.inference.cli import app as inference
    from sojourn.residencyd.cli import app as residencyd
    from typer.main import get_command

    command = get_command({"inference": inference, "residencyd": residencyd}[process]).commands["serve"]  # type: ignore[attr-defined]
    found = {parameter.opts[0]: parameter.envvar for parameter in command.params}
    return {**found, "--help": None}
