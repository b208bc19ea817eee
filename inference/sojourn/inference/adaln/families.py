"""Which models have per-block modulation projections, and how their rows come about. One entry a family.

What has been a trap in other families is in docs/adaln.md.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sojourn.inference.adaln.plans import Plan
from sojourn.inference.adaln.refusals import ModelReason, ModelRefused, PlansRefused, RequestReason
from sojourn.inference.families.projections import PROJECTIONS, is_tensor_of
from torch import nn
from torch.nn import functional

Inputs = Mapping[str, torch.Tensor]


def one_call(inputs: Inputs) -> tuple[Inputs, ...]:
    """Most forwards run every projection once, on the conditioning that they receive."""
    return (inputs,)


def batch_rows(inputs: Inputs) -> int:
    """The row count of most families: a row per batch element, which is the timestep's extent."""
    timestep = inputs["timestep"]
    return timestep.shape[0] if timestep.ndim else 1


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a class of transformers makes its modulation rows.

    Attributes:
        name: Name of the family in settings and metrics.
        transformer: The class's name in diffusers.
        projections: Matches the module names of the projections as a whole.
        embedders: Matches the module names whose weights the rows also depend on.
        inputs: Arguments of the forward that the embedding reads.
        embed: Transformer, inputs -> the conditioning vector of every row, [M, in] or broadcast to it.
        activate: Conditioning vector -> what the projections read, at its own precision, before the cast to theirs.
        forwards: What the pipeline's blocks have left by the time the schedule is set -> the inputs of each forward.
        rows: Inputs -> M, the rows that the forward gives to the projection.
        calls: The forward's inputs -> the inputs of each call of a projection within it, in order.
        widths: Workflow -> the most distinct rows of a step.
        reusable: Whether rows are the same for different prompts.
    """

    name: str
    transformer: str
    projections: str
    embedders: str
    inputs: tuple[str, ...]
    embed: Callable[[nn.Module, Inputs], torch.Tensor]
    forwards: Callable[[Callable[[str], Any]], list[Inputs]]
    activate: Callable[[torch.Tensor], torch.Tensor] = functional.silu
    rows: Callable[[Inputs], int] = batch_rows
    calls: Callable[[Inputs], tuple[Inputs, ...]] = one_call
    widths: Mapping[str, int]
    reusable: bool = True

    def is_projection(self, module: str) -> bool:
        """Whether a module, by its name within the transformer, is a projection."""
        return re.fullmatch(self.projections, module) is not None

    def is_projection_tensor(self, tensor: str) -> bool:
        """Whether a tensor of the checkpoint belongs to a projection: the loader leaves it out."""
        return is_tensor_of(self.projections, tensor)

    def is_embedder_tensor(self, tensor: str) -> bool:
        """Whether a tensor of the checkpoint takes part in the embedding."""
        return is_tensor_of(self.embedders, tensor)

    def plans(self, inputs: Inputs) -> tuple[Plan, ...]:
        """The plans of a forward that receives these inputs, one for each call of its projections.

        Raises:
            ModelRefused: There is a timestep per token.
            PlansRefused: A value is NaN or infinite.
        """
        if inputs["timestep"].ndim > 1:
            raise ModelRefused(
                ModelReason.PER_TOKEN_TIMESTEPS,
                f"timestep has shape {list(inputs['timestep'].shape)}: with a timestep per token the rows cost more "
                "than the projections; set --adaln-cache off",
            )
        read = {name: inputs[name] for name in self.inputs}
        return tuple(Plan.of(call, self.rows(call)) for call in self.calls(read))

    def check_width(self, plans: Sequence[Plan], width: int) -> None:
        """Refuses plans with more distinct rows than a slot holds, naming what each workflow needs."""
        widest = max((plan.length for plan in plans), default=0)
        if widest > width:
            needs = ", ".join(f"{workflow} needs {rows}" for workflow, rows in self.widths.items())
            raise PlansRefused(
                RequestReason.TOO_WIDE,
                f"a step has {widest} distinct rows and a slot holds {width}; set --adaln-plan-width {widest} or more "
                f"({needs})",
            )


def _embed_minimax_h3(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """[M, time_embed_dim] in the time embedder's own precision (float32 in released checkpoints)."""
    sinusoid = transformer.time_proj(inputs["timestep"])
    return transformer.time_embedder(sinusoid.to(transformer.time_embedder.linear_1.weight.dtype))


def _forwards_minimax_h3(value: Callable[[str], Any]) -> list[Inputs]:
    """The distinct timesteps of each step, the very tensors that the loop hands to the transformer."""
    return [{"timestep": timestep} for timestep, _ in value("row_timestep_plan")]


MINIMAX_H3 = Family(
    name="minimax-h3",
    transformer="MiniMaxH3Transformer3DModel",
    projections=PROJECTIONS["MiniMaxH3Transformer3DModel"],
    embedders=r"time_embedder\.linear_[12]",
    inputs=("timestep",),
    embed=_embed_minimax_h3,
    forwards=_forwards_minimax_h3,
    # A step's distinct timesteps: of video and audio; with keyframes, of those; with references, of soundtracks too.
    widths={"t2va": 2, "fl2va": 3, "ref2va": 4},
)

FAMILIES: tuple[Family, ...] = (MINIMAX_H3,)

WITHOUT_PROJECTION = (
    "Helios",
    "Wan",
    "SkyReelsV2",
    "ChronoEdit",
    "LTX",
    "Sana",
    "PixArt",
    "Allegro",
    "Latte",
    "Flux2",
    "Flux3",
    "Chroma",
    "ErnieImage",
    "JoyImage",
    "OmniGen",
    "Cosmos3",
    "StableAudio",
    "ACEStep",
)
"""Classes by the beginning of their names: one projection is shared by all blocks, there is next to nothing to save."""


def family_of(transformer: str) -> Family:
    """The family of a transformer class.

    Raises:
        ModelRefused: The class has no per-block projection, or none that is known here.
    """
    for family in FAMILIES:
        if family.transformer == transformer:
            return family
    if transformer.startswith(WITHOUT_PROJECTION):
        raise ModelRefused(
            ModelReason.NO_PROJECTION,
            f"{transformer} has no modulation projection per block, nothing to cache; set --adaln-cache off",
        )
    raise ModelRefused(
        ModelReason.NO_PROJECTION,
        f"{transformer} is not a family that the plan cache knows ({', '.join(f.transformer for f in FAMILIES)}); set "
        "--adaln-cache off",
    )


def projection_tensors(family: Family, tensors: Iterable[str]) -> list[str]:
    """Those of the tensors that a loader leaves out."""
    return [name for name in tensors if family.is_projection_tensor(name)]
