"""The tiny Helios: each component's config and its initialisation.

Every class is the stock one; only widths and depths are small. The initial values that differ from the class defaults
are here, each with the reason it was needed.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLWan, ClassifierFreeGuidance, HeliosScheduler, HeliosTransformer3DModel
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from tools.demo_model import data
from tools.demo_model.components import round_to_bf16

LATENT_CHANNELS = 16
TEXT_DIM = 32
TEXT_TOKENS = 512  # What the stock text step pads a prompt to.
VOCAB_SIZE = 512
# Of the prompt against the empty one: the better of the two that were tried, on another seed than the evaluation's.
GUIDANCE_SCALE = 2.5

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"

TEXT_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": TEXT_DIM,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
}

# Sixteen pixels a latent: four by the patch, the rest by two halvings. Four frames a latent after the first.
VAE_CONFIG: dict[str, Any] = {
    "base_dim": 16,
    "decoder_base_dim": 24,
    "z_dim": LATENT_CHANNELS,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
    "in_channels": 48,
    "out_channels": 48,
    "patch_size": 4,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * LATENT_CHANNELS,
    "latents_std": [1.0] * LATENT_CHANNELS,
}

DIT_CONFIG: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "in_channels": LATENT_CHANNELS,
    "out_channels": LATENT_CHANNELS,
    "text_dim": TEXT_DIM,
    "freq_dim": 64,
    "ffn_dim": 448,
    "num_layers": 6,
    "rope_dim": (12, 10, 10),
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the prompts, so that each digit word is a single token; prompts end as T5's do."""
    bpe = Tokenizer(models.BPE(unk_token=UNKNOWN))
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, END, UNKNOWN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([*data.prompts(), *data.WORDS], trainer)
    end = bpe.token_to_id(END)
    bpe.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, end)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, model_max_length=TEXT_TOKENS
    )


def build_text_encoder(seed: int) -> UMT5EncoderModel:
    """A random UMT5 whose output still tells tokens apart.

    Embeddings of unit deviation keep the token in front of what the random layers add. It is never trained, and rounded
    at once to bfloat16 so that the transformer learns from the very embeddings the saved checkpoint will produce.
    """
    torch.manual_seed(seed)
    model = UMT5EncoderModel(UMT5Config(**TEXT_CONFIG)).float().eval().requires_grad_(False)
    model.shared.weight.normal_(0.0, 1.0)
    round_to_bf16(model)
    return model


@torch.no_grad()
def embed_prompt(text_encoder: UMT5EncoderModel, tokenizer: PreTrainedTokenizerFast, prompt: str) -> Tensor:
    """Return the `(tokens, 32)` conditioning of one prompt, without the zeros that the stock text step appends."""
    from diffusers.modular_pipelines.helios.encoders import get_t5_prompt_embeds

    embeddings, mask = get_t5_prompt_embeds(text_encoder, tokenizer, prompt, TEXT_TOKENS, torch.device("cpu"))
    return embeddings[0, : int(mask.sum())].float()


def build_vae(seed: int) -> AutoencoderKLWan:
    """The video VAE with the class's own initialisation."""
    torch.manual_seed(seed)
    return AutoencoderKLWan(**VAE_CONFIG)


def build_transformer(seed: int) -> HeliosTransformer3DModel:
    """The transformer, started near an identity with open gates and a silent head.

    The shared projection of the timestep starts small, so that the gates of attention and feed-forward begin near 0.3
    at every noise level.
    """
    torch.manual_seed(seed)
    model = HeliosTransformer3DModel(**DIT_CONFIG)
    with torch.no_grad():
        model.condition_embedder.time_proj.weight.mul_(0.1)
        model.condition_embedder.time_proj.bias.zero_()
        for block in model.blocks:
            block.scale_shift_table[:, (2, 5)] = 0.3
        model.proj_out.weight.zero_()
        model.proj_out.bias.zero_()
    return model


def build_scheduler() -> HeliosScheduler:
    """The scheduler of Helios base: one level, UniPC, shifted by the number of tokens."""
    return HeliosScheduler(stages=1, use_dynamic_shifting=True, scheduler_type="unipc")


def build_guider() -> ClassifierFreeGuidance:
    """The guider of Helios base, at this model's scale."""
    return ClassifierFreeGuidance(guidance_scale=GUIDANCE_SCALE)
