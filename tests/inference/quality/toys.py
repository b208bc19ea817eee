"""Tiny random transformers of the real classes, forwards on them, and an observer that remembers."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import HeliosTransformer3DModel, MiniMaxH3Transformer3DModel
from sojourn.inference.quality.observer import Action, Part
from torch import nn


@dataclass
class Remembering:
    """Counts what it is told."""

    changes: list[tuple[Part, Action]] = field(default_factory=list)
    sites: dict[Part, int] = field(default_factory=dict)
    evaluations: list[bool] = field(default_factory=list)

    def changed(self, *, part: Part, action: Action) -> None:
        self.changes.append((part, action))

    def mounted(self, *, part: Part, sites: int) -> None:
        self.sites[part] = sites

    def evaluated(self, *, skipped: bool) -> None:
        self.evaluations.append(skipped)


def helios(*, layers: int = 3, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> HeliosTransformer3DModel:
    config = {
        "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "text_dim": 16,
        "freq_dim": 16, "ffn_dim": 48, "num_layers": layers, "rope_dim": (4, 6, 6),
    }  # fmt: skip
    return _filled(HeliosTransformer3DModel(**(config | changes)), dtype)


def minimax_h3(*, layers: int = 3, dtype: torch.dtype = torch.bfloat16) -> MiniMaxH3Transformer3DModel:
    model = MiniMaxH3Transformer3DModel(
        num_attention_heads=2, attention_head_dim=16, hidden_size=32, num_layers=layers, num_refiner_layers=1,
        ffn_dim=48, in_channels=4, audio_in_channels=4, patch_size=(1, 2, 2), text_dim=16, freq_dim=16,
        time_embed_hidden_dim=32, time_embed_dim=16, rope_freq_dim=2,
    )  # fmt: skip
    return _filled(model, dtype)


def _filled(model: nn.Module, dtype: torch.dtype) -> Any:
    """Random weights, and gates near 0.3, without which a block hardly changes anything."""
    draw = torch.Generator().manual_seed(0)
    keep = tuple(model._keep_in_fp32_modules)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 100
            noise = torch.randn(parameter.shape, generator=draw) / fan_in**0.5
            parameter.copy_(1 + 0.1 * noise if "norm" in name and parameter.ndim == 1 else noise)
            if not any(part in name for part in keep):
                parameter.data = parameter.data.to(dtype)
    return model.eval().requires_grad_(False)


def h3_inputs(*, batch: int = 1, timestep: float = 0.4, shift: float = 0.0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    video, audio, text = 24, 5, 7
    rows = video + audio + text
    return {
        "hidden_states": torch.randn(batch, video, 16, generator=draw) + shift,
        "audio_hidden_states": torch.randn(batch, audio, 4, generator=draw),
        "encoder_hidden_states": torch.randn(batch, text, 16, generator=draw),
        "timestep": torch.tensor([timestep, timestep / 2]),
        "timestep_indices": torch.cat([torch.zeros(text + video), torch.ones(audio)]).long(),
        "token_tags": torch.cat([torch.ones(text), torch.zeros(video), torch.full((audio,), 2)]).long(),
        "position_ids": torch.arange(3 * rows).view(rows, 3) % 7,
        "video_indices": torch.arange(text, text + video),
        "audio_indices": torch.arange(text + video, rows),
        "text_indices": torch.arange(text),
    }


def helios_inputs(
    *, batch: int = 1, timestep: int = 500, edge: int = 8, shift: float = 0.0, history: bool = True
) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(2)

    def latents(frames: int) -> torch.Tensor:
        return torch.randn(batch, 4, frames, edge, edge, generator=draw)

    inputs = {
        "hidden_states": latents(3) + shift,
        "timestep": torch.full((batch,), timestep),
        "encoder_hidden_states": torch.randn(batch, 5, 16, generator=draw),
        "indices_hidden_states": torch.arange(20, 23)[None].expand(batch, -1),
    }
    for name, frames, first in (("short", 2, 18), ("mid", 2, 16), ("long", 16, 0)):
        if history:
            inputs[f"latents_history_{name}"] = latents(frames)
            inputs[f"indices_latents_history_{name}"] = torch.arange(first, first + frames)[None].expand(batch, -1)
    return inputs


def cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Floating inputs in a dtype, but for the timestep."""
    return {
        name: value.to(dtype) if value.is_floating_point() and name != "timestep" else value
        for name, value in inputs.items()
    }


def bits(output: Any) -> str:
    """A digest of everything that a forward returned."""
    digest = hashlib.sha256()
    for part in output:
        digest.update(str((part.dtype, tuple(part.shape))).encode())
        digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run(model: Any, inputs: dict[str, Any]) -> Any:
    with torch.no_grad():
        return model(**cast(inputs, next(model.proj_out.parameters()).dtype), return_dict=False)
