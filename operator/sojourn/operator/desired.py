"""What a service should be: values of its chart, a pure function of spec, policies and the settings."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from sojourn.operator.defaults import Defaults
from sojourn.operator.resources import API_VERSION, AdaLNCacheSpec, DiffusionServiceSpec, LayerwiseOffloadSpec
from sojourn.operator.resources.base import quantity_value
from sojourn.operator.resources.diffusion_service import Autoscaling, ModelSource, Quality, Resources
from sojourn.operator.resources.observability import Tracing

Values = dict[str, Any]

# What people who know of no size of their own are given: enough for the workers of any data loader, and a part of the
# memory limit that leaves room for the model.
_SHM = "1Gi"
_SHM_BYTES = 2**30
_SHM_SHARE = 0.25

_SWITCH = {"Auto": "auto", "Enabled": "on", "Disabled": "off"}


@dataclass(frozen=True)
class Owner:
    """The custom resource that a release is made for."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True)
class Policies:
    """The policies that a service follows: those it refers to, or their defaults."""

    adaln: AdaLNCacheSpec = field(default_factory=AdaLNCacheSpec)
    offload: LayerwiseOffloadSpec = field(default_factory=LayerwiseOffloadSpec)


def desired(owner: Owner, spec: DiffusionServiceSpec, policies: Policies, defaults: Defaults) -> Values:
    """Values of charts/sojourn-service. Equal arguments give equal values, to the byte of their JSON."""
    return {
        "owner": {"apiVersion": API_VERSION, "kind": "DiffusionService", "name": owner.name, "uid": owner.uid},
        "images": _images(spec, defaults),
        "model": _model(owner, spec),
        "device": spec.device.lower(),
        "dtype": spec.dtype.lower(),
        "replicas": spec.replicas,
        "autoscaling": _autoscaling(spec.autoscaling),
        "adaln": _adaln(policies.adaln),
        "offload": _offload(policies.offload),
        "resources": _resources(spec.resources),
        "shmSize": shm_size(spec),
        "scheduling": _scheduling(spec),
        "grpc": _grpc(spec),
        "metrics": {"podMonitor": defaults.pod_monitor},
        "quality": _quality(spec.quality),
        "logging": {"level": spec.logging.level.lower(), "format": spec.logging.format.lower()},
        "tracing": _tracing(spec.tracing),
        "residency": _residency(spec),
        "network": _network(spec, defaults),
        "loadTimeoutSeconds": spec.load_timeout_seconds,
        "terminationGraceSeconds": spec.termination_grace_seconds,
        "podLabels": spec.pod_labels,
        "podAnnotations": spec.pod_annotations,
    }


