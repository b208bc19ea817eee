"""The tiny architecture: each component's config and its initialisation.

Every class is the stock one; only widths and depths are small. The initial values that differ from
the class defaults are here, each with the reason it was needed.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3 import AutoencoderKLMiniMaxH3
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3_audio import (
    AutoencoderKLMiniMaxH3Audio,
)
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Transformer3DModel
from diffusers.schedulers.scheduling_minimax_h3 import MiniMaxH3Scheduler
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tools.demo_model import data

LATENT_CHANNELS = 16
AUDIO_CHANNELS = 8
TEXT_DIM = 32
TEXT_LAYER = 50  # The hidden state the pipeline reads, hence 51 layers.
VOCAB_SIZE = 512
VIDEO_SHIFT = 12.0
AUDIO_SHIFT = 3.0

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
)

TEXT_CONFIG: dict[str, Any] = {
    "hidden_size": TEXT_DIM,
    "intermediate_size": 32,
    "num_hidden_layers": TEXT_LAYER + 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 6, 6],
    },
}
VISION_CONFIG: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": TEXT_DIM,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}

VAE_CONFIG: dict[str, Any] = {
    "latent_channels": LATENT_CHANNELS,
    "block_out_channels": (8, 16, 32, 48, 48),
    "layers_per_block": 1,
    "spatial_downsample_factors": (2, 2, 2, 2, 1),
    "temporal_downsample_factors": (1, 2, 2, 1, 1),
    "norm_num_groups": 4,
    "decoder_num_layers": 3,
    "decoder_num_attention_heads": 3,
    "decoder_attention_head_dim": 32,
    "latents_mean": (0.0,) * LATENT_CHANNELS,
    "latents_std": (1.0,) * LATENT_CHANNELS,
}

AUDIO_CONFIG: dict[str, Any] = {
    "encoder_dim": 4,
    "encoder_rates": (2, 4, 4, 5, 5),
    "latent_dim": 32,
    "latent_channels": AUDIO_CHANNELS,
    "num_attention_heads": 2,
    "decoder_dim": 64,
    "decoder_rates": (5, 5, 4, 4, 2),
    "decoder_kernel_sizes": (9, 9, 8, 8, 4),
    "resblock_kernel_sizes": (3,),
    "resblock_dilation_sizes": ((1, 3),),
    "latents_mean": [0.0] * AUDIO_CHANNELS,
    "latents_std": [1.0] * AUDIO_CHANNELS,
}

DIT_CONFIG: dict[str, Any] = {
    "num_attention_heads": 5,
    "attention_head_dim": 32,
    "hidden_size": 160,
    "num_layers": 6,
    "num_refiner_layers": 1,
    "ffn_dim": 448,
    "in_channels": LATENT_CHANNELS,
    "audio_in_channels": AUDIO_CHANNELS,
    "patch_size": (1, 2, 2),
    "text_dim": TEXT_DIM,
    "freq_dim": 64,
    "time_embed_hidden_dim": 128,
    "time_embed_dim": 32,
    "rope_freq_dim": 5,
}


def round_to_bf16(module: nn.Module) -> None:
    """Round every parameter and buffer to its stored precision, keeping the dtype, in place."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.bfloat16().to(tensor.dtype)


def build_tokenizer() -> Qwen2Tokenizer:
    """Train a byte-level BPE on the prompts, so that each digit word is a single token."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([*data.prompts(), *data.WORDS], trainer)
    return Qwen2Tokenizer(tokenizer_object=bpe)


def build_text_encoder(seed: int) -> Qwen3VLForConditionalGeneration:
    """A random Qwen3-VL whose hidden state 50 still tells tokens apart.

    The class default draws embeddings with a deviation of 0.02, which fifty random layers drown;
    unit deviation keeps the token in front. It is never trained, and rounded at once to bfloat16
    so that the transformer learns from the very embeddings the saved checkpoint will produce.
    """
    torch.manual_seed(seed)
    config = Qwen3VLConfig(
        text_config=TEXT_CONFIG,
        vision_config=VISION_CONFIG,
        tie_word_embeddings=True,
        image_token_id=3,
        video_token_id=4,
        vision_start_token_id=5,
        vision_end_token_id=6,
    )
    model = Qwen3VLForConditionalGeneration(config).float().eval().requires_grad_(False)
    model.get_input_embeddings().weight.normal_(0.0, 1.0)
    round_to_bf16(model)
    return model


@torch.no_grad()
def embed_prompt(text_encoder: Qwen3VLForConditionalGeneration, tokenizer: Qwen2Tokenizer, prompt: str) -> Tensor:
    """Return the `(tokens, 32)` conditioning of one prompt, as the stock pipeline computes it."""
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    output = text_encoder.model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=torch.zeros_like(ids),
        use_cache=False,
        output_hidden_states=True,
    )
    return output.hidden_states[TEXT_LAYER][0].float()


def build_vae(seed: int) -> AutoencoderKLMiniMaxH3:
    """The video VAE, started where a short run can learn.

    LayerScale starts at 0.3 instead of 0 (zero blocks learn slowly), the output starts black like
    the canvas, and the latent input is amplified because early latents are small.
    """
    torch.manual_seed(seed)
    vae = AutoencoderKLMiniMaxH3(**VAE_CONFIG)
    decoder = vae.decoder
    with torch.no_grad():
        for block in decoder.transformer_blocks:
            block.scale1.fill_(0.3)
            block.scale2.fill_(0.3)
        decoder.proj_out.bias.fill_(-2.0)
        decoder.proj_out.weight.mul_(0.3)
        decoder.proj_in.weight.mul_(2.0)
        decoder.register_tokens.normal_(0.0, 0.5)
    vae.encoder.to(memory_format=torch.channels_last_3d)
    return vae


def build_audio_vae(seed: int) -> AutoencoderKLMiniMaxH3Audio:
    """The audio VAE with the class's own initialisation."""
    torch.manual_seed(seed)
    return AutoencoderKLMiniMaxH3Audio(**AUDIO_CONFIG)


def build_transformer(seed: int) -> MiniMaxH3Transformer3DModel:
    """The transformer, started near an identity with open gates.

    AdaLN starts small with both gates at 0.3, the output heads at zero, and the time embedder's
    first weight times four, because timesteps arrive unscaled in [0, 1] and hardly differ without.
    """
    torch.manual_seed(seed)
    model = MiniMaxH3Transformer3DModel(**DIT_CONFIG)
    hidden = model.config.hidden_size
    with torch.no_grad():
        for block in model.transformer_blocks:
            linear = block.adaln_proj.linear
            linear.weight.mul_(0.1)
            # Per modality: shift, scale, gate of attention, then of the feed-forward.
            bias = linear.bias.zero_().view(3, 6, hidden)
            bias[:, 2] = 0.3
            bias[:, 5] = 0.3
        for head in (model.proj_out, model.audio_proj_out):
            head.weight.zero_()
            head.bias.zero_()
        model.time_embedder.linear_1.weight.mul_(4.0)
    return model


def build_schedulers() -> tuple[MiniMaxH3Scheduler, MiniMaxH3Scheduler]:
    """The video and the audio scheduler."""
    return MiniMaxH3Scheduler(shift=VIDEO_SHIFT), MiniMaxH3Scheduler(shift=AUDIO_SHIFT)
