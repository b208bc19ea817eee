"""Helios: text, or a first frame, to video of any length, chunk by chunk.

A chunk is 9 latent frames, which are 33 frames; what it is told of the clip before it are 19 latent frames and the
first one. The releases differ in their settings alone (`helios_settings`). The denoising loops sit inside blocks, so
steps are seen from the request's own scheduler.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diffusers import ClassifierFreeGuidance, ClassifierFreeZeroStarGuidance
from diffusers.modular_pipelines.helios import denoise
from diffusers.modular_pipelines.helios.encoders import prompt_clean
from sojourn.inference.errors import FieldViolation
from sojourn.inference.families.family import Family, Loop, Medium, Schedule, UsualRequest
from sojourn.inference.families.helios_decode import DecodeExactly
from sojourn.inference.families.helios_noise import block_noise
from sojourn.inference.families.helios_settings import BASE, DISTILLED, MID, TRAINED_SIZES, HeliosSettings
from sojourn.inference.families.helios_text import keep_text, keeping_text
from sojourn.inference.offload.activations import Workload
from sojourn.inference.requests import Clip, Defaults, GenerationRequest, Limits, Workflow
from sojourn.inference.watch import Stage

# Names that the stock loops look up: the noise, and a bar on stderr that nothing else turns off.
denoise.sample_block_noise = block_noise
denoise.tqdm = functools.partial(denoise.tqdm, disable=True)

# Frames of a chunk: 9 latent frames of 4, but for the first of each chunk, which is one.
CHUNK_FRAMES = 33
_FRAMES_PER_SECOND = 24.0
# What the stock blocks take when not told: 4 chunks.
_DEFAULT_FRAMES = 132
# A minute. A clip of n frames is held as float32 pixels at once: 4.3 GiB at 640×384.
_MAX_FRAMES = 44 * CHUNK_FRAMES
# The solver needs no more than one step; more than 1 000 timesteps there are not.
_MIN_STEPS, _MAX_STEPS = 1, 1000
_MAX_COUNT = 16
# The stock text step pads to so many tokens and cuts what is longer, silently; we refuse it.
_MAX_PROMPT_TOKENS = 512
_MAX_CHARACTERS_PER_TOKEN = 8
_MAX_MEDIA_BYTES = 64 * 2**20
# A patch is 16 pixels wide, where MiniMax-H3's is 32, and the rows of the history add up to a quarter more.
_DENSITY = 5
# A ratio further from every trained one would be something else than what was asked for.
_MIN_ASPECT_RATIO, _MAX_ASPECT_RATIO = 1 / 2, 2.0


def chunks_of(frames: int) -> int:
    """Chunks that so many frames take."""
    return math.ceil(frames / CHUNK_FRAMES)


def _size_multiple(settings: HeliosSettings, stock: Any) -> int:
    """Pixels: a patch of latents at the lowest level, on the full canvas."""
    patch = max(stock.transformer.config.patch_size[1:])
    return int(stock.vae_scale_factor_spatial * patch * 2 ** (settings.levels - 1))


def _trained_sizes(values: Mapping[str, Any]) -> Sequence[tuple[int, int]]:
    """What the index says (`trained_sizes`), else the releases' sizes."""
    sizes: Sequence[tuple[int, int]] = values.get("trained_sizes") or TRAINED_SIZES
    return sizes


def _sizes(settings: HeliosSettings, stock: Any) -> tuple[tuple[int, int], ...]:
    """What a model was trained for.

    Without those that its levels cannot halve: 480 pixels are 60 latents, and 15 at the lowest of three levels is no
    whole number of patches; the stock blocks fail on them half way through.
    """
    multiple = _size_multiple(settings, stock)
    trained = _trained_sizes(stock.config)
    return tuple((width, height) for width, height in trained if width % multiple == height % multiple == 0)


def _limits(settings: HeliosSettings, stock: Any) -> Limits:
    sizes = _sizes(settings, stock)
    return Limits(
        size_multiple=_size_multiple(settings, stock),
        min_edge=_size_multiple(settings, stock),
        max_edge=max(max(size) for size in sizes),
        max_pixels=max(width * height for width, height in sizes),
        min_aspect_ratio=_MIN_ASPECT_RATIO,
        max_aspect_ratio=_MAX_ASPECT_RATIO,
        min_frames=1,
        max_frames=_MAX_FRAMES,
        frames_step=1,
        frames_offset=0,
        min_steps=_MIN_STEPS,
        max_steps=_MAX_STEPS,
        max_count=_MAX_COUNT,
        max_prompt_characters=_MAX_PROMPT_TOKENS * _MAX_CHARACTERS_PER_TOKEN,
        max_prompt_tokens=_MAX_PROMPT_TOKENS,
        max_media_bytes=_MAX_MEDIA_BYTES,
        max_flow_shift=0.0,
        trained_sizes=sizes,
    )


def _defaults(settings: HeliosSettings, stock: Any) -> Defaults:
    width, height = _sizes(settings, stock)[0]
    return Defaults(
        width=width, height=height, frames=_DEFAULT_FRAMES, steps=settings.steps, flow_shift=0.0, audio_flow_shift=0.0
    )


def _canvas(settings: HeliosSettings, stock: Any, aspect_width: float, aspect_height: float) -> tuple[int, int]:
    """The trained size whose ratio is nearest."""
    ratio = aspect_width / aspect_height
    if not _MIN_ASPECT_RATIO <= ratio <= _MAX_ASPECT_RATIO:
        raise ValueError(f"{aspect_width}:{aspect_height} is not within 1:2 to 2:1")
    return min(_sizes(settings, stock), key=lambda size: abs(math.log(size[0] / size[1] / ratio)))


def _count_tokens(stock: Any, prompt: str) -> int:
    """As the stock text step counts them, with the token that ends a prompt."""
    return len(stock.tokenizer(prompt_clean(prompt))["input_ids"])


def _media_of(request: GenerationRequest) -> frozenset[Medium]:
    """None: the first frame goes through the VAE alone."""
    return frozenset()


def _violations(request: GenerationRequest) -> list[FieldViolation]:
    if request.last_image is None:
        return []
    return [FieldViolation("keyframes", "Helios goes forward from a first keyframe; leave the last one out")]


def _reference(kind: str, medium: object) -> object:
    raise ValueError(f"Helios takes no {kind} references; leave them out")


def _workload(values: Mapping[str, Any]) -> Workload:
    """A chunk of the largest trained size."""
    sizes = _trained_sizes(values)
    return Workload(pixels=max(width * height for width, height in sizes), frames=CHUNK_FRAMES, density=_DENSITY)


def _passes(settings: HeliosSettings) -> int:
    chunk = settings.steps * settings.levels
    steps = chunk * (chunks_of(_DEFAULT_FRAMES) + settings.amplifies_first_chunk)
    return steps * (2 if settings.guidance_scale > 1 else 1)


def _schedule(settings: HeliosSettings, stock: Any, request: GenerationRequest) -> Schedule:
    """A scheduler and a guider of the request's own.

    Both keep a state from step to step, and a pyramid that stops half way would leave the guider without its zero
    steps.
    """
    scheduler = type(stock.scheduler).from_config(stock.scheduler.config)
    guider = type(stock.guider).from_config(stock.guider.config)
    chunks = chunks_of(request.frames)
    first = _steps_of_chunk(settings, scheduler, request.steps, amplified=settings.amplifies_first_chunk)
    later = _steps_of_chunk(settings, scheduler, request.steps, amplified=False)
    return Schedule(own={"scheduler": scheduler, "guider": guider}, evaluations=first + (chunks - 1) * later)