def canonical(values: object) -> str:
    """JSON that is equal for equal content."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def shm_size(spec: DiffusionServiceSpec) -> str:
    """Size of /dev/shm: as asked for, else a default that no memory limit is too small for."""
    if spec.shared_host_memory.size is not None:
        return spec.shared_host_memory.size
    limit = spec.resources.limits.get("memory")
    share = _SHM_BYTES if limit is None else int(quantity_value(limit) * _SHM_SHARE)
    return _SHM if share >= _SHM_BYTES else str(share)


def _images(spec: DiffusionServiceSpec, defaults: Defaults) -> Values:
    return {
        "inference": spec.images.inference or defaults.inference_image,
        "residencyd": spec.images.residencyd or defaults.residencyd_image,
        "pullPolicy": spec.images.pull_policy or defaults.pull_policy,
        "pullSecrets": sorted({*spec.images.pull_secrets, *defaults.pull_secrets}),
    }


def _model(owner: Owner, spec: DiffusionServiceSpec) -> Values:
    source = _source(spec.model)
    cache = spec.shared_host_memory.model_cache
    # Services of one namespace that name the same source share a copy; a changed source is another copy.
    key = hashlib.sha256(canonical([owner.namespace, source]).encode()).hexdigest()[:16]
    return {
        "name": spec.model.name or "",
        **source,
        "cache": {"hostPath": cache.host_path, "key": key} if cache else {"hostPath": "", "key": ""},
    }


def _source(model: ModelSource) -> Values:
    if claim := model.persistent_volume_claim:
        return {"source": "persistentVolumeClaim", "claimName": claim.claim_name, "subPath": claim.sub_path or ""}
    if model.host_path:
        return {"source": "hostPath", "path": model.host_path.path}
    if image := model.image:
        return {
            "source": "image",
            "reference": image.reference,
            "pullPolicy": image.pull_policy,
            "subPath": image.sub_path or "",
        }
    assert model.built_in, "the schema demands exactly one source"
    return {"source": "builtIn", "path": model.built_in.path}


def _autoscaling(autoscaling: Autoscaling | None) -> Values:
    if autoscaling is None:
        return {"enabled": False}
    return {
        "enabled": True,
        "minReplicas": autoscaling.min_replicas,
        "maxReplicas": autoscaling.max_replicas,
        "targetWaitingRequests": autoscaling.target_waiting_requests or 0,
        "targetCpuPercent": autoscaling.target_cpu_percent,
    }


def _adaln(policy: AdaLNCacheSpec) -> Values:
    store = policy.plan_store
    return {
        "mode": _SWITCH[policy.mode],
        "plans": policy.plans,
        "width": policy.width,
        "hostTierBytes": _bytes_if_given(policy.host_tier_size),
        "precision": policy.precision.lower(),
        "families": [
            {"component": override.component, "family": override.family}
            for override in sorted(policy.families, key=lambda override: override.component)
        ],
        "planStore": {"hostPath": store.host_path, "sizeBytes": _bytes(store.size)} if store else {"hostPath": ""},
    }


def _offload(policy: LayerwiseOffloadSpec) -> Values:
    return {
        "mode": policy.mode.lower(),
        "residentLayers": policy.resident_layers,
        "prefetchLayers": policy.prefetch_layers,
        "residentPolicy": policy.resident_policy.lower(),
        "pinning": _SWITCH[policy.pinning],
        "coldPageAdvice": _SWITCH[policy.cold_page_advice],
        "nextStageHeadroomBytes": _bytes_if_given(policy.next_stage_headroom),
        "deviceMemoryBytes": _bytes_if_given(policy.device_memory),
        "hostMemoryBytes": _bytes_if_given(policy.host_memory),
        "components": [
            {
                "name": component.name,
                "mode": component.mode.lower(),
                "residentLayers": component.resident_layers,
                "prefetchLayers": component.prefetch_layers,
                "residentPolicy": (component.resident_policy or "").lower(),
            }
            for component in sorted(policy.components, key=lambda component: component.name)
        ],
    }


def _resources(resources: Resources) -> Values:
    gpu = {resources.gpu.resource_name: str(resources.gpu.count)} if resources.gpu else {}
    return {"requests": dict(resources.requests), "limits": {**resources.limits, **gpu}}


def _scheduling(spec: DiffusionServiceSpec) -> Values:
    scheduling = spec.scheduling
    return {
        "nodeSelector": scheduling.node_selector,
        "tolerations": [
            toleration.model_dump(by_alias=True, exclude_none=True) for toleration in scheduling.tolerations
        ],
        "runtimeClassName": scheduling.runtime_class_name or "",
        "priorityClassName": scheduling.priority_class_name or "",
        "placement": scheduling.placement.lower(),
    }


def _grpc(spec: DiffusionServiceSpec) -> Values:
    grpc = spec.grpc
    return {
        "port": grpc.port,
        "maxWaiting": grpc.max_waiting,
        "maxMessageBytes": _bytes(grpc.max_message_size),
        "stallSeconds": grpc.stall_seconds,
        "tls": {"secretName": grpc.tls.secret_name, "clientCa": grpc.tls.client_ca == "Required"}
        if grpc.tls
        else {"secretName": "", "clientCa": False},
        "token": {"secretName": grpc.token.secret_name, "key": grpc.token.key}
        if grpc.token
        else {"secretName": "", "key": "tokens"},
    }


def _quality(quality: Quality) -> Values:
    table = quality.step_cache_table
    return {
        "fusions": _SWITCH[quality.fusions],
        "stepCacheTable": {"configMapName": table.config_map_name, "key": table.key}
        if table
        else {"configMapName": "", "key": "measured.json"},
    }


def _tracing(tracing: Tracing | None) -> Values:
    """Without an endpoint there are no traces, whatever else is said."""
    if tracing is None:
        return {"endpoint": ""}
    headers = tracing.headers
    return {
        "endpoint": tracing.endpoint,
        "protocol": tracing.protocol.lower(),
        "samplePercent": tracing.sample_percent,
        "headers": {"secretName": headers.secret_name, "key": headers.key} if headers else {"secretName": ""},
        "collector": tracing.collector.model_dump(by_alias=True) if tracing.collector else None,
    }


def _residency(spec: DiffusionServiceSpec) -> Values:
    residency = spec.residency
    resources = {"requests": dict(residency.resources.requests), "limits": dict(residency.resources.limits)}
    return {
        "intervalSeconds": residency.interval_seconds,
        "deepScanMillicores": residency.deep_scan_millicores,
        "resources": resources,
    }


def _network(spec: DiffusionServiceSpec, defaults: Defaults) -> Values:
    return {
        "allowFrom": [peer.model_dump(by_alias=True) for peer in spec.network.allow_from],
        "operator": {
            "namespaceLabels": defaults.operator_namespace_labels,
            "podLabels": defaults.operator_pod_labels,
        },
        "monitoringNamespaceLabels": defaults.monitoring_namespace_labels,
    }


def _bytes_if_given(quantity: str | None) -> int | None:
    """What is left out is left to the process."""
    return None if quantity is None else _bytes(quantity)


def _bytes(quantity: str) -> int:
    """The processes take whole bytes."""
    return int(quantity_value(quantity))
