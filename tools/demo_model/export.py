"""Writing the checkpoint as a diffusers modular folder, and loading it as the stock pipeline."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import ModularPipeline
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3 import AutoencoderKLMiniMaxH3
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3_audio import (
    AutoencoderKLMiniMaxH3Audio,
)
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Transformer3DModel
from transformers import Qwen2Tokenizer, Qwen3VLForConditionalGeneration

from tools.demo_model import components, data, text_only_processor
from tools.demo_model.text_only_processor import TextOnlyProcessor

PROCESSOR_MODULE = "text_only_processor"
INDEX_NAME = "modular_model_index.json"
LIBRARY_CLASSES = {
    "audio_scheduler": ("diffusers", "MiniMaxH3Scheduler"),
    "audio_vae": ("diffusers", "AutoencoderKLMiniMaxH3Audio"),
    "processor": (PROCESSOR_MODULE, "TextOnlyProcessor"),
    "scheduler": ("diffusers", "MiniMaxH3Scheduler"),
    "text_encoder": ("transformers", "Qwen3VLForConditionalGeneration"),
    "tokenizer": ("transformers", "Qwen2Tokenizer"),
    "transformer": ("diffusers", "MiniMaxH3Transformer3DModel"),
    "vae": ("diffusers", "AutoencoderKLMiniMaxH3"),
}


@dataclass(frozen=True)
class Parts:
    """Everything that is saved."""

    transformer: MiniMaxH3Transformer3DModel
    vae: AutoencoderKLMiniMaxH3
    audio_vae: AutoencoderKLMiniMaxH3Audio
    text_encoder: Qwen3VLForConditionalGeneration
    tokenizer: Qwen2Tokenizer


def index() -> dict[str, Any]:
    """The modular index, all of whose components lie beside it."""
    entries: dict[str, Any] = {
        "_blocks_class_name": "MiniMaxH3Blocks",
        "_class_name": "MiniMaxH3ModularPipeline",
        "_diffusers_version": diffusers.__version__,
        "canvas_max_pixels": data.CANVAS_PX**2,
        "canvas_short_edge": data.CANVAS_PX,
        "reference_image_short_edge": 2048,
        "transformer_ref": [None, None, _source(None, "", "diffusers", _TRANSFORMER)],
    }
    for name, (library, class_name) in LIBRARY_CLASSES.items():
        entries[name] = [library, class_name, _source(".", name, library, class_name)]
    return dict(sorted(entries.items()))


_TRANSFORMER = LIBRARY_CLASSES["transformer"][1]


def _source(path: str | None, subfolder: str, library: str, class_name: str) -> dict[str, Any]:
    return {
        "pretrained_model_name_or_path": path,
        "revision": None,
        "subfolder": subfolder,
        "type_hint": [library, class_name],
        "variant": None,
    }


def save(parts: Parts, folder: Path) -> None:
    """Write the checkpoint in bfloat16; the parts themselves are cast in place."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("transformer", "vae", "audio_vae", "text_encoder"):
        part = getattr(parts, name)
        # Not `part.to`: it warns of the modules that a *loaded* bfloat16 model keeps in float32.
        torch.nn.Module.to(part, torch.bfloat16)
        part.save_pretrained(folder / name)
    scheduler, audio_scheduler = components.build_schedulers()
    scheduler.save_pretrained(folder / "scheduler")
    audio_scheduler.save_pretrained(folder / "audio_scheduler")
    parts.tokenizer.save_pretrained(folder / "tokenizer")
    TextOnlyProcessor(parts.tokenizer).save_pretrained(folder / "processor")
    (folder / INDEX_NAME).write_text(json.dumps(index(), indent=2) + "\n")


def load(folder: Path) -> ModularPipeline:
    """Load a checkpoint into the stock pipeline, in float32.

    The processor is handed over by hand, because its class is not part of any library. Diffusers
    refuses to import the module that the index names, so it has to be there beforehand.
    """
    sys.modules.setdefault(PROCESSOR_MODULE, text_only_processor)
    pipeline = ModularPipeline.from_pretrained(str(folder))
    stock = [name for name in LIBRARY_CLASSES if name != "processor"]
    pipeline.load_components(names=stock, torch_dtype=torch.float32)
    pipeline.update_components(processor=TextOnlyProcessor(pipeline.tokenizer))
    return pipeline
