"""Tiny random models of Helios: base, mid and distilled differ in scheduler, guider and pipeline class alone."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, HeliosDMDScheduler, HeliosScheduler, HeliosTransformer3DModel
from sojourn.inference.families.helios_settings import BASE, DISTILLED, MID, HeliosSettings
from sojourn.inference.loading.folder import INDEX_NAME
from sojourn.inference.tiny_files import write_json, write_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import UMT5Config, UMT5EncoderModel

_PAD, _END, _UNKNOWN = "<pad>", "</s>", "<unk>"
_WORDS = "a moving digit zero one two three four five six seven eight nine"
_TEXT_WIDTH = 16
# The smallest canvas that three levels can halve: 8 latents, a patch at the lowest level.
_SIZES = [[64, 64], [128, 64]]


def _write(settings: HeliosSettings, folder: Path, seed: int, dtype: torch.dtype, layers: int) -> None:
    words = _write_tokenizer(folder / "tokenizer")
    text = UMT5Config(vocab_size=words, d_model=_TEXT_WIDTH, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    write_model(folder / "text_encoder", UMT5EncoderModel(text), seed=seed, dtype=dtype)
    write_model(folder / "transformer", _transformer(layers), seed=seed, dtype=dtype)
    write_model(folder / "vae", _vae(), seed=seed, dtype=dtype)
    scheduler = _scheduler(settings)
    scheduler.save_config(folder / "scheduler")
    write_json(folder / INDEX_NAME, _index(settings, type(scheduler).__name__))


def _scheduler(settings: HeliosSettings) -> HeliosScheduler | HeliosDMDScheduler:
    if settings.amplifies_first_chunk:
        return HeliosDMDScheduler(stages=settings.levels, use_dynamic_shifting=True)
    return HeliosScheduler(stages=settings.levels, use_dynamic_shifting=True)


def _index(settings: HeliosSettings, scheduler_class: str) -> dict[str, object]:
    classes = {
        "scheduler": ("diffusers", scheduler_class),
        "text_encoder": ("transformers", "UMT5EncoderModel"),
        "tokenizer": ("transformers", "AutoTokenizer"),
        "transformer": ("diffusers", "HeliosTransformer3DModel"),
        "vae": ("diffusers", "AutoencoderKLWan"),
    }
    entries: dict[str, object] = {
        name: [*pair, {"pretrained_model_name_or_path": ".", "revision": None, "subfolder": name,
                       "type_hint": list(pair), "variant": None}]
        for name, pair in classes.items()
    }  # fmt: skip
    return entries | {
        "_class_name": settings.pipeline_class,
        "_blocks_class_name": settings.blocks_class,
        "_diffusers_version": "0.42.1",
        "trained_sizes": _SIZES,
    }


def _transformer(layers: int) -> HeliosTransformer3DModel:
    return HeliosTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=_TEXT_WIDTH, freq_dim=16,
        ffn_dim=32, num_layers=layers, rope_dim=(4, 4, 4),
    )  # fmt: skip


def _vae() -> AutoencoderKLWan:
    """Eight pixels a latent: two by the patch, the rest by two halvings."""
    return AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1], num_res_blocks=1, temperal_downsample=[True, True], in_channels=12,
        out_channels=12, patch_size=2, latents_mean=[0.1, 0.0, -0.1, 0.2], latents_std=[1.0, 0.9, 1.1, 1.0],
    )  # fmt: skip


def _write_tokenizer(folder: Path) -> int:
    """Writes a byte-level BPE whose prompts end as T5's do, and returns the size of its vocabulary."""
    tokenizer = Tokenizer(models.BPE(unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[_PAD, _END, _UNKNOWN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_WORDS], trainer)
    end = (_END, tokenizer.token_to_id(_END))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {_END}", special_tokens=[end])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END,
        "pad_token": _PAD,
        "unk_token": _UNKNOWN,
    }
    write_json(folder / "tokenizer_config.json", config)
    return tokenizer.get_vocab_size()


HELIOS_WRITERS: Mapping[str, Callable[[Path, int, torch.dtype, int], None]] = {
    settings.name: functools.partial(_write, settings) for settings in (BASE, MID, DISTILLED)
}
