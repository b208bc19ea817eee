"""How each class of transformers makes, from the arguments of a forward, what its projections read.

These are the first lines of the classes' forwards (diffusers 0.42.1) on the classes' own embedders, which stay in the
model: same modules, same casts, same row count, and so the same bits. Mind that the dtype of the embedding follows the
timestep in some classes, the pooled text, the hidden states or a parameter in others. Hidden states have the dtype of
the embedder, since its first product would fail otherwise.
"""

from collections.abc import Mapping

import torch
from sojourn.inference.adaln.family import Inputs
from torch import nn
from torch.nn import functional

silu = functional.silu


def minimax_h3(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """In the time embedder's own precision: float32 in released checkpoints."""
    sinusoid = transformer.time_proj(inputs["timestep"])
    return silu(transformer.time_embedder(sinusoid.to(_dtype(transformer.time_embedder))))


def qwen_image(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """The timestep is rounded to the hidden states' dtype first; layered checkpoints add the embedding of an id."""
    embedder = transformer.time_text_embed
    hidden = torch.empty(0, dtype=_dtype(embedder.timestep_embedder))
    timestep = inputs["timestep"].to(hidden.dtype)
    return silu(embedder(timestep, hidden, inputs.get("additional_t_cond")))


def sd3(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """Timestep and pooled text, in the dtype of the latter."""
    return silu(transformer.time_text_embed(inputs["timestep"], inputs["pooled_projections"]))


def flux(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """Timestep and guidance are rounded to the hidden states' dtype, then scaled."""
    dtype = _dtype(transformer.time_text_embed.timestep_embedder)
    given = [inputs[name].to(dtype) * 1000 for name in ("timestep", "guidance") if name in inputs]
    return silu(transformer.time_text_embed(*given, inputs["pooled_projections"]))


def hunyuan_video_15(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """In the timestep's dtype."""
    return silu(transformer.time_embed(inputs["timestep"], timestep_r=inputs.get("timestep_r")))


def hunyuan_image(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """In the timestep's dtype."""
    return silu(
        transformer.time_guidance_embed(
            inputs["timestep"], guidance=inputs.get("guidance"), timestep_r=inputs.get("timestep_r")
        )
    )


def hunyuan_video(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """Timestep, guidance and pooled text, in the dtype of the latter; the clean frame is never guided."""
    embedder, timestep, pooled = transformer.time_text_embed, inputs["timestep"], inputs["pooled_projections"]
    if "guidance" not in inputs:
        return silu(
            embedder.timestep_embedder(embedder.time_proj(timestep).to(pooled.dtype)) + embedder.text_embedder(pooled)
        )
    conditioning, _ = embedder(timestep, pooled, inputs["guidance"])
    return silu(conditioning)


def hunyuan_video_clean_frame(inputs: Inputs) -> tuple[Inputs, ...]:
    """From an image: projections of the video run again for the first frame, which is clean."""
    clean = {name: value for name, value in inputs.items() if name != "guidance"}
    return inputs, {**clean, "timestep": torch.zeros_like(inputs["timestep"])}


def auraflow(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """In the dtype of the model's first parameter."""
    sinusoid = transformer.time_step_embed(inputs["timestep"]).to(dtype=next(transformer.parameters()).dtype)
    return silu(transformer.time_step_proj(sinusoid))


def longcat_image(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """The timestep is rounded to the hidden states' dtype, then scaled."""
    dtype = _dtype(transformer.time_embed.timestep_embedder)
    return silu(transformer.time_embed(inputs["timestep"].to(dtype) * 1000, dtype))


def bria(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """Timestep and guidance, which Bria FIBO alone can be given, are rounded to the hidden states' dtype."""
    dtype = _dtype(transformer.time_embed.timestep_embedder)
    embedding = transformer.time_embed(inputs["timestep"].to(dtype), dtype=dtype)
    if "guidance" in inputs:
        embedding = embedding + transformer.guidance_embed(inputs["guidance"].to(dtype), dtype=dtype)
    return silu(embedding)


def cogvideox(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """CogVideoX 1.5 adds the embedding of a constant, `ofs`."""
    dtype = _dtype(transformer.time_embedding)
    sinusoid = transformer.time_proj(inputs["timestep"]).to(dtype)
    embedding = transformer.time_embedding(sinusoid, inputs.get("timestep_cond"))
    if "ofs" in inputs and transformer.ofs_embedding is not None:
        embedding = embedding + transformer.ofs_embedding(transformer.ofs_proj(inputs["ofs"]).to(dtype))
    return silu(embedding)


def timestep_alone(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """ConsisID, EasyAnimate: as CogVideoX without `ofs`."""
    sinusoid = transformer.time_proj(inputs["timestep"]).to(_dtype(transformer.time_embedding))
    return silu(transformer.time_embedding(sinusoid, inputs.get("timestep_cond")))


def ovis_image(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """The timestep is rounded to the hidden states' dtype, then scaled."""
    dtype = _dtype(transformer.timestep_embedder)
    sinusoid = transformer.time_proj(inputs["timestep"].to(dtype) * 1000)
    return silu(transformer.timestep_embedder(sinusoid.to(dtype)))


def cogview(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """Timestep, sizes and crop. CogView3 takes SiLU in each norm, CogView4 once for all of them."""
    embedder = transformer.time_condition_embed
    conditions = [inputs[name] for name in ("original_size", "target_size", "crop_coords")]
    return silu(embedder(inputs["timestep"], *conditions, _dtype(embedder.timestep_embedder)))


def glm_image(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """Timestep, size and crop; SiLU is within the embedder."""
    embedder = transformer.time_condition_embed
    dtype = _dtype(embedder.timestep_embedder)
    return embedder(inputs["timestep"], inputs["target_size"], inputs["crop_coords"], dtype)


def dit(transformer: nn.Module, inputs: Inputs) -> Mapping[str, torch.Tensor]:
    """Timestep and class; every block has an embedder of its own, and the final layer reads that of the first."""
    embedded = {
        f"transformer_blocks.{index}.norm1.linear": silu(
            block.norm1.emb(inputs["timestep"], inputs["class_labels"], hidden_dtype=_dtype(block.norm1.emb))
        )
        for index, block in enumerate(transformer.transformer_blocks)
    }
    return {**embedded, "proj_out_1": embedded["transformer_blocks.0.norm1.linear"]}


def mochi(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """Timestep and text, which is pooled here."""
    embedder = transformer.time_embed
    conditioning, _ = embedder(
        inputs["timestep"],
        inputs["encoder_hidden_states"],
        inputs["encoder_attention_mask"],
        hidden_dtype=_dtype(embedder.timestep_embedder),
    )
    return silu(conditioning)


def motif_video(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """In the embedder's own precision."""
    return silu(transformer.time_text_embed(inputs["timestep"]))


def lumina2(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """The caption is embedded beside and does not enter."""
    embedder = transformer.time_caption_embed
    sinusoid = embedder.time_proj(inputs["timestep"]).to(_dtype(embedder.timestep_embedder))
    return silu(embedder.timestep_embedder(sinusoid))


def prx(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    """By the class's own method."""
    return silu(transformer._compute_timestep_embedding(inputs["timestep"], dtype=_dtype(transformer.time_in)))


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype
