"""The custom resources: refused and defaulted by the real API server as the models say."""

from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError
from sojourn.operator.errors import ApiError
from sojourn.operator.kube.client import ADALN_CACHES, DIFFUSION_SERVICES, LAYERWISE_OFFLOADS, Kube, Resource
from sojourn.operator.resources import AdaLNCacheSpec, DiffusionServiceSpec, LayerwiseOffloadSpec
from sojourn.operator.resources.base import quantity_value
from sojourn.operator.resources.definitions import KINDS, definition
from sojourn.operator.resources.status import DiffusionServiceStatus
from sojourn.v1.inference_pb2 import Workflow

from tests.operator.cluster import custom, service
from tools import crds

RESOURCES = {"AdaLNCache": ADALN_CACHES, "LayerwiseOffload": LAYERWISE_OFFLOADS, "DiffusionService": DIFFUSION_SERVICES}
SPECS: dict[str, type[BaseModel]] = {
    "AdaLNCache": AdaLNCacheSpec,
    "LayerwiseOffload": LayerwiseOffloadSpec,
    "DiffusionService": DiffusionServiceSpec,
}
BUILT_IN = {"model": {"builtIn": {}}}
TRACED = {"endpoint": "http://collector:4318"}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("AdaLNCache", {"mode": "On"}, "spec.mode"),
    ("AdaLNCache", {"plans": 0}, "spec.plans"),
    ("AdaLNCache", {"plans": 65537}, "spec.plans"),
    ("AdaLNCache", {"width": 0}, "spec.width"),
    ("AdaLNCache", {"hostTierSize": "8 GB"}, "spec.hostTierSize"),
    ("AdaLNCache", {"hostTierSize": "-1"}, "spec.hostTierSize"),
    ("AdaLNCache", {"planStore": {}}, "spec.planStore.hostPath"),
    ("AdaLNCache", {"planStore": {"hostPath": "relative"}}, "spec.planStore.hostPath"),
    ("AdaLNCache", {"planStore": {"hostPath": "/a", "size": "much"}}, "spec.planStore.size"),
    ("AdaLNCache", {"mode": "Disabled", "planStore": {"hostPath": "/a"}}, "planStore has no effect"),
    ("AdaLNCache", {"precision": "bf16"}, "spec.precision"),
    ("AdaLNCache", {"families": [{"component": "transformer", "family": "h4"}]}, "spec.families[0].family"),
    ("AdaLNCache", {"families": [{"component": "", "family": "flux"}]}, "spec.families[0].component"),
    ("AdaLNCache", {"families": [{"component": "a", "family": "flux"}] * 2}, "Duplicate value"),
    ("AdaLNCache", {"families": [{"family": "flux"}]}, "spec.families[0].component"),
    ("AdaLNCache", {"families": [{"component": "transformer"}]}, "spec.families[0].family"),
    ("AdaLNCache", {"mode": "Disabled", "families": [{"component": "a", "family": "flux"}]}, "families has no effect"),
    ("LayerwiseOffload", {"mode": "sometimes"}, "spec.mode"),
    ("LayerwiseOffload", {"residentLayers": -1}, "spec.residentLayers"),
    ("LayerwiseOffload", {"residentLayers": 1001}, "spec.residentLayers"),
    ("LayerwiseOffload", {"residentLayers": "100%"}, "spec.residentLayers"),
    ("LayerwiseOffload", {"residentLayers": "0%"}, "spec.residentLayers"),
    ("LayerwiseOffload", {"prefetchLayers": 65}, "spec.prefetchLayers"),
    ("LayerwiseOffload", {"prefetchLayers": "half"}, "spec.prefetchLayers"),
    ("LayerwiseOffload", {"components": [{"name": "a", "residentPolicy": "Last"}]}, "residentPolicy"),
    ("LayerwiseOffload", {"mode": "Resident", "residentLayers": 3}, "mode Auto or Layerwise only"),
    ("LayerwiseOffload", {"mode": "Component", "prefetchLayers": 3}, "mode Auto or Layerwise only"),
    ("LayerwiseOffload", {"residentPolicy": "Last"}, "spec.residentPolicy"),
    ("LayerwiseOffload", {"pinning": True}, "spec.pinning"),
    ("LayerwiseOffload", {"coldPageAdvice": "Cold"}, "spec.coldPageAdvice"),
    ("LayerwiseOffload", {"nextStageHeadroom": "lots"}, "spec.nextStageHeadroom"),
    ("LayerwiseOffload", {"deviceMemory": "24 GB"}, "spec.deviceMemory"),
    ("LayerwiseOffload", {"hostMemory": "-1"}, "spec.hostMemory"),
    ("LayerwiseOffload", {"components": [{"mode": "Auto"}]}, "spec.components[0].name"),
    ("LayerwiseOffload", {"components": [{"name": "a"}, {"name": "a"}]}, "Duplicate value"),
    ("LayerwiseOffload", {"components": [{"name": "a", "mode": "x"}]}, "spec.components[0].mode"),
    ("LayerwiseOffload", {"components": [{"name": "a", "residentLayers": -1}]}, "residentLayers"),
    ("LayerwiseOffload", {"components": [{"name": "a", "prefetchLayers": 99}]}, "prefetchLayers"),
    ("LayerwiseOffload", {"components": [{"name": "a", "mode": "Resident", "residentLayers": 1}]}, "Layerwise only"),
    ("DiffusionService", {}, "spec.model"),
    ("DiffusionService", {"model": {}}, "give exactly one of"),
    ("DiffusionService", {"model": {"builtIn": {}, "hostPath": {"path": "/m"}}}, "give exactly one of"),
    ("DiffusionService", {"model": {"builtIn": {"path": "m"}}}, "spec.model.builtIn.path"),
    ("DiffusionService", {"model": {"name": "", "builtIn": {}}}, "spec.model.name"),
    ("DiffusionService", {"model": {"family": "", "builtIn": {}}}, "spec.model.family"),
    ("DiffusionService", {**BUILT_IN, "workflows": ["T2V"]}, "spec.workflows"),
    ("DiffusionService", {**BUILT_IN, "workflows": ["T2VA", "T2VA"]}, "Duplicate value"),
    ("DiffusionService", {"model": {"hostPath": {"path": "m"}}}, "spec.model.hostPath.path"),
    ("DiffusionService", {"model": {"persistentVolumeClaim": {"claimName": "A b"}}}, "claimName"),
    ("DiffusionService", {"model": {"persistentVolumeClaim": {"claimName": "a", "subPath": "/x"}}}, "subPath"),
    ("DiffusionService", {"model": {"image": {"reference": ""}}}, "spec.model.image.reference"),
    ("DiffusionService", {"model": {"image": {"reference": "a", "pullPolicy": "No"}}}, "pullPolicy"),
    ("DiffusionService", {"model": {"image": {"reference": "a", "subPath": "/x"}}}, "subPath"),
    ("DiffusionService", {**BUILT_IN, "device": "tpu"}, "spec.device"),
    ("DiffusionService", {**BUILT_IN, "dtype": "Int4"}, "spec.dtype"),
    ("DiffusionService", {**BUILT_IN, "quality": {"fusions": "Fast"}}, "spec.quality.fusions"),
    ("DiffusionService", {**BUILT_IN, "quality": {"stepCacheTable": {}}}, "stepCacheTable.configMapName"),
    ("DiffusionService", {**BUILT_IN, "quality": {"stepCacheTable": {"configMapName": "a", "key": "a/b"}}}, "key"),
    ("DiffusionService", {**BUILT_IN, "logging": {"level": "Loud"}}, "spec.logging.level"),
    ("DiffusionService", {**BUILT_IN, "logging": {"format": "XML"}}, "spec.logging.format"),
    ("DiffusionService", {**BUILT_IN, "tracing": {}}, "spec.tracing.endpoint"),
    ("DiffusionService", {**BUILT_IN, "tracing": {"endpoint": "http://collector"}}, "spec.tracing.endpoint"),
    ("DiffusionService", {**BUILT_IN, "tracing": {"endpoint": "collector:4317"}}, "spec.tracing.endpoint"),
    ("DiffusionService", {**BUILT_IN, "tracing": {**TRACED, "protocol": "UDP"}}, "spec.tracing.protocol"),
    ("DiffusionService", {**BUILT_IN, "tracing": {**TRACED, "samplePercent": 101}}, "spec.tracing.samplePercent"),
    ("DiffusionService", {**BUILT_IN, "tracing": {**TRACED, "headers": {}}}, "spec.tracing.headers.secretName"),
    ("DiffusionService", {**BUILT_IN, "tracing": {**TRACED, "headers": {"secretName": "a", "key": "/"}}}, "key"),
    ("DiffusionService", {**BUILT_IN, "tracing": {**TRACED, "collector": {"podLabels": {"a": 1}}}}, "podLabels"),
    ("DiffusionService", {**BUILT_IN, "replicas": -1}, "spec.replicas"),
    ("DiffusionService", {**BUILT_IN, "replicas": 2, "autoscaling": {"maxReplicas": 3}}, "no effect with autoscaling"),
    ("DiffusionService", {**BUILT_IN, "autoscaling": {"minReplicas": 3, "maxReplicas": 2}}, "not be more than"),
    ("DiffusionService", {**BUILT_IN, "autoscaling": {}}, "spec.autoscaling.maxReplicas"),
    ("DiffusionService", {**BUILT_IN, "autoscaling": {"maxReplicas": 2, "targetCpuPercent": 0}}, "targetCpuPercent"),
    ("DiffusionService", {**BUILT_IN, "autoscaling": {"maxReplicas": 2, "targetWaitingRequests": 0}}, "targetWaiting"),
    ("DiffusionService", {**BUILT_IN, "adaLNCacheRef": {"name": ""}}, "spec.adaLNCacheRef.name"),
    ("DiffusionService", {**BUILT_IN, "layerwiseOffloadRef": {}}, "spec.layerwiseOffloadRef.name"),
    ("DiffusionService", {**BUILT_IN, "resources": {"limits": {"memory": "1 GB"}}}, "spec.resources.limits.memory"),
    ("DiffusionService", {**BUILT_IN, "resources": {"requests": {"cpu": "some"}}}, "spec.resources.requests.cpu"),
    ("DiffusionService", {**BUILT_IN, "resources": {"gpu": {"count": 0}}}, "spec.resources.gpu.count"),
    ("DiffusionService", {**BUILT_IN, "resources": {"gpu": {"resourceName": "gpu"}}}, "resourceName"),
    ("DiffusionService", {**BUILT_IN, "sharedHostMemory": {"size": "2Gi"}, "resources": {"limits": {"memory": "2Gi"}}},
     "must be less"),
    ("DiffusionService", {**BUILT_IN, "sharedHostMemory": {"modelCache": {"hostPath": "x"}}}, "modelCache.hostPath"),
    ("DiffusionService", {**BUILT_IN, "scheduling": {"tolerations": [{"effect": "Never"}]}}, "effect"),
    ("DiffusionService", {**BUILT_IN, "scheduling": {"tolerations": [{"operator": "Is"}]}}, "operator"),
    ("DiffusionService", {**BUILT_IN, "scheduling": {"placement": "Here"}}, "spec.scheduling.placement"),
    ("DiffusionService", {**BUILT_IN, "scheduling": {"runtimeClassName": "A B"}}, "runtimeClassName"),
    ("DiffusionService", {**BUILT_IN, "scheduling": {"priorityClassName": "A B"}}, "priorityClassName"),
    ("DiffusionService", {**BUILT_IN, "grpc": {"port": 80}}, "spec.grpc.port"),
    ("DiffusionService", {**BUILT_IN, "grpc": {"maxWaiting": -1}}, "spec.grpc.maxWaiting"),
    ("DiffusionService", {**BUILT_IN, "grpc": {"maxMessageSize": "x"}}, "spec.grpc.maxMessageSize"),
    ("DiffusionService", {**BUILT_IN, "grpc": {"stallSeconds": 0}}, "spec.grpc.stallSeconds"),
    ("DiffusionService", {**BUILT_IN, "grpc": {"tls": {}}}, "spec.grpc.tls.secretName"),
    ("DiffusionService", {**BUILT_IN, "grpc": {"tls": {"secretName": "a", "clientCa": "Maybe"}}}, "clientCa"),
    ("DiffusionService", {**BUILT_IN, "grpc": {"token": {"secretName": "a", "key": "a/b"}}}, "spec.grpc.token.key"),
    ("DiffusionService", {**BUILT_IN, "residency": {"intervalSeconds": 0}}, "spec.residency.intervalSeconds"),
    ("DiffusionService", {**BUILT_IN, "residency": {"deepScanMillicores": 0}}, "deepScanMillicores"),
    ("DiffusionService", {**BUILT_IN, "network": {"allowFrom": [{"namespaceLabels": {"a": 1}}]}}, "namespaceLabels"),
    ("DiffusionService", {**BUILT_IN, "images": {"inference": ""}}, "spec.images.inference"),
    ("DiffusionService", {**BUILT_IN, "images": {"residencyd": ""}}, "spec.images.residencyd"),
    ("DiffusionService", {**BUILT_IN, "images": {"pullPolicy": "Now"}}, "spec.images.pullPolicy"),
    ("DiffusionService", {**BUILT_IN, "images": {"pullSecrets": ["A B"]}}, "spec.images.pullSecrets"),
    ("DiffusionService", {**BUILT_IN, "loadTimeoutSeconds": 0}, "spec.loadTimeoutSeconds"),
    ("DiffusionService", {**BUILT_IN, "terminationGraceSeconds": 0}, "spec.terminationGraceSeconds"),
    ("DiffusionService", {**BUILT_IN, "podLabels": {"a": 1}}, "spec.podLabels.a"),
    ("DiffusionService", {**BUILT_IN, "podAnnotations": {"a": 1}}, "spec.podAnnotations.a"),
    ("DiffusionService", {**BUILT_IN, "suspend": "later"}, "spec.suspend"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "spec", "said"), REFUSED, ids=lambda value: str(value)[:70])
async def test_a_bad_value_is_refused_and_its_field_named(
    kube: Kube, kind: str, spec: dict[str, Any], said: str
) -> None:
    with pytest.raises(ApiError, match=r"(?s).*") as refused:
        await kube.create(RESOURCES[kind], custom(kind, "default", "bad", **spec))
    assert refused.value.status in (400, 422)
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["a" * 49, "dotted.name", "1st"])
async def test_a_name_that_is_no_dns_label_of_48_characters_is_refused(kube: Kube, name: str) -> None:
    with pytest.raises(ApiError, match="DNS label of at most 48"):
        await kube.create(DIFFUSION_SERVICES, service("default", name))


@pytest.mark.parametrize("kind", list(RESOURCES))
async def test_defaults_of_the_api_server_are_those_of_the_model(kube: Kube, namespace: str, kind: str) -> None:
    given = BUILT_IN if kind == "DiffusionService" else {}
    made = await kube.create(RESOURCES[kind], custom(kind, namespace, "plain", **given))
    assert SPECS[kind].model_validate(made["spec"]) == SPECS[kind].model_validate(given)
    if kind == "DiffusionService":
        assert made["spec"]["grpc"]["port"] == 50051
        assert made["spec"]["sharedHostMemory"] == {}
        assert made["spec"]["network"]["allowFrom"] == [{}]


async def test_a_new_service_is_born_unknown_before_any_operator_has_seen_it(kube: Kube, namespace: str) -> None:
    """Tools that know no condition take an object without a status for done."""
    made = await kube.create(DIFFUSION_SERVICES, service(namespace))
    (ready,) = made["status"]["conditions"]
    assert (ready["type"], ready["status"], ready["reason"]) == ("Ready", "Unknown", "Pending")
    assert made["status"]["observedGeneration"] < made["metadata"]["generation"]


async def test_nothing_of_a_status_is_pruned(kube: Kube, namespace: str) -> None:
    """State that the schema does not know is dropped without a word (zalando-incubator/kopf#308, #321)."""
    whole: dict[str, Any] = _filled(
        definition(KINDS[2])["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    )
    await kube.create(DIFFUSION_SERVICES, service(namespace))
    await kube.merge(DIFFUSION_SERVICES, namespace, "demo", {"status": whole}, subresource="status")
    stored = (await kube.get(DIFFUSION_SERVICES, namespace, "demo"))["status"]
    assert stored == whole
    assert (
        DiffusionServiceStatus.model_validate(stored).model_dump(by_alias=True, exclude_none=True, mode="json") == whole
    )


def _filled(schema: dict[str, Any]) -> Any:
    """A value with every field of a schema."""
    if "properties" in schema:
        return {name: _filled(child) for name, child in schema["properties"].items()}
    if schema["type"] == "array":
        return [_filled(schema["items"])]
    if schema["type"] == "integer":
        return 3
    if schema.get("format") == "date-time":
        return "2026-09-01T12:00:00Z"
    return schema.get("enum", ["text"])[0]


async def test_unknown_fields_are_refused_by_strict_clients_and_pruned_for_others(kube: Kube, namespace: str) -> None:
    made = await kube.create(ADALN_CACHES, custom("AdaLNCache", namespace, "typo", palns=3))
    assert "palns" not in made["spec"]
    with pytest.raises(ApiError, match="field not declared in schema"):
        await kube.apply(ADALN_CACHES, custom("AdaLNCache", namespace, "typo2", palns=3), manager="people")


async def test_sizes_may_be_whole_numbers_or_text(kube: Kube, namespace: str) -> None:
    sizes = {"sharedHostMemory": {"size": 1073741824}, "resources": {"limits": {"memory": "2Gi", "cpu": 1}}}
    made = await kube.create(DIFFUSION_SERVICES, service(namespace, **sizes))
    spec = DiffusionServiceSpec.model_validate(made["spec"])
    assert (spec.shared_host_memory.size, spec.resources.limits["cpu"]) == ("1073741824", "1")


async def test_the_kind_of_model_source_is_immutable_and_its_content_is_not(kube: Kube, namespace: str) -> None:
    """Said at once with what to do, and not by helm for ever (NVIDIA/NeMo-Retriever#2527)."""
    await kube.create(DIFFUSION_SERVICES, service(namespace))
    moved = {"spec": {"model": {"builtIn": {"path": "/models/other"}}}}
    await kube.merge(DIFFUSION_SERVICES, namespace, "demo", moved)
    other = {"spec": {"model": {"builtIn": None, "hostPath": {"path": "/m"}}}}
    with pytest.raises(ApiError, match="immutable: create another DiffusionService"):
        await kube.merge(DIFFUSION_SERVICES, namespace, "demo", other)


async def test_scale_changes_the_replicas_of_the_spec(kube: Kube, namespace: str) -> None:
    await kube.create(DIFFUSION_SERVICES, service(namespace))
    scale = {"spec": {"replicas": 5}}
    await kube.merge(DIFFUSION_SERVICES, namespace, "demo", scale, subresource="scale")
    assert (await kube.get(DIFFUSION_SERVICES, namespace, "demo"))["spec"]["replicas"] == 5


async def test_the_columns_are_those_of_the_contract(kube: Kube, namespace: str) -> None:
    await kube.create(DIFFUSION_SERVICES, service(namespace))
    table = Resource(DIFFUSION_SERVICES.api_version, "Table", DIFFUSION_SERVICES.plural)
    answer = await kube._ask("GET", table.path(namespace), accept="application/json;as=Table;g=meta.k8s.io;v=v1")
    headers = [column["name"] for column in answer["columnDefinitions"]]
    assert headers == ["Name", "Ready", "Reason", "Model", "Replicas", "VRAM", "Host", "Saved", "Hit%", "Age"]


async def test_every_field_of_every_spec_is_described(kube: Kube) -> None:
    for kind in KINDS:
        schema = definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for part in ("spec", "status"):
            for path, node, _ in crds._fields(schema["properties"][part]):
                assert node.get("description"), f"{kind.name}.{part}.{path}"


def test_every_workflow_of_the_contract_may_be_asked_for() -> None:
    schema = definition(KINDS[2])["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    names = {name.removeprefix("WORKFLOW_") for name in Workflow.keys()}  # noqa: SIM118 - an enum of protobuf
    assert set(schema["properties"]["workflows"]["items"]["enum"]) == names - {"UNSPECIFIED"}


def test_no_property_or_value_is_a_boolean_of_yaml_1_1() -> None:
    for kind in KINDS:
        text = yaml.safe_dump(definition(kind))
        assert yaml.safe_load(text) == definition(kind)
        schema = definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for _, node, _ in crds._fields(schema):
            words = [*node.get("properties", {}), *map(str, node.get("enum", []))]
            assert not {"y", "n", "yes", "no", "on", "off"} & {word.lower() for word in words}


def test_generated_files_are_up_to_date() -> None:
    assert [path.name for path, text in crds.wanted().items() if path.read_text() != text] == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("1Gi", 2**30),
        ("1.5Gi", 1.5 * 2**30),
        ("500m", 0.5),
        ("2147483648", 2**31),
        ("1e3", 1000),
        ("2E", 2e18),
    ],
)
def test_a_quantity_is_worth_what_kubernetes_says(text: str, value: float) -> None:
    assert quantity_value(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "-1", "1gi", "e3"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity_value(text)


@pytest.mark.parametrize("value", ["100%", "0%", "50", "half", -1, 1001, 0.5])
def test_layers_are_a_number_or_a_share(value: object) -> None:
    with pytest.raises(ValidationError):
        LayerwiseOffloadSpec.model_validate({"residentLayers": value})
    for good in (0, 1000, "1%", "99%"):
        assert LayerwiseOffloadSpec.model_validate({"residentLayers": good}).resident_layers == good


def test_the_model_refuses_what_the_schema_refuses() -> None:
    with pytest.raises(ValidationError):
        AdaLNCacheSpec.model_validate({"hostTierSize": "8 GB"})
