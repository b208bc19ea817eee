"""Tiny random models of a family, for tests and benchmarks that must not need a checkpoint.

A tiny model is a whole model folder of the family, with every component by its own class at the smallest sizes that the
classes allow. Equal arguments give equal bytes: each parameter is drawn under a seed made from its own name.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from sojourn.inference.loading.folder import INDEX_NAME
from sojourn.inference.tiny_files import write_json, write_model
from sojourn.inference.tiny_helios import HELIOS_WRITERS
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

_SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>",
    "<|vision_end|>",
)  # fmt: skip
_WORDS = "a moving digit zero one two three four five six seven eight nine picture seconds audio video"
_VISION_PATCH = 8
# MiniMax-H3 reads the hidden state after layer 50 of its text encoder, which therefore has at least 51.
_TEXT_LAYERS = 51
_TEXT_WIDTH = 16


def tiny_random(
    family: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, layers: int = 2
) -> Path:
    """Writes a tiny random model folder.

    Args:
        family: Name of the family, such as "minimax-h3".
        folder: Where to; made if it is not there.
        seed: Of the weights.
        dtype: Of the weights on disk.
        layers: Blocks of the transformer.

    Returns:
        `folder`.

    Raises:
        ValueError: There is no tiny model of that family.
    """
    if family not in _WRITERS:
        raise ValueError(f"no tiny model of family {family!r}; there is one of {', '.join(_WRITERS)}")
    folder.mkdir(parents=True, exist_ok=True)
    _WRITERS[family](folder, seed, dtype, layers)
    return folder


def _write_minimax_h3(folder: Path, seed: int, dtype: torch.dtype, layers: int) -> None:
    vocabulary = _write_tokenizer(folder / "tokenizer")
    _write_tokenizer(folder / "processor")
    write_json(folder / "processor" / "preprocessor_config.json", _image_processor_config("Qwen2VLImageProcessor"))
    video_config = _image_processor_config("Qwen3VLVideoProcessor", key="video_processor_type")
    write_json(folder / "processor" / "video_preprocessor_config.json", video_config)
    write_model(folder / "text_encoder", _text_encoder(vocabulary), seed=seed, dtype=dtype)
    for name in ("transformer", "transformer_ref"):
        write_model(folder / name, _transformer(layers), seed=seed, dtype=dtype)
    write_model(folder / "vae", _vae(), seed=seed, dtype=dtype)
    write_model(folder / "audio_vae", _audio_vae(), seed=seed, dtype=dtype)
    MiniMaxH3Scheduler(shift=12.0).save_config(folder / "scheduler")
    MiniMaxH3Scheduler(shift=3.0).save_config(folder / "audio_scheduler")
    write_json(folder / INDEX_NAME, _minimax_h3_index())


_WRITERS: Mapping[str, Callable[[Path, int, torch.dtype, int], None]] = {
    "minimax-h3": _write_minimax_h3,
    **HELIOS_WRITERS,
}


def _minimax_h3_index() -> dict[str, Any]:
    classes = {
        "audio_scheduler": ("diffusers", "MiniMaxH3Scheduler"),
        "audio_vae": ("diffusers", "AutoencoderKLMiniMaxH3Audio"),
        "processor": ("transformers", "Qwen3VLProcessor"),
        "scheduler": ("diffusers", "MiniMaxH3Scheduler"),
        "text_encoder": ("transformers", "Qwen3VLForConditionalGeneration"),
        "tokenizer": ("transformers", "Qwen2Tokenizer"),
        "transformer": ("diffusers", "MiniMaxH3Transformer3DModel"),
        "transformer_ref": ("diffusers", "MiniMaxH3Transformer3DModel"),
        "vae": ("diffusers", "AutoencoderKLMiniMaxH3"),
    }
    entries = {
        name: [*pair, {"pretrained_model_name_or_path": ".", "revision": None, "subfolder": name,
                       "type_hint": list(pair), "variant": None}]
        for name, pair in classes.items()
    }  # fmt: skip
    return {
        "_class_name": "MiniMaxH3ModularPipeline",
        "_blocks_class_name": "MiniMaxH3Blocks",
        "_diffusers_version": "0.42.1",
        "canvas_short_edge": 32,
        "canvas_max_pixels": 2048,
        "reference_image_short_edge": 32,
        **entries,
    }


def _transformer(layers: int) -> MiniMaxH3Transformer3DModel:
    return MiniMaxH3Transformer3DModel(
        num_attention_heads=2, attention_head_dim=16, hidden_size=32, num_layers=layers, num_refiner_layers=1,
        ffn_dim=32, in_channels=4, audio_in_channels=4, patch_size=(1, 2, 2), text_dim=_TEXT_WIDTH, freq_dim=16,
        time_embed_hidden_dim=32, time_embed_dim=16, rope_freq_dim=2,
    )  # fmt: skip


def _vae() -> AutoencoderKLMiniMaxH3:
    return AutoencoderKLMiniMaxH3(
        latent_channels=4, block_out_channels=(4, 4, 8), layers_per_block=1, spatial_downsample_factors=(2, 2, 2),
        temporal_downsample_factors=(1, 2, 2), norm_num_groups=2, decoder_num_layers=1, decoder_num_attention_heads=1,
        decoder_attention_head_dim=16, decoder_ffn_mult=2, latents_mean=(0.0,) * 4, latents_std=(1.0,) * 4,
    )  # fmt: skip


def _audio_vae() -> AutoencoderKLMiniMaxH3Audio:
    return AutoencoderKLMiniMaxH3Audio(
        encoder_dim=2, latent_dim=8, latent_channels=4, num_attention_heads=2, decoder_dim=32,
        decoder_rates=(5, 5, 4, 4, 2), decoder_kernel_sizes=(9, 9, 8, 8, 4), resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1,),), latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip


def _text_encoder(vocabulary: Mapping[str, int]) -> Qwen3VLForConditionalGeneration:
    text = {
        "hidden_size": _TEXT_WIDTH, "head_dim": 16, "intermediate_size": 16, "num_attention_heads": 1,
        "num_key_value_heads": 1, "num_hidden_layers": _TEXT_LAYERS, "vocab_size": len(vocabulary),
        "max_position_embeddings": 4096, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "patch_size": _VISION_PATCH,
        "out_hidden_size": _TEXT_WIDTH, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True,
        image_token_id=vocabulary["<|image_pad|>"], video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"], vision_end_token_id=vocabulary["<|vision_end|>"],
    )  # fmt: skip
    return Qwen3VLForConditionalGeneration(config)


def _write_tokenizer(folder: Path) -> Mapping[str, int]:
    """Writes a byte-level BPE that knows a few words whole, and returns its vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_WORDS], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": _SPECIAL_TOKENS[0],
            "pad_token": _SPECIAL_TOKENS[0],
            "unk_token": _SPECIAL_TOKENS[0],
        },
    )
    return tokenizer.get_vocab()


def _image_processor_config(class_name: str, *, key: str = "image_processor_type") -> dict[str, Any]:
    return {
        key: class_name,
        "patch_size": _VISION_PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": (2 * _VISION_PATCH) ** 2, "longest_edge": (8 * _VISION_PATCH) ** 2},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
