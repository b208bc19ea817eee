"""Which tensors of a transformer project its timestep embedding into modulation rows (AdaLN).

By names alone, without torch, so that their share of a checkpoint can be told from headers.
"""

import re
from collections.abc import Mapping

# By class of the transformer; the patterns match the whole name of a tensor.
_PROJECTIONS: Mapping[str, re.Pattern[str]] = {
    "MiniMaxH3Transformer3DModel": re.compile(r"(transformer_blocks\.\d+\.adaln_proj|norm_out)\.linear\.(weight|bias)"),
}


def is_projection(class_name: str, tensor_name: str) -> bool:
    """Whether a tensor belongs to an AdaLN projection of a component of that class."""
    pattern = _PROJECTIONS.get(class_name)
    return pattern is not None and pattern.fullmatch(tensor_name) is not None
