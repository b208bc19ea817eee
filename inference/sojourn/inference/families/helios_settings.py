"""What differs between the releases of Helios: one frozen record each.

Guidance, levels and the amplified first chunk are those of the stock blocks of the pinned diffusers; steps are the
published ones where the stock blocks have another default (Helios-Mid: 20 a level, not 10).
"""

from dataclasses import dataclass

# Width × height in pixels that the releases were trained for. Others jump visibly (Helios issue 2).
TRAINED_SIZES = ((640, 384), (384, 640), (832, 480), (480, 832))


@dataclass(frozen=True, kw_only=True)
class HeliosSettings:
    """One release of Helios.

    Attributes:
        name: Of the family that it makes.
        pipeline_class: As a modular index names it.
        classic_class: As an index that is not modular names it.
        blocks_class: Its blocks in diffusers.
        steps: Of each level of each chunk, unless the request says.
        levels: Resolutions that a chunk is denoised at, each twice the edge of the one before; 1 for no pyramid.
        guidance_scale: Of the prompt against the empty one; 1 for none.
        zero_init_steps: Steps of the first level whose prediction is zero (CFG-Zero*); None for plain guidance.
        amplifies_first_chunk: Whether the first chunk gets twice the steps.
    """

    name: str
    pipeline_class: str
    classic_class: str
    blocks_class: str
    steps: int
    levels: int
    guidance_scale: float
    zero_init_steps: int | None
    amplifies_first_chunk: bool


BASE = HeliosSettings(
    name="helios-base",
    pipeline_class="HeliosModularPipeline",
    classic_class="HeliosPipeline",
    blocks_class="HeliosAutoBlocks",
    steps=50,
    levels=1,
    guidance_scale=5.0,
    zero_init_steps=None,
    amplifies_first_chunk=False,
)

MID = HeliosSettings(
    name="helios-mid",
    pipeline_class="HeliosPyramidModularPipeline",
    classic_class="HeliosPyramidPipeline",
    blocks_class="HeliosPyramidAutoBlocks",
    steps=20,
    levels=3,
    guidance_scale=5.0,
    zero_init_steps=2,
    amplifies_first_chunk=False,
)

DISTILLED = HeliosSettings(
    name="helios-distilled",
    pipeline_class="HeliosPyramidDistilledModularPipeline",
    classic_class="HeliosPyramidPipeline",
    blocks_class="HeliosPyramidDistilledAutoBlocks",
    steps=2,
    levels=3,
    guidance_scale=1.0,
    zero_init_steps=None,
    amplifies_first_chunk=True,
)
