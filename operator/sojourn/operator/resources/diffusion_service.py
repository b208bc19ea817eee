"""DiffusionService: one model, served by a Deployment behind a Service."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from sojourn.operator.resources.base import (
    AbsolutePath,
    Labels,
    Model,
    ObjectName,
    Quantity,
    SecretKey,
    rules,
    section,
)
from sojourn.operator.resources.observability import Logging, Tracing
from sojourn.operator.resources.peer import Peer

Port = Annotated[int, Field(ge=1024, le=65535)]
Seconds = Annotated[int, Field(ge=1, le=86400)]
Quantities = Annotated[dict[str, Quantity], Field(max_length=16)]
SubPath = Annotated[str, Field(max_length=1024, pattern=r"^[^/:][^:]*$")]

# A release is called dsvc-<name> and may have 53 characters; Services are DNS labels.
MAX_NAME_CHARACTERS = 48


class Reference(Model):
    """An object of the same namespace."""

    name: ObjectName = Field(description="Its name.")


class BuiltInModel(Model):
    """A model that is part of the inference image."""

    path: AbsolutePath = Field(default="/models/h3-digits", description="Folder inside the image.")


class ClaimedModel(Model):
    """A model on a PersistentVolumeClaim."""

    claim_name: ObjectName = Field(description="Name of the claim.")
    sub_path: SubPath | None = Field(default=None, description="Folder on the volume. Left out: its root.")


class HostPathModel(Model):
    """A model in a folder of the node."""

    path: AbsolutePath = Field(
        description="Folder of the node. Needs a namespace that allows hostPath volumes (Pod Security `privileged`)."
    )


class ImageModel(Model):
    """A model in an OCI image, mounted as an image volume."""

    reference: Annotated[str, Field(min_length=1, max_length=512)] = Field(description="The image.")
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = Field(
        default="IfNotPresent", description="When it is pulled."
    )
    sub_path: SubPath | None = Field(default=None, description="Folder in the image. Left out: its root.")


_SOURCES = ("builtIn", "persistentVolumeClaim", "hostPath", "image")


class ModelSource(Model):
    """Where the checkpoint comes from. Exactly one source."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"[{', '.join(f'has(self.{source})' for source in _SOURCES)}].filter(given, given).size() == 1",
                f"give exactly one of {', '.join(_SOURCES)}",
            ),
            (
                " && ".join(f"has(self.{source}) == has(oldSelf.{source})" for source in _SOURCES),
                "the kind of model source is immutable: create another DiffusionService, then delete this one",
            ),
        )
    )

    name: Annotated[str, Field(min_length=1, max_length=63)] | None = Field(
        default=None, description="What the model is called in answers and metrics. Left out: its folder's name."
    )
    family: Annotated[str, Field(min_length=1, max_length=63)] | None = Field(
        default=None,
        description="Family that the checkpoint must be of, such as minimax-h3. A model of another one is not Ready. "
        "Left out: any.",
    )
    built_in: BuiltInModel | None = Field(default=None, description="In the inference image.")
    persistent_volume_claim: ClaimedModel | None = Field(default=None, description="On a claim of this namespace.")
    host_path: HostPathModel | None = Field(default=None, description="In a folder of the node.")
    image: ImageModel | None = Field(default=None, description="In an image of its own.")