def _steps_of_chunk(settings: HeliosSettings, scheduler: Any, steps: int, *, amplified: bool) -> int:
    """Steps over all levels of a chunk, as the scheduler itself counts them."""
    total = 0
    for level in range(settings.levels):
        if settings.levels == 1:
            scheduler.set_timesteps(steps, sigmas=np.linspace(0.999, 0.0, steps + 1)[:-1], mu=1.0)
        else:
            scheduler.set_timesteps(steps, level, mu=1.0, is_amplify_first_chunk=amplified)
        total += len(scheduler.timesteps)
    return total


def _inputs(settings: HeliosSettings, request: GenerationRequest) -> Mapping[str, Any]:
    steps: dict[str, Any] = {"num_inference_steps": request.steps}
    if settings.levels > 1:
        steps = {"pyramid_num_inference_steps_list": [request.steps] * settings.levels}
    return steps | {
        "prompt": request.prompt,
        "width": request.width,
        "height": request.height,
        "num_frames": request.frames,
        "image": request.first_image,
        "is_amplify_first_chunk": settings.amplifies_first_chunk,
        "output_type": "np",
    }


def _clip(values: Mapping[str, Any]) -> Clip:
    """Latents of all chunks, also of frames beyond those asked for."""
    videos = values.get("videos")
    return Clip(
        latents=torch.cat(values["latent_chunks"], dim=2).float().cpu(),
        audio_latents=None,
        frames=None if videos is None else videos[0],
        audio=None,
        sample_rate=0,
        frames_per_second=_FRAMES_PER_SECOND,
    )


def _guider(settings: HeliosSettings) -> Any:
    if settings.zero_init_steps is None:
        return ClassifierFreeGuidance(guidance_scale=settings.guidance_scale)
    return ClassifierFreeZeroStarGuidance(
        guidance_scale=settings.guidance_scale, zero_init_steps=settings.zero_init_steps
    )


def _is_classic(settings: HeliosSettings, pipeline_class: str, values: Mapping[str, Any]) -> bool:
    """Mid and distilled have one class; the index tells them apart, as it does for diffusers."""
    distilled = bool(values.get("is_distilled", False))
    return pipeline_class == settings.classic_class and distilled == settings.amplifies_first_chunk


def _adapt(stock: Any) -> None:
    if stock.transformer is not None:
        keep_text(stock.transformer)


def _family(settings: HeliosSettings) -> Family:
    bound: Sequence[Any] = [
        functools.partial(function, settings) for function in (_limits, _defaults, _canvas, _schedule, _inputs)
    ]
    limits, defaults, canvas, schedule, inputs = bound
    return Family(
        name=settings.name,
        pipeline_class=settings.pipeline_class,
        blocks_class=settings.blocks_class,
        workflows={Workflow.T2VA: "text2video", Workflow.FL2VA: "image2video"},
        stages={
            "text_encoder": Stage.TEXT_ENCODE,
            "vae_encoder": Stage.VAE_ENCODE,
            "denoise": Stage.DENOISE,
            "decode": Stage.DECODE,
        },
        replaced={"decode": DecodeExactly},
        companions={"guider": functools.partial(_guider, settings)},
        loop=Loop(scheduler="scheduler", frames=lambda frames: CHUNK_FRAMES),
        media={Workflow.T2VA: frozenset(), Workflow.FL2VA: frozenset()},
        frames_per_second=_FRAMES_PER_SECOND,
        limits=limits,
        defaults=defaults,
        canvas=canvas,
        count_tokens=_count_tokens,
        media_of=_media_of,
        violations=_violations,
        usual=UsualRequest(workload=_workload, passes=_passes(settings)),
        reference=_reference,
        schedule=schedule,
        inputs=inputs,
        clip=_clip,
        adapt=_adapt,
        memory=keeping_text,
        is_classic=functools.partial(_is_classic, settings),
    )


HELIOS = tuple(_family(settings) for settings in (BASE, MID, DISTILLED))
