"""One tiny transformer of every family of the plan cache: the real class, random weights, arguments of its forward."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import save_file
from sojourn.inference.loading.folder import ComponentFolder, ComponentKind
from sojourn.inference.loading.mapping import MappedFile
from sojourn.inference.loading.safetensors_file import read_safetensors

TEXT = 6
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Draw:
    """Random arguments of a forward.

    Attributes:
        batch: Rows.
        dtype: Of the model.
        generator: Of the values.
    """

    batch: int
    dtype: torch.dtype
    generator: torch.Generator

    def real(self, *shape: int) -> torch.Tensor:
        return torch.randn(self.batch, *shape, generator=self.generator).to(self.dtype)

    def whole(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, (self.batch, *shape), generator=self.generator)

    def ids(self, count: int) -> torch.Tensor:
        """[count, 3] positions."""
        return torch.stack([torch.zeros(count), torch.arange(count) // 4, torch.arange(count) % 4], dim=1)

    def every(self, *values: float) -> torch.Tensor:
        """[batch] or [batch, values], the same in each row."""
        row = torch.tensor(values[0] if len(values) == 1 else values)
        return row.expand(self.batch, *row.shape).to(self.dtype)

    @property
    def mask(self) -> torch.Tensor:
        return torch.ones(self.batch, TEXT, dtype=torch.bool)


@dataclass(frozen=True)
class Specimen:
    """A tiny transformer.

    Attributes:
        config: Of its class.
        arguments: Of a forward, all but the timestep.
        timestep: Draw, a level in 0..1 -> the timestep as the family's pipelines hand it over.
    """

    config: Mapping[str, Any]
    arguments: Callable[[Draw], Arguments]
    timestep: Callable[[Draw, float], torch.Tensor] = lambda draw, level: draw.every(1000 * level)


def _fraction(draw: Draw, level: float) -> torch.Tensor:
    return draw.every(level)


def _whole(draw: Draw, level: float) -> torch.Tensor:
    return draw.every(1000 * level).to(torch.int64)


def _float32(draw: Draw, level: float) -> torch.Tensor:
    return torch.full((draw.batch,), 1000 * level)


_HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
_FLUX = {
    "in_channels": 4, "num_layers": 2, "num_single_layers": 1, **_HEADS, "joint_attention_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}  # fmt: skip
_HUNYUAN = {
    "in_channels": 4, "out_channels": 4, **_HEADS, "num_layers": 2, "num_refiner_layers": 1, "text_embed_dim": 16,
}  # fmt: skip
_COGVIEW = {
    "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2,
    "text_embed_dim": 8, "time_embed_dim": 8, "condition_dim": 4,
}  # fmt: skip
_COGVIDEO = {
    "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8,
    "text_embed_dim": 8, "num_layers": 2, "sample_width": 8, "sample_height": 8, "sample_frames": 1,
    "max_text_seq_length": TEXT,
}  # fmt: skip


def _flux(draw: Draw) -> Arguments:
    return {
        "hidden_states": draw.real(16, 4),
        "encoder_hidden_states": draw.real(TEXT, 32),
        "img_ids": draw.ids(16),
        "txt_ids": torch.zeros(TEXT, 3),
    }


def _hunyuan(draw: Draw) -> Arguments:
    return {
        "hidden_states": draw.real(4, 1, 4, 4),
        "encoder_hidden_states": draw.real(TEXT, 16),
        "encoder_attention_mask": draw.mask,
    }


def _cogview(draw: Draw) -> Arguments:
    return {
        "hidden_states": draw.real(4, 8, 8),
        "encoder_hidden_states": draw.real(TEXT, 8),
        "original_size": draw.every(32, 64),
        "target_size": draw.every(64, 64),
        "crop_coords": draw.every(0, 8),
    }


def _cogvideo(draw: Draw) -> Arguments:
    return {"hidden_states": draw.real(1, 4, 8, 8), "encoder_hidden_states": draw.real(TEXT, 8)}


def _image(text: int) -> Callable[[Draw], Arguments]:
    return lambda draw: {"hidden_states": draw.real(4, 8, 8), "encoder_hidden_states": draw.real(TEXT, text)}


def _glm(draw: Draw) -> Arguments:
    cogview = {name: value for name, value in _cogview(draw).items() if name != "original_size"}
    return {
        **cogview,
        "prior_token_id": draw.whole(8, 16),
        "prior_token_drop": torch.zeros(draw.batch, 16, dtype=torch.bool),
    }


def _framepack(draw: Draw) -> Arguments:
    return {
        **_hunyuan(draw),
        "pooled_projections": draw.real(8),
        "guidance": draw.every(6000),
        "image_embeds": draw.real(3, 16),
        "indices_latents": torch.ones(1),
        "latents_clean": draw.real(4, 1, 4, 4),
        "indices_latents_clean": torch.ones(1),
        "latents_history_2x": draw.real(4, 2, 4, 4),
        "indices_latents_history_2x": torch.ones(2),
        "latents_history_4x": draw.real(4, 4, 4, 4),
        "indices_latents_history_4x": torch.ones(4),
    }


SPECIMENS: Mapping[str, Specimen] = {
    "minimax-h3": Specimen(
        {
            "num_attention_heads": 2, "attention_head_dim": 16, "hidden_size": 32, "num_layers": 2,
            "num_refiner_layers": 1, "ffn_dim": 64, "in_channels": 4, "audio_in_channels": 8, "text_dim": 16,
            "freq_dim": 16, "time_embed_hidden_dim": 32, "time_embed_dim": 16, "rope_freq_dim": 2,
        },
        lambda draw: {
            "hidden_states": draw.real(8, 16)[:1],
            "audio_hidden_states": draw.real(8, 8)[:1],
            "encoder_hidden_states": draw.real(8, 16)[:1],
            "timestep_indices": torch.arange(24) % draw.batch,
            "token_tags": torch.tensor([1] * 8 + [0] * 8 + [2] * 8),
            "position_ids": torch.zeros(24, 3),
            "video_indices": torch.arange(8, 16),
            "audio_indices": torch.arange(16, 24),
            "text_indices": torch.arange(8),
        },
        lambda draw, level: torch.linspace(level, 1, draw.batch + 1)[:-1],
    ),
    "qwen-image": Specimen(
        {
            "in_channels": 16, "out_channels": 4, "num_layers": 2, **_HEADS, "joint_attention_dim": 16,
            "axes_dims_rope": (8, 4, 4), "use_additional_t_cond": True,
        },
        lambda draw: {
            "hidden_states": draw.real(16, 16),
            "encoder_hidden_states": draw.real(TEXT, 16),
            "encoder_hidden_states_mask": draw.mask,
            "img_shapes": [[(1, 4, 4)]] * draw.batch,
            "additional_t_cond": torch.ones(draw.batch, dtype=torch.int64),
        },
        _fraction,
    ),
    "sd3": Specimen(
        {
            "sample_size": 16, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 3, **_HEADS,
            "joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 16,
            "pos_embed_max_size": 16, "dual_attention_layers": (0,), "qk_norm": "rms_norm",
        },
        lambda draw: {**_image(32)(draw), "pooled_projections": draw.real(16)},
        _float32,
    ),
    "flux": Specimen(
        {**_FLUX, "pooled_projection_dim": 32, "guidance_embeds": True},
        lambda draw: {**_flux(draw), "pooled_projections": draw.real(32), "guidance": draw.every(3.5)},
        _fraction,
    ),
    "hunyuan-video-1.5": Specimen(
        {
            **_HUNYUAN, "text_embed_2_dim": 8, "image_embed_dim": 12, "rope_axes_dim": (4, 6, 6), "target_size": 16,
            "use_meanflow": True,
        },
        lambda draw: {
            **_hunyuan(draw),
            "encoder_hidden_states_2": draw.real(TEXT, 8),
            "encoder_attention_mask_2": draw.mask,
            "image_embeds": draw.real(3, 12),
            "timestep_r": draw.every(100),
        },
    ),
    "auraflow": Specimen(
        {
            "sample_size": 16, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 2, **_HEADS,
            "joint_attention_dim": 32, "caption_projection_dim": 32, "pos_embed_max_size": 64,
        },
        _image(32),
        _fraction,
    ),
    "longcat-image": Specimen(_FLUX, _flux, _fraction),
    "bria": Specimen(_FLUX, _flux),
    "bria-fibo": Specimen(
        {**_FLUX, "text_encoder_dim": 16},
        lambda draw: {**_flux(draw), "text_encoder_layers": [draw.real(TEXT, 16) for _ in range(3)]},
    ),
    "hunyuan-video": Specimen(
        {**_HUNYUAN, "num_single_layers": 1, "pooled_projection_dim": 8, "rope_axes_dim": (4, 6, 6)},
        lambda draw: {
            **_hunyuan(draw),
            "hidden_states": draw.real(4, 2, 4, 4),
            "pooled_projections": draw.real(8),
            "guidance": draw.every(6000),
        },
        _float32,
    ),
    "hunyuan-video-framepack": Specimen(
        {
            **_HUNYUAN, "num_single_layers": 1, "pooled_projection_dim": 8, "rope_axes_dim": (4, 6, 6),
            "has_image_proj": True, "image_proj_dim": 16, "has_clean_x_embedder": True,
        },
        _framepack,
        _float32,
    ),
    "hunyuan-image": Specimen(
        {
            **_HUNYUAN, "num_single_layers": 1, "text_embed_2_dim": 16, "rope_axes_dim": (8, 8), "use_meanflow": True,
            "guidance_embeds": True,
        },
        lambda draw: {
            **_hunyuan(draw),
            "hidden_states": draw.real(4, 4, 4),
            "encoder_hidden_states_2": draw.real(TEXT, 16),
            "encoder_attention_mask_2": draw.mask,
            "guidance": draw.every(3500),
            "timestep_r": draw.every(100),
        },
    ),
    "cogvideox": Specimen(
        {**_COGVIDEO, "ofs_embed_dim": 8},
        lambda draw: {**_cogvideo(draw), "ofs": torch.full((1,), 2.0)},
        _whole,
    ),
    "consisid": Specimen(_COGVIDEO, _cogvideo, _whole),
    "ovis-image": Specimen({**_FLUX, "out_channels": 4}, _flux, _fraction),
    "cogview3-plus": Specimen({**_COGVIEW, "pos_embed_max_size": 8, "sample_size": 8}, _cogview, _whole),
    "cogview4": Specimen({**_COGVIEW, "pos_embed_max_size": 8, "sample_size": 8, "rope_axes_dim": (8, 8)}, _cogview),
    "glm-image": Specimen({**_COGVIEW, "prior_vq_quantizer_codebook_size": 8}, _glm),
    "dit": Specimen(
        {
            "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "num_layers": 2,
            "sample_size": 8, "num_embeds_ada_norm": 8,
        },
        lambda draw: {"hidden_states": draw.real(4, 8, 8), "class_labels": draw.whole(8)},
        _whole,
    ),
    "mochi": Specimen(
        {
            "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "pooled_projection_dim": 16,
            "in_channels": 4, "text_embed_dim": 16, "time_embed_dim": 8, "max_sequence_length": 16,
        },
        lambda draw: {
            "hidden_states": draw.real(4, 2, 8, 8),
            "encoder_hidden_states": draw.real(TEXT, 16),
            "encoder_attention_mask": draw.mask,
        },
    ),
    "motif-video": Specimen(
        {
            "in_channels": 4, "out_channels": 4, **_HEADS, "num_layers": 1, "num_single_layers": 1,
            "num_decoder_layers": 1, "text_embed_dim": 16, "patch_size": 1, "rope_axes_dim": (4, 6, 6),
        },
        _hunyuan,
        _float32,
    ),
    "easyanimate": Specimen(
        {
            "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "patch_size": 2,
            "num_layers": 2, "mmdit_layers": 1, "text_embed_dim": 16, "time_embed_dim": 8,
        },
        lambda draw: {"hidden_states": draw.real(4, 2, 8, 8), "encoder_hidden_states": draw.real(TEXT, 16)},
    ),
    "lumina2": Specimen(
        {
            "sample_size": 16, "in_channels": 4, "hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1,
            "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2, "axes_dim_rope": (4, 2, 2),
            "axes_lens": (128, 128, 128), "cap_feat_dim": 32,
        },
        lambda draw: {**_image(32)(draw), "encoder_attention_mask": draw.mask},
        _fraction,
    ),
    "prx": Specimen(
        {
            "in_channels": 4, "context_in_dim": 32, "hidden_size": 32, "mlp_ratio": 2.0, "num_heads": 2, "depth": 2,
            "axes_dim": [8, 8],
        },
        _image(32),
        lambda draw, level: torch.full((draw.batch,), level),
    ),
}  # fmt: skip


def write_specimen(class_name: str, specimen: Specimen, folder: Path, dtype: torch.dtype) -> ComponentFolder:
    """Writes the transformer with random weights, so that no projection gives zeros."""
    torch.manual_seed(0)
    model = getattr(diffusers, class_name)(**specimen.config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    folder.mkdir()
    path = folder / "diffusion_pytorch_model.safetensors"
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in model.state_dict().items()}, path)
    return ComponentFolder(
        name="transformer", library="diffusers", class_name=class_name, kind=ComponentKind.MODEL, path=folder,
        config=dict(specimen.config), files=(read_safetensors(path),),
    )  # fmt: skip


@contextmanager
def recorded_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the tensors that the loader takes from files."""
    names: list[str] = []
    tensor = MappedFile.tensor

    def spy(self: MappedFile, name: str) -> torch.Tensor:
        names.append(name)
        return tensor(self, name)

    with monkeypatch.context() as patched:
        patched.setattr(MappedFile, "tensor", spy)
        yield names