class Autoscaling(Model):
    """Replicas by load, through a HorizontalPodAutoscaler."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("self.minReplicas <= self.maxReplicas", "minReplicas must not be more than maxReplicas")
        )
    )

    min_replicas: Annotated[int, Field(ge=1, le=1000)] = Field(default=1, description="Fewest replicas.")
    max_replicas: Annotated[int, Field(ge=1, le=1000)] = Field(description="Most replicas.")
    target_waiting_requests: Annotated[int, Field(ge=1, le=10000)] | None = Field(
        default=None,
        description="Waiting requests per pod to aim at, from the metric sojourn_requests_waiting of a custom metrics "
        "adapter. Left out: by CPU.",
    )
    target_cpu_percent: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=80, description="CPU use to aim at, in percent of the request. Without targetWaitingRequests only."
    )


class Gpu(Model):
    """Accelerators of one pod."""

    count: Annotated[int, Field(ge=1, le=64)] = Field(default=1, description="How many.")
    resource_name: Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")] = Field(
        default="nvidia.com/gpu", description="The extended resource that stands for one."
    )


class Resources(Model):
    """What one inference container asks for and may use."""

    requests: Quantities = Field(default_factory=dict, description="By resource, such as cpu and memory.")
    limits: Quantities = Field(default_factory=dict, description="By resource, such as cpu and memory.")
    gpu: Gpu | None = Field(default=None, description="Accelerators. Left out: the model runs on the CPU.")


class Toleration(Model):
    """A taint of nodes that is no obstacle."""

    key: Annotated[str, Field(max_length=317)] | None = Field(default=None, description="Key of the taint.")
    operator: Literal["Exists", "Equal"] = Field(default="Exists", description="How it is compared.")
    value: Annotated[str, Field(max_length=63)] | None = Field(default=None, description="Value, with Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect. Left out: all."
    )


class Scheduling(Model):
    """Which nodes the pods go to."""

    node_selector: Labels = Field(default_factory=dict, description="Labels that a node must have.")
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32)] = Field(
        default=(), description="Taints that are no obstacle.", json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    runtime_class_name: ObjectName | None = Field(default=None, description="RuntimeClass, such as nvidia.")
    priority_class_name: ObjectName | None = Field(default=None, description="PriorityClass.")
    placement: Literal["Any", "Pack", "Spread"] = Field(
        default="Any",
        description="Pack: prefer nodes that already run a pod of this service, which then share the page cache of "
        "the weights. Spread: prefer the others.",
    )


class ModelCache(Model):
    """A copy of the checkpoint on the node, made once by the first pod there."""

    host_path: AbsolutePath = Field(
        description="Existing folder of the node, writable by user 10001, that holds copies of checkpoints. "
        "Needs a namespace that allows hostPath volumes (Pod Security `privileged`)."
    )


class SharedHostMemory(Model):
    """Host memory that processes share: /dev/shm, and the page cache of one copy of the weights."""

    size: Quantity | None = Field(
        default=None,
        description="Size of /dev/shm. It counts against the memory limit. Left out: 1Gi, or a quarter of the memory "
        "limit where that is less.",
    )
    model_cache: ModelCache | None = Field(
        default=None,
        description="Keep one copy of the checkpoint on each node, owned by the pods' user: replicas there share its "
        "pages, and page-out works. Left out: the model source is mapped as it is.",
    )


class TLS(Model):
    """Certificates of the gRPC port."""

    secret_name: ObjectName = Field(description="Secret of type kubernetes.io/tls.")
    client_ca: Literal["Disabled", "Required"] = Field(
        default="Disabled", description="Required: clients must show a certificate signed by the Secret's ca.crt."
    )


class Token(Model):
    """Bearer tokens of the gRPC port."""

    secret_name: ObjectName = Field(description="Secret that holds the tokens, one a line.")
    key: SecretKey = Field(default="tokens", description="Key in the Secret.")


class Grpc(Model):
    """The port that clients call."""

    port: Port = Field(default=50051, description="Port of the Service and of the container.")
    max_waiting: Annotated[int, Field(ge=0, le=100000)] = Field(
        default=16, description="Requests that may wait; one more is refused with RESOURCE_EXHAUSTED."
    )
    max_message_size: Quantity = Field(
        default="256Mi", description="Largest request that is taken, keyframes and references included."
    )
    stall_seconds: Seconds = Field(default=60, description="A reader that takes nothing for so long loses its call.")
    tls: TLS | None = Field(default=None, description="Left out: plain text inside the cluster.")
    token: Token | None = Field(default=None, description="Left out: no token is asked for.")


class Residency(Model):
    """The sidecar that measures where the weights are."""

    interval_seconds: Annotated[int, Field(ge=1, le=3600)] = Field(
        default=10, description="Least time between two looks."
    )
    deep_scan_millicores: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=1, description="CPU that counting pages in the page tables may take, in thousandths of a core."
    )
    resources: Resources = section(Resources, "Requests and limits of the sidecar; its gpu field has no effect.")


class StepCacheTable(Model):
    """Measured errors of the step cache, in a ConfigMap."""

    config_map_name: ObjectName = Field(description="ConfigMap of this namespace that holds the table.")
    key: SecretKey = Field(default="measured.json", description="Key in the ConfigMap.")


class Quality(Model):
    """What the quality tiers below lossless may use."""

    fusions: Literal["Auto", "Enabled", "Disabled"] = Field(
        default="Auto",
        description="Fused kernels of the tiers extra-high and high. Auto: those that are measured to be faster when "
        "the model is loaded. Enabled: those that run, and so the same bits on every start. Disabled: none.",
    )
    step_cache_table: StepCacheTable | None = Field(
        default=None,
        description="Errors that bench/step_cache.py has measured on checkpoints; tier high is served for those in it. "
        "Read at the start of a pod. Left out: the table that comes with Sojourn.",
    )


class Network(Model):
    """Who may reach the pods."""

    allow_from: Annotated[tuple[Peer, ...], Field(max_length=32)] = Field(
        default=(Peer(),),
        description="Pods that may call the gRPC port. Default: all of this namespace. An empty list: nobody.",
        json_schema_extra={"x-kubernetes-list-type": "atomic", "default": [{}]},
    )


class Images(Model):
    """Images other than the operator's defaults."""

    inference: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        default=None, description="Image of the inference container."
    )
    residencyd: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        default=None, description="Image of the sidecar."
    )
    pull_policy: Literal["IfNotPresent", "Always", "Never"] | None = Field(
        default=None, description="When both are pulled. Left out: the operator's default."
    )
    pull_secrets: Annotated[tuple[ObjectName, ...], Field(max_length=8)] = Field(
        default=(), description="Secrets to pull them with.", json_schema_extra={"x-kubernetes-list-type": "set"}
    )


_SHM = "quantity(string(self.sharedHostMemory.size))"
_LIMIT = "quantity(string(self.resources.limits['memory']))"


class DiffusionServiceSpec(Model):
    """One served model."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("!has(self.autoscaling) || self.replicas == 1", "replicas has no effect with autoscaling: remove it"),
            (
                "!has(self.sharedHostMemory.size) || !has(self.resources.limits) || "
                f"!('memory' in self.resources.limits) || {_SHM}.compareTo({_LIMIT}) < 0",
                "sharedHostMemory.size counts against resources.limits.memory and must be less",
            ),
        )
    )

    model: ModelSource = Field(description="Where the checkpoint comes from.")
    workflows: Annotated[tuple[Literal["T2VA", "FL2VA", "REF2VA"], ...], Field(max_length=8)] = Field(
        default=(),
        description="Workflows that must be served: T2VA from text, FL2VA from first and last frame, REF2VA from "
        "references. A model that lacks the weights or the pre-processing of one is not Ready. Left out: what there "
        "is.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    device: Literal["Auto", "CPU", "CUDA"] = Field(default="Auto", description="What the model runs on.")
    dtype: Literal["BFloat16", "Float32"] = Field(
        default="BFloat16",
        description="What the model computes in. Parts that it keeps in float32 stay so.",
    )
    replicas: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=1, description="Pods, where autoscaling is not set. `kubectl scale dsvc` changes it."
    )
    autoscaling: Autoscaling | None = Field(default=None, description="Replicas by load instead of a fixed number.")
    adaln_cache_ref: Reference | None = Field(
        default=None, alias="adaLNCacheRef", description="AdaLNCache to follow. Left out: its defaults."
    )
    layerwise_offload_ref: Reference | None = Field(
        default=None, description="LayerwiseOffload to follow. Left out: its defaults."
    )
    resources: Resources = section(Resources, "Of the inference container.")
    shared_host_memory: SharedHostMemory = section(SharedHostMemory, "Host memory that processes share.")
    scheduling: Scheduling = section(Scheduling, "Which nodes the pods go to.")
    grpc: Grpc = section(Grpc, "The port that clients call.")
    residency: Residency = section(Residency, "The sidecar that measures where the weights are.")
    quality: Quality = section(Quality, "What the quality tiers below lossless may use.")
    logging: Logging = section(Logging, "What both processes print.")
    tracing: Tracing | None = Field(default=None, description="Traces of requests by OpenTelemetry. Left out: none.")
    network: Network = section(Network, "Who may reach the pods.")
    images: Images = section(Images, "Images other than the operator's defaults.")
    load_timeout_seconds: Seconds = Field(
        default=1800, description="Longest time from start to serving; a pod that needs longer is restarted."
    )
    termination_grace_seconds: Seconds = Field(
        default=300, description="Time that a pod has to finish its request when it is stopped."
    )
    pod_labels: Labels = Field(default_factory=dict, description="More labels of the pods.")
    pod_annotations: Labels = Field(default_factory=dict, description="More annotations of the pods.")
    suspend: bool = Field(
        default=False,
        description="True: the operator leaves the release as it is. The pods go on serving; deleting still works.",
    )
