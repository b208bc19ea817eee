"""What the plan cache has to know of a class of transformers. The table of them is in `families`."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from sojourn.inference.adaln.plans import Plan
from sojourn.inference.adaln.refusals import ModelReason, ModelRefused, PlanMissing, PlansRefused, RequestReason
from sojourn.inference.families.projections import PROJECTIONS, TRANSFORMERS, is_tensor_of
from torch import nn

Inputs = Mapping[str, torch.Tensor]
Read: TypeAlias = "torch.Tensor | Mapping[str, torch.Tensor]"


def one_call(inputs: Inputs) -> tuple[Inputs, ...]:
    """Forwards run every projection once, on the conditioning that they receive."""
    return (inputs,)


def row_count(inputs: Inputs) -> int:
    """The row count M of a forward: embeddings of the inputs are added up, so that one of extent 1 is broadcast."""
    return max((value.shape[0] for value in inputs.values() if value.ndim), default=1)


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a class of transformers makes its modulation rows.

    Attributes:
        name: Name of the family in settings.
        embedders: Matches the module names whose weights the rows also depend on, as a whole.
        inputs: Arguments of the forward that the embedding reads; those that a forward is not given are left out.
        embed: Transformer, inputs -> what the projections read, at its own precision, before the cast to theirs:
            [M, in], or broadcast to it, for all of them or for each by its name.
        forwards: What the pipeline's blocks have left before the denoising loop, the transformer's configuration -> the
            inputs of each forward. None where diffusers has no blocks: the caller hands the inputs to `prepare` itself.
        transformer: The class's name in diffusers; by the name of the family.
        projections: Matches the module names of the projections as a whole; by the class.
        calls: The forward's inputs -> the inputs of each call of a projection within it, in order.
        widths: Workflow -> the most distinct rows of a step.
        reusable: Whether rows are the same for different prompts.
        variants: (Entry, value) of the transformer's configuration -> what of this is another with it, by name.
        unsupported: Values of the transformer's configuration with which it cannot be served.
        sizes: What the class's own defaults leave open, in a constructor's terms; for docs/families.md.
    """

    name: str
    embedders: str
    inputs: tuple[str, ...]
    embed: Callable[[nn.Module, Inputs], Read]
    forwards: Callable[[Callable[[str], Any], Mapping[str, Any]], list[Inputs]] | None = None
    transformer: str = ""
    projections: str = ""
    calls: Callable[[Inputs], tuple[Inputs, ...]] = one_call
    widths: Mapping[str, int] = field(default_factory=dict)
    reusable: bool = True
    variants: Mapping[tuple[str, object], Mapping[str, Any]] = field(default_factory=dict)
    unsupported: Mapping[str, object] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.transformer:
            object.__setattr__(self, "transformer", TRANSFORMERS[self.name])
        if not self.projections:
            object.__setattr__(self, "projections", PROJECTIONS[self.transformer])

    def is_projection(self, module: str) -> bool:
        """Whether a module, by its name within the transformer, is a projection."""
        return re.fullmatch(self.projections, module) is not None

    def is_projection_tensor(self, tensor: str) -> bool:
        """Whether a tensor of the checkpoint belongs to a projection: the loader leaves it out."""
        return is_tensor_of(self.projections, tensor)

    def is_embedder_tensor(self, tensor: str) -> bool:
        """Whether a tensor of the checkpoint takes part in the embedding."""
        return is_tensor_of(self.embedders, tensor)

    def given(self, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Those of a forward's arguments that the embedding reads.

        Raises:
            PlanMissing: One is no tensor: its dtype, and so the embedding's bits, would be a guess.
        """
        found = {name: arguments[name] for name in self.inputs if arguments.get(name) is not None}
        for name, value in found.items():
            if not isinstance(value, torch.Tensor):
                raise PlanMissing(f"{name} is {value!r}; with the plan cache it has to be a tensor")
        if "timestep" not in found:
            raise PlanMissing("the forward has no timestep, so that there is no plan for it")
        return found

    def plans(self, arguments: Mapping[str, Any]) -> tuple[Plan, ...]:
        """The plans of a forward with these arguments, one for each call of its projections.

        Raises:
            ModelRefused: There is a timestep per token.
            PlansRefused: A value is NaN or infinite.
        """
        inputs = self.given(arguments)
        if inputs["timestep"].ndim > 1:
            raise ModelRefused(
                ModelReason.PER_TOKEN_TIMESTEPS,
                f"timestep has shape {list(inputs['timestep'].shape)}: with a timestep per token the rows cost more "
                "than the projections; set --adaln-cache off",
            )
        return tuple(Plan.of(call, row_count(call)) for call in self.calls(inputs))

    def of_config(self, config: Mapping[str, Any]) -> "Family":
        """The family as it is for a transformer of that configuration."""
        changes: dict[str, Any] = {}
        for (name, value), changed in self.variants.items():
            if config.get(name) == value:
                changes |= changed
        return replace(self, **changes)

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Refuses a variant of the class whose forward projects in another way.

        Raises:
            ModelRefused: Naming the entry of the configuration.
        """
        for name, value in self.unsupported.items():
            if config.get(name) == value:
                raise ModelRefused(
                    ModelReason.VARIANT,
                    f"{self.transformer} with {name}={value!r} projects from other inputs than those that the plan "
                    "cache knows; set --adaln-cache off",
                )

    def check_width(self, plans: Sequence[Plan], width: int) -> None:
        """Refuses plans with more distinct rows than a slot holds, naming what each workflow needs."""
        widest = max((plan.length for plan in plans), default=0)
        if widest > width:
            needs = ", ".join(f"{workflow} needs {rows}" for workflow, rows in self.widths.items())
            raise PlansRefused(
                RequestReason.TOO_WIDE,
                f"a step has {widest} distinct rows and a slot holds {width}; set --adaln-plan-width {widest} or more"
                + (f" ({needs})" if needs else ""),
            )
