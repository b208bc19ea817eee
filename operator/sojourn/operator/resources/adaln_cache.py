"""AdaLNCache: how services keep the modulation rows of their schedules instead of the weights that make them."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from sojourn.operator.resources.base import AbsolutePath, Model, Quantity, rules


class PlanStore(Model):
    """Plans kept on the node, so that the second pod there builds none."""

    host_path: AbsolutePath = Field(
        description="Existing folder of the node, writable by user 10001, that holds the plans. "
        "Needs a namespace that allows hostPath volumes (Pod Security `privileged`)."
    )
    size: Quantity = Field(default="20Gi", description="Most bytes of plans in the folder; the oldest go first.")


# Those that the engine knows; a test holds the two lists against each other.
FamilyName = Literal[
    "minimax-h3",
    "qwen-image",
    "sd3",
    "flux",
    "hunyuan-video-1.5",
    "auraflow",
    "longcat-image",
    "bria",
    "bria-fibo",
    "hunyuan-video",
    "hunyuan-video-framepack",
    "hunyuan-image",
    "cogvideox",
    "consisid",
    "ovis-image",
    "cogview3-plus",
    "cogview4",
    "glm-image",
    "dit",
    "mochi",
    "motif-video",
    "easyanimate",
    "lumina2",
    "prx",
]


class FamilyOverride(Model):
    """The family that one transformer is treated as, whatever its class."""

    component: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z][a-z0-9_]*$")] = Field(
        description="Name of the transformer in the pipeline, such as transformer."
    )
    family: FamilyName = Field(
        description="Family whose forward its own equals. Every request is held against it; one of another fails."
    )


class AdaLNCacheSpec(Model):
    """What the plan cache of each service that refers to it may use."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.mode != 'Disabled' || !has(self.planStore)",
                "planStore has no effect with mode Disabled: remove it or set mode to Auto or Enabled",
            ),
            (
                "self.mode != 'Disabled' || !has(self.families) || self.families.size() == 0",
                "families has no effect with mode Disabled: remove it or set mode to Auto or Enabled",
            ),
        )
    )

    mode: Literal["Auto", "Enabled", "Disabled"] = Field(
        default="Auto",
        description="Enabled: the projections are never loaded, a model that cannot do so is refused. Auto: where the "
        "family supports it and the rows cost less than the weights. Disabled: the weights are loaded as usual.",
    )
    plans: Annotated[int, Field(ge=1, le=65536)] = Field(
        default=64,
        description="Plans held on the device, one for each distinct denoising step. A request of N steps needs N - 1.",
    )
    width: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=4, description="Distinct rows that one plan may have. MiniMax-H3 needs up to 4."
    )
    host_tier_size: Quantity | None = Field(
        default=None,
        description="Most host memory for rows of recent requests; 0 for none. What is given counts in PlanFits. Left "
        "out: up to 8 GB of what the weights leave free, and so never a reason to refuse.",
    )
    plan_store: PlanStore | None = Field(
        default=None, description="Share plans between the pods of a node. Left out: each pod builds its own."
    )
    precision: Literal["Match", "Fp32"] = Field(
        default="Match",
        description="Match: rows are bit-identical to those of resident weights. Fp32: computed in float32.",
    )
    families: Annotated[tuple[FamilyOverride, ...], Field(max_length=32)] = Field(
        default=(),
        description="Transformers of a class that the engine does not know by name, each with the family that it is "
        "treated as. Left out: all go by their class.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["component"]},
    )
