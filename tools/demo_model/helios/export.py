"""Writing the checkpoint as a diffusers modular folder, and loading it as the stock pipeline."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKLWan, HeliosTransformer3DModel, ModularPipeline
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from tools.demo_model import data
from tools.demo_model.helios import components

INDEX_NAME = "modular_model_index.json"
LIBRARY_CLASSES = {
    "guider": ("diffusers", "ClassifierFreeGuidance"),
    "scheduler": ("diffusers", "HeliosScheduler"),
    "text_encoder": ("transformers", "UMT5EncoderModel"),
    "tokenizer": ("transformers", "AutoTokenizer"),
    "transformer": ("diffusers", "HeliosTransformer3DModel"),
    "vae": ("diffusers", "AutoencoderKLWan"),
}


@dataclass(frozen=True)
class Parts:
    """Everything that is saved."""

    transformer: HeliosTransformer3DModel
    vae: AutoencoderKLWan
    text_encoder: UMT5EncoderModel
    tokenizer: PreTrainedTokenizerFast


def index() -> dict[str, Any]:
    """The modular index, all of whose components lie beside it."""
    entries: dict[str, Any] = {
        "_blocks_class_name": "HeliosAutoBlocks",
        "_class_name": "HeliosModularPipeline",
        "_diffusers_version": diffusers.__version__,
        "trained_sizes": [[data.CANVAS_PX, data.CANVAS_PX]],
    }
    for name, (library, class_name) in LIBRARY_CLASSES.items():
        entries[name] = [
            library,
            class_name,
            {
                "pretrained_model_name_or_path": ".",
                "revision": None,
                "subfolder": name,
                "type_hint": [library, class_name],
                "variant": None,
            },
        ]
    return dict(sorted(entries.items()))


def save(parts: Parts, folder: Path) -> None:
    """Write the checkpoint in bfloat16; the parts themselves are cast in place."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("transformer", "vae", "text_encoder"):
        part = getattr(parts, name)
        # Not `part.to`: it warns of the modules that a *loaded* bfloat16 model keeps in float32.
        torch.nn.Module.to(part, torch.bfloat16)
        part.save_pretrained(folder / name)
    components.build_scheduler().save_pretrained(folder / "scheduler")
    components.build_guider().save_pretrained(folder / "guider")
    parts.tokenizer.save_pretrained(folder / "tokenizer")
    (folder / INDEX_NAME).write_text(json.dumps(index(), indent=2) + "\n")


def load(folder: Path) -> ModularPipeline:
    """Load a checkpoint into the stock pipeline, in float32."""
    pipeline = ModularPipeline.from_pretrained(str(folder))
    pipeline.load_components(torch_dtype=torch.float32)
    return pipeline
