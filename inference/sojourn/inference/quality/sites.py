"""Where fusions go, by the class of the transformer: the one table of families of the quality tiers.

A site is one place in a module's forward that a fused operation takes. All sites of a fusion are mounted together: if
one cannot be, the fusion stays off as a whole.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sojourn.inference.quality.blocks import helios, minimax_h3
from sojourn.inference.quality.fusions.fusion import DTYPES, Fusion
from sojourn.inference.quality.fusions.gated_residual import GATED_RESIDUAL
from sojourn.inference.quality.fusions.norm_modulate import NORM_MODULATE
from torch import nn


@dataclass(frozen=True)
class SiteModule:
    """A kind of module that holds sites.

    Attributes:
        class_name: Class of the module, exactly.
        forward: Takes the place of its forward.
        sites: How many sites it has.
        read: Its norms that the fused operation reads instead of calling them.
    """

    class_name: str
    forward: Callable[..., torch.Tensor]
    sites: int
    read: tuple[str, ...] = ()


@dataclass(frozen=True)
class FusionSites:
    """The sites of one fusion in a class of transformers."""

    fusion: Fusion
    modules: tuple[SiteModule, ...]

    def find(self, transformer: nn.Module) -> list[tuple[str, nn.Module, SiteModule]]:
        """The modules that hold sites, with their names, in the transformer's order."""
        kinds = {kind.class_name: kind for kind in self.modules}
        named = ((name, module, kinds.get(type(module).__name__)) for name, module in transformer.named_modules())
        return [(name, module, kind) for name, module, kind in named if kind is not None]


@dataclass(frozen=True)
class TransformerSites:
    """What is known of a class of transformers.

    Attributes:
        fusions: Its fusions.
        width: Elements of a token, from the configuration.
        block_class: Class of the blocks that the step cache may skip, as in diffusers.
        blocks: Name of the list of them.
        restarts: Whether a forward at the second timestep begins another trajectory than the first one's.
    """

    fusions: tuple[FusionSites, ...]
    width: Callable[[Any], int]
    block_class: str
    blocks: str
    restarts: Callable[[torch.Tensor, torch.Tensor], bool]


SITES: Mapping[str, TransformerSites] = {
    "MiniMaxH3Transformer3DModel": TransformerSites(
        fusions=(
            FusionSites(
                NORM_MODULATE,
                (
                    SiteModule("MiniMaxH3TransformerBlock", minimax_h3.block, sites=2, read=("norm1", "norm2")),
                    SiteModule("MiniMaxH3AdaLayerNormOut", minimax_h3.norm_out, sites=1, read=("norm",)),
                ),
            ),
        ),
        width=lambda config: config.hidden_size,
        block_class="diffusers.models.transformers.transformer_minimax_h3.MiniMaxH3TransformerBlock",
        blocks="transformer_blocks",
        # One trajectory in a clip, and a cache is fresh for each clip.
        restarts=lambda before, now: False,
    ),
    "HeliosTransformer3DModel": TransformerSites(
        fusions=(FusionSites(GATED_RESIDUAL, (SiteModule("HeliosTransformerBlock", helios.block, sites=2),)),),
        width=lambda config: config.num_attention_heads * config.attention_head_dim,
        block_class="diffusers.models.transformers.transformer_helios.HeliosTransformerBlock",
        blocks="blocks",
        # Timesteps fall within a chunk; each chunk, and each level of a pyramid, begins anew.
        restarts=lambda before, now: bool(now.max() > before.max()),
    ),
}


def site_obstacle(name: str, module: nn.Module, kind: SiteModule) -> str | None:
    """Says why the sites of a module cannot be mounted; None where they can."""
    if "forward" in module.__dict__:
        return f"{name} has a forward of its own already, put there by someone else"
    if module._compiled_call_impl is not None:
        return f"{name} is compiled"
    return next((reason for read in kind.read if (reason := _norm_obstacle(f"{name}.{read}", module, read))), None)


def _norm_obstacle(name: str, module: nn.Module, attribute: str) -> str | None:
    norm = getattr(module, attribute)
    if type(norm) is not nn.RMSNorm:
        return f"{name} is a {type(norm).__name__} and not an RMSNorm"
    if norm._forward_hooks or norm._forward_pre_hooks or "forward" in norm.__dict__:
        return f"{name} has hooks, which a fused operation would pass by"
    if norm.weight is None or norm.weight.dtype not in DTYPES:
        return f"{name} has a weight of {getattr(norm.weight, 'dtype', None)}"
    return None
