"""Which modules of a transformer project its timestep embedding into modulation rows (AdaLN).

By names alone, without torch, so that their share of a checkpoint can be told from headers.
"""

import re
from collections.abc import Mapping

# By class of the transformer; the patterns match the whole name of a module.
PROJECTIONS: Mapping[str, str] = {
    "MiniMaxH3Transformer3DModel": r"transformer_blocks\.\d+\.adaln_proj\.linear|norm_out\.linear",
}


def is_projection(class_name: str, tensor_name: str) -> bool:
    """Whether a tensor belongs to an AdaLN projection of a component of that class."""
    return class_name in PROJECTIONS and is_tensor_of(PROJECTIONS[class_name], tensor_name)


def is_tensor_of(modules: str, tensor_name: str) -> bool:
    """Whether a tensor is the weight or bias of a module whose whole name the pattern matches."""
    module, _, leaf = tensor_name.rpartition(".")
    return leaf in {"weight", "bias"} and re.fullmatch(modules, module) is not None
