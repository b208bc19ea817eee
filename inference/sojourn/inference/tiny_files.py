"""What a tiny model's folder is written with: seeded weights, and JSON."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write_model(folder: Path, model: Any, *, seed: int, dtype: torch.dtype) -> None:
    """Writes configuration and weights; parameters random, buffers as the class computes them."""
    if hasattr(model, "save_config"):
        model.save_config(folder)
        weights = "diffusion_pytorch_model.safetensors"
    else:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        weights = "model.safetensors"
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    parameters = dict(model.named_parameters())
    tensors = {
        name: (_draw(f"{seed}/{folder.name}/{name}", tensor) if name in parameters else tensor.clone()).to(dtype)
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    save_file(tensors, folder / weights, metadata={"format": "pt"})


def _draw(key: str, like: torch.Tensor) -> torch.Tensor:
    """Draws one parameter: weights keep the size of what passes through, gains are near one, the rest near zero."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"))
    noise = torch.randn(like.shape, generator=generator, dtype=torch.float32)
    is_gain = key.endswith("weight_g") or (like.ndim == 1 and key.endswith(("weight", "scale1", "scale2")))
    if is_gain:
        return 1 + 0.1 * noise
    fan_in = like[0].numel() if like.ndim > 1 else 100
    return noise / fan_in**0.5


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON object, keys in order."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")
