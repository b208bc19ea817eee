"""Which modules of a transformer project its timestep embedding into modulation rows (AdaLN).

By names alone, without torch, so that their share of a checkpoint can be told from headers.
"""

import re
from collections.abc import Mapping

# By the name of the family: its class in diffusers.
TRANSFORMERS: Mapping[str, str] = {
    "minimax-h3": "MiniMaxH3Transformer3DModel",
    "qwen-image": "QwenImageTransformer2DModel",
    "sd3": "SD3Transformer2DModel",
    "flux": "FluxTransformer2DModel",
    "hunyuan-video-1.5": "HunyuanVideo15Transformer3DModel",
    "auraflow": "AuraFlowTransformer2DModel",
    "longcat-image": "LongCatImageTransformer2DModel",
    "bria": "BriaTransformer2DModel",
    "bria-fibo": "BriaFiboTransformer2DModel",
    "hunyuan-video": "HunyuanVideoTransformer3DModel",
    "hunyuan-video-framepack": "HunyuanVideoFramepackTransformer3DModel",
    "hunyuan-image": "HunyuanImageTransformer2DModel",
    "cogvideox": "CogVideoXTransformer3DModel",
    "consisid": "ConsisIDTransformer3DModel",
    "ovis-image": "OvisImageTransformer2DModel",
    "cogview3-plus": "CogView3PlusTransformer2DModel",
    "cogview4": "CogView4Transformer2DModel",
    "glm-image": "GlmImageTransformer2DModel",
    "dit": "DiTTransformer2DModel",
    "mochi": "MochiTransformer3DModel",
    "motif-video": "MotifVideoTransformer3DModel",
    "easyanimate": "EasyAnimateTransformer3DModel",
    "lumina2": "Lumina2Transformer2DModel",
    "prx": "PRXTransformer2DModel",
}

_FINAL = r"norm_out\.linear"
_DOUBLE = r"transformer_blocks\.\d+\.norm1(_context)?\.linear"
_DOUBLE_AND_SINGLE = rf"{_DOUBLE}|single_transformer_blocks\.\d+\.norm\.linear|{_FINAL}"
_TWO_NORMS = rf"transformer_blocks\.\d+\.norm[12]\.linear|{_FINAL}"
_ONE_NORM = rf"transformer_blocks\.\d+\.norm1\.linear|{_FINAL}"

# By class of the transformer; the patterns match the whole name of a module. Unanchored ones would also match what only
# ends alike: refiners (`context_embedder.….norm_out.linear`) are modulated by the text and stay.
PROJECTIONS: Mapping[str, str] = {
    "MiniMaxH3Transformer3DModel": rf"transformer_blocks\.\d+\.adaln_proj\.linear|{_FINAL}",
    "QwenImageTransformer2DModel": rf"transformer_blocks\.\d+\.(img|txt)_mod\.1|{_FINAL}",
    "SD3Transformer2DModel": rf"{_DOUBLE}|{_FINAL}",
    "FluxTransformer2DModel": _DOUBLE_AND_SINGLE,
    "HunyuanVideo15Transformer3DModel": rf"{_DOUBLE}|{_FINAL}",
    "AuraFlowTransformer2DModel": rf"(joint|single)_transformer_blocks\.\d+\.norm1(_context)?\.linear|{_FINAL}",
    "LongCatImageTransformer2DModel": _DOUBLE_AND_SINGLE,
    "BriaTransformer2DModel": _DOUBLE_AND_SINGLE,
    "BriaFiboTransformer2DModel": _DOUBLE_AND_SINGLE,
    "HunyuanVideoTransformer3DModel": _DOUBLE_AND_SINGLE,
    "HunyuanVideoFramepackTransformer3DModel": _DOUBLE_AND_SINGLE,
    "HunyuanImageTransformer2DModel": _DOUBLE_AND_SINGLE,
    "CogVideoXTransformer3DModel": _TWO_NORMS,
    "ConsisIDTransformer3DModel": _TWO_NORMS,
    "OvisImageTransformer2DModel": _DOUBLE_AND_SINGLE,
    "CogView3PlusTransformer2DModel": _ONE_NORM,
    "CogView4Transformer2DModel": _ONE_NORM,
    "GlmImageTransformer2DModel": _ONE_NORM,
    "DiTTransformer2DModel": r"transformer_blocks\.\d+\.norm1\.linear|proj_out_1",
    # The context norm of the last block is an AdaLayerNormContinuous of its own kind.
    "MochiTransformer3DModel": rf"{_DOUBLE}|transformer_blocks\.\d+\.norm1_context\.linear_1|{_FINAL}",
    "MotifVideoTransformer3DModel": _DOUBLE_AND_SINGLE,
    "EasyAnimateTransformer3DModel": _TWO_NORMS,
    "Lumina2Transformer2DModel": r"(noise_refiner|layers)\.\d+\.norm1\.linear|norm_out\.linear_1",
    "PRXTransformer2DModel": r"blocks\.\d+\.modulation\.lin|final_layer\.adaLN_modulation\.1",
}


def is_projection(class_name: str, tensor_name: str) -> bool:
    """Whether a tensor belongs to an AdaLN projection of a component of that class."""
    return class_name in PROJECTIONS and is_tensor_of(PROJECTIONS[class_name], tensor_name)


def is_tensor_of(modules: str, tensor_name: str) -> bool:
    """Whether a tensor is the weight or bias of a module whose whole name the pattern matches."""
    module, _, leaf = tensor_name.rpartition(".")
    return leaf in {"weight", "bias"} and re.fullmatch(modules, module) is not None
