"""Which models have modulation projections per block, and how their rows come about. One entry a family.

What has been a trap in other families is in docs/adaln.md; what each saves, in docs/families.md.
"""

from sojourn.inference.adaln import ahead, embedding
from sojourn.inference.adaln.family import Family
from sojourn.inference.adaln.refusals import ModelReason, ModelRefused

MINIMAX_H3 = Family(
    name="minimax-h3",
    embedders=r"time_embedder\.linear_[12]",
    inputs=("timestep",),
    embed=embedding.minimax_h3,
    forwards=ahead.minimax_h3,
    # A step's distinct timesteps: of video and audio; with keyframes, of those; with references, of soundtracks too.
    widths={"t2va": 2, "fl2va": 3, "ref2va": 4},
)

_SIZES = ("original_size", "target_size", "crop_coords")

FAMILIES: tuple[Family, ...] = (
    MINIMAX_H3,
    Family(
        name="qwen-image",
        embedders=r"time_text_embed\..+",
        inputs=("timestep", "additional_t_cond"),
        embed=embedding.qwen_image,
        forwards=ahead.qwen_image,
        # The image's projections then run on twice as many rows as the text's.
        unsupported={"zero_cond_t": True},
    ),
    Family(
        name="sd3",
        embedders=r"time_text_embed\..+",
        inputs=("timestep", "pooled_projections"),
        embed=embedding.sd3,
        forwards=ahead.sd3,
        reusable=False,
    ),
    Family(
        name="flux",
        embedders=r"time_text_embed\..+",
        inputs=("timestep", "guidance", "pooled_projections"),
        embed=embedding.flux,
        forwards=ahead.flux,
        reusable=False,
    ),
    Family(
        name="hunyuan-video-1.5",
        embedders=r"time_embed\..+",
        inputs=("timestep", "timestep_r"),
        embed=embedding.hunyuan_video_15,
        forwards=ahead.hunyuan_video_15,
    ),
    Family(
        name="auraflow",
        embedders=r"time_step_proj\..+",
        inputs=("timestep",),
        embed=embedding.auraflow,
    ),
    Family(
        name="longcat-image",
        embedders=r"time_embed\..+",
        inputs=("timestep",),
        embed=embedding.longcat_image,
    ),
    Family(
        name="bria",
        embedders=r"time_embed\..+",
        inputs=("timestep",),
        embed=embedding.bria,
    ),
    Family(
        name="bria-fibo",
        embedders=r"(time|guidance)_embed\..+",
        inputs=("timestep", "guidance"),
        embed=embedding.bria,
    ),
    Family(
        name="hunyuan-video",
        embedders=r"time_text_embed\..+",
        inputs=("timestep", "guidance", "pooled_projections"),
        embed=embedding.hunyuan_video,
        reusable=False,
        variants={("image_condition_type", "token_replace"): {"calls": embedding.hunyuan_video_clean_frame}},
    ),
    Family(
        name="hunyuan-video-framepack",
        embedders=r"time_text_embed\..+",
        inputs=("timestep", "guidance", "pooled_projections"),
        embed=embedding.hunyuan_video,
        reusable=False,
    ),
    Family(
        name="hunyuan-image",
        embedders=r"time_guidance_embed\..+",
        inputs=("timestep", "timestep_r", "guidance"),
        embed=embedding.hunyuan_image,
    ),
    Family(
        name="cogvideox",
        embedders=r"(time|ofs)_embedding\..+",
        inputs=("timestep", "timestep_cond", "ofs"),
        embed=embedding.cogvideox,
    ),
    Family(
        name="consisid",
        embedders=r"time_embedding\..+",
        inputs=("timestep", "timestep_cond"),
        embed=embedding.timestep_alone,
    ),
    Family(
        name="ovis-image",
        embedders=r"timestep_embedder\..+",
        inputs=("timestep",),
        embed=embedding.ovis_image,
    ),
    Family(
        name="cogview3-plus",
        embedders=r"time_condition_embed\..+",
        inputs=("timestep", *_SIZES),
        embed=embedding.cogview,
    ),
    Family(
        name="cogview4",
        embedders=r"time_condition_embed\..+",
        inputs=("timestep", *_SIZES),
        embed=embedding.cogview,
    ),
    Family(
        name="glm-image",
        embedders=r"time_condition_embed\..+",
        inputs=("timestep", "target_size", "crop_coords"),
        embed=embedding.glm_image,
    ),
    Family(
        name="dit",
        embedders=r"transformer_blocks\.\d+\.norm1\.emb\..+",
        inputs=("timestep", "class_labels"),
        embed=embedding.dit,
    ),
    Family(
        name="mochi",
        embedders=r"time_embed\..+",
        inputs=("timestep", "encoder_hidden_states", "encoder_attention_mask"),
        embed=embedding.mochi,
        reusable=False,
    ),
    Family(
        name="motif-video",
        embedders=r"time_text_embed\..+",
        inputs=("timestep",),
        embed=embedding.motif_video,
    ),
    Family(
        name="easyanimate",
        embedders=r"time_embedding\..+",
        inputs=("timestep", "timestep_cond"),
        embed=embedding.timestep_alone,
        sizes={"patch_size": 2, "in_channels": 16, "out_channels": 16},
    ),
    Family(
        name="lumina2",
        embedders=r"time_caption_embed\.timestep_embedder\..+",
        inputs=("timestep",),
        embed=embedding.lumina2,
    ),
    Family(
        name="prx",
        embedders=r"time_in\..+",
        inputs=("timestep",),
        embed=embedding.prx,
        # The extents of the latents then enter the embedding.
        unsupported={"resolution_embeds": True},
    ),
)

WITHOUT_PROJECTION = (
    "Helios",
    "Wan",
    "SkyReelsV2",
    "ChronoEdit",
    "AnyFlow",
    "LTX",
    "Sana",
    "PixArt",
    "Allegro",
    "Latte",
    "Flux2",
    "Flux3",
    "Chroma",
    "ErnieImage",
    "JoyImage",
    "Krea2",
    "QwenImage21",
    "OmniGen",
    "Cosmos3",
    "StableAudio",
    "AceStep",
    "MiniMaxMusic3",
    "RFD4",
)
"""Classes by the beginning of their names: one projection is shared by all blocks, there is next to nothing to save."""


def family_named(name: str) -> Family:
    """The family of a name that `overrides.check_overrides` has found known."""
    return next(family for family in FAMILIES if family.name == name)


def family_of(transformer: str) -> Family:
    """The family of a transformer class.

    Raises:
        ModelRefused: The class has no per-block projection, or none that is known here.
    """
    for family in FAMILIES:
        if family.transformer == transformer:
            return family
    if transformer.startswith(WITHOUT_PROJECTION):
        raise ModelRefused(
            ModelReason.NO_PROJECTION,
            f"{transformer} has no modulation projection per block, nothing to cache; set --adaln-cache off",
        )
    raise ModelRefused(
        ModelReason.NO_PROJECTION,
        f"{transformer} is not a family that the plan cache knows ({', '.join(f.transformer for f in FAMILIES)}); set "
        "--adaln-cache off, or --adaln-family where its forward is that of one of these",
    )
