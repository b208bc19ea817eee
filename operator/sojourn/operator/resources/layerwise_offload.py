"""LayerwiseOffload: where services keep weights that do not fit in device memory."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from sojourn.operator.resources.base import Model, Quantity, number_or_share, rules

Mode = Literal["Auto", "Resident", "Component", "Layerwise"]
# A number of layers, or a share of all of them; all of them are mode Resident.
Layers = Annotated[int | str, *number_or_share(most=1000)]
Ahead = Annotated[int | str, *number_or_share(most=64)]
ResidentPolicy = Literal["Leading", "Strided"]

_LAYERS_NEED_LAYERWISE = (
    "self.mode in ['Auto', 'Layerwise'] || (!has(self.residentLayers) && !has(self.prefetchLayers))",
    "residentLayers and prefetchLayers have an effect with mode Auto or Layerwise only",
)


class ComponentOffload(Model):
    """What is different for one component of the pipeline."""

    model_config = ConfigDict(json_schema_extra=rules(_LAYERS_NEED_LAYERWISE))

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z][a-z0-9_]*$")] = Field(
        description="Name of the component in the pipeline, such as transformer or text_encoder."
    )
    mode: Mode = Field(default="Auto", description="As in the policy itself.")
    resident_layers: Layers | None = Field(default=None, description="Left out: as in the policy itself.")
    prefetch_layers: Ahead | None = Field(default=None, description="Left out: as in the policy itself.")
    resident_policy: ResidentPolicy | None = Field(default=None, description="Left out: as in the policy itself.")


class LayerwiseOffloadSpec(Model):
    """How the weights of each service that refers to it are hosted."""

    model_config = ConfigDict(json_schema_extra=rules(_LAYERS_NEED_LAYERWISE))

    mode: Mode = Field(
        default="Auto",
        description="Resident: all weights on the device. Component: a whole component at a time. Layerwise: repeated "
        "layers stream through a window. Auto: chosen by the memory plan.",
    )
    resident_layers: Layers | None = Field(
        default=None,
        description="Layers of each component that stay on the device: a number, or a share such as 50%. Left out: by "
        "the memory plan.",
    )
    prefetch_layers: Ahead | None = Field(
        default=None,
        description="Layers that are fetched ahead of the one that runs: a number, or a share such as 10%. Left out: "
        "by the memory plan.",
    )
    resident_policy: ResidentPolicy = Field(
        default="Leading", description="Which layers stay: the first ones, or ones spread evenly."
    )
    pinning: Literal["Auto", "Disabled"] = Field(
        default="Auto", description="Auto: streamed layers are pinned in host memory as far as the budget allows."
    )
    cold_page_advice: Literal["Auto", "Disabled"] = Field(
        default="Auto",
        description="Auto: when a stage ends, the kernel is told which mapped weights it may take back, and whether "
        "it did is verified.",
    )
    next_stage_headroom: Quantity | None = Field(
        default=None, description="Host memory to keep free for the next stage. Left out: measured per model."
    )
    device_memory: Quantity | None = Field(
        default=None,
        description="What the model may take of a device with memory of its own. Left out: what is free at its start.",
    )
    host_memory: Quantity | None = Field(
        default=None,
        description="What the model may take of the host. Left out: what is available at its start, within the memory "
        "limit.",
    )
    components: Annotated[tuple[ComponentOffload, ...], Field(max_length=32)] = Field(
        default=(),
        description="What is different for single components.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
