"""MiniMax-H3: text, keyframes or references to video with stereo audio.

Facts come from the stock pipeline object and the model's own configuration wherever they state them; the constants
below are ours, each with its reason. The workflow fl2va runs the same weights as t2va, ref2va runs `transformer_ref`.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.modular_pipelines.minimax_h3 import (
    MiniMaxH3AudioReference,
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
)
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import (
    MINIMAX_H3_FPS,
    MINIMAX_H3_MAX_ASPECT_RATIO,
    MINIMAX_H3_MIN_ASPECT_RATIO,
    resolve_canvas_size,
)
from diffusers.modular_pipelines.minimax_h3.references import MiniMaxH3Reference
from sojourn.inference.errors import FieldViolation
from sojourn.inference.families.family import Family, Medium, Schedule, UsualRequest
from sojourn.inference.offload.activations import Workload
from sojourn.inference.requests import Clip, Defaults, GenerationRequest, Limits, Workflow
from sojourn.inference.watch import Stage

# What the stock blocks take when not told (num_frames and num_inference_steps of the pinned version).
_DEFAULT_FRAMES = 124
_DEFAULT_STEPS = 50
_DEFAULT_ASPECT_RATIO = (16, 9)
# A schedule holds steps - 1 evaluations: 2 is the stock minimum, and more than 1 000 gain nothing a request could want.
_MIN_STEPS, _MAX_STEPS = 2, 1000
# Clips of one request run one after another and hold their place in the queue for as long.
_MAX_COUNT = 16
# A prompt joins one packed sequence of up to about 10^5 rows; the model was shown prompts of hundreds of tokens.
_MAX_PROMPT_TOKENS = 4096
_MAX_CHARACTERS_PER_TOKEN = 8
_MAX_MEDIA_BYTES = 64 * 2**20
# What the stock setup step takes.
_MAX_REFERENCES = {"image": 9, "video": 3, "audio": 3}
_MAX_ALL_REFERENCES = 12
# Tokens that the blocks themselves put where pictures and videos go; in a prompt they would ask for ones that are not.
_PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>")
# The canvases of the model's own rule change at steps of the size multiple; this many ratios between the extremes
# meet each of them, for multiples from 1/64 of the long edge on.
_RATIOS_TRIED = 1025


def _limits(stock: Any) -> Limits:
    """Bounds from the components' configurations.

    The largest canvas is the largest one that the model's own rule gives for any aspect ratio: the rule caps the area
    before it rounds, so this is a little more than `canvas_max_pixels`.
    """
    canvases = _own_canvases(stock)
    frames_step, frames_offset = stock.vae_frames_per_chunk, stock.vae_latents_per_chunk
    first, last = stock.min_duration * stock.fps, stock.max_duration * stock.fps
    positions = stock.text_encoder.config.text_config.max_position_embeddings
    max_prompt_tokens = min(_MAX_PROMPT_TOKENS, positions)
    return Limits(
        size_multiple=stock.canvas_multiple,
        min_edge=stock.canvas_multiple,
        max_edge=max(max(canvas) for canvas in canvases),
        max_pixels=max(width * height for width, height in canvases),
        min_aspect_ratio=MINIMAX_H3_MIN_ASPECT_RATIO,
        max_aspect_ratio=MINIMAX_H3_MAX_ASPECT_RATIO,
        min_frames=math.ceil((first - frames_offset) / frames_step) * frames_step + frames_offset,
        max_frames=math.floor((last - frames_offset) / frames_step) * frames_step + frames_offset,
        frames_step=frames_step,
        frames_offset=frames_offset,
        min_steps=_MIN_STEPS,
        max_steps=_MAX_STEPS,
        max_count=_MAX_COUNT,
        max_prompt_characters=max_prompt_tokens * _MAX_CHARACTERS_PER_TOKEN,
        max_prompt_tokens=max_prompt_tokens,
        max_media_bytes=_MAX_MEDIA_BYTES,
    )


def _own_canvases(stock: Any) -> set[tuple[int, int]]:
    """Returns the canvases (width, height) that the model's rule gives over all aspect ratios."""
    low, high = math.log(MINIMAX_H3_MIN_ASPECT_RATIO), math.log(MINIMAX_H3_MAX_ASPECT_RATIO)
    exponents = (low + (high - low) * index / (_RATIOS_TRIED - 1) for index in range(1, _RATIOS_TRIED - 1))
    ratios = [MINIMAX_H3_MIN_ASPECT_RATIO, *(math.exp(exponent) for exponent in exponents), MINIMAX_H3_MAX_ASPECT_RATIO]
    return {_canvas(stock, ratio, 1) for ratio in ratios}


def _canvas(stock: Any, aspect_width: float, aspect_height: float) -> tuple[int, int]:
    config = stock.config
    height, width = resolve_canvas_size(
        aspect_width, aspect_height, stock.canvas_multiple, config.canvas_short_edge, config.canvas_max_pixels
    )
    return width, height


def _defaults(stock: Any) -> Defaults:
    """Defaults of the stock blocks.

    The default canvas is the stock 16:9 one, but for a model whose `canvas_max_pixels` is no more than the square of
    its `canvas_short_edge`: there the square is the only canvas with that short edge, hence what the model was made
    for, and it is the default.
    """
    square = stock.config.canvas_max_pixels <= stock.config.canvas_short_edge**2
    width, height = _canvas(stock, *((1, 1) if square else _DEFAULT_ASPECT_RATIO))
    return Defaults(
        width=width,
        height=height,
        frames=_DEFAULT_FRAMES,
        steps=_DEFAULT_STEPS,
        flow_shift=float(stock.scheduler.config.shift),
        audio_flow_shift=float(stock.audio_scheduler.config.shift),
    )


def _count_tokens(stock: Any, prompt: str) -> int:
    return len(stock.tokenizer(prompt, add_special_tokens=False)["input_ids"])


def _media_of(request: GenerationRequest) -> frozenset[Medium]:
    media = {Medium.IMAGE for image in (request.first_image, request.last_image) if image is not None}
    kinds = {getattr(reference, "kind", None) for reference in request.references}
    return frozenset(media | {medium for medium in Medium if medium.value in kinds})


def _violations(request: GenerationRequest) -> list[FieldViolation]:
    """What the stock blocks would refuse half way through a run, told before it."""
    found = [
        FieldViolation("prompt", f"holds {token}, which stands for a picture or video; leave it out")
        for token in _PLACEHOLDERS
        if token in request.prompt
    ]
    return found + _reference_violations(list(request.references))


def _reference_violations(references: Sequence[Any]) -> list[FieldViolation]:
    kinds = [reference.kind for reference in references]
    found = []
    for kind, limit in _MAX_REFERENCES.items():
        if kinds.count(kind) > limit:
            found.append(f"holds {kinds.count(kind)} {kind} references, and at most {limit} are taken")
    if len(kinds) > _MAX_ALL_REFERENCES:
        found.append(f"holds {len(kinds)} references, and at most {_MAX_ALL_REFERENCES} are taken")
    if set(kinds) == {"audio"}:
        found.append("holds audio alone; add a picture or a video")
    for index, reference in enumerate(references):
        if reference.kind == "image" and not _is_within_ratio(*reference.image.size):
            width, height = reference.image.size
            found.append(f"picture at {index} is {width}x{height}, and its sides must be within 1:4 and 4:1")
    return [FieldViolation("references", description) for description in found]


def _is_within_ratio(width: int, height: int) -> bool:
    return MINIMAX_H3_MIN_ASPECT_RATIO <= width / height <= MINIMAX_H3_MAX_ASPECT_RATIO


def _reference(kind: str, medium: Any) -> MiniMaxH3Reference:
    """Wraps a decoded medium in diffusers' reference of its kind."""
    if kind == "video":
        return MiniMaxH3VideoReference(
            frames=medium.frames,
            fps=medium.frames_per_second,
            audio=None if medium.audio is None else torch.from_numpy(medium.audio),
            sample_rate=medium.sample_rate,
        )
    if kind == "audio":
        return MiniMaxH3AudioReference(audio=torch.from_numpy(medium.samples), sample_rate=medium.sample_rate)
    return MiniMaxH3ImageReference(image=medium)


def _workload(values: Mapping[str, Any]) -> Workload:
    """A clip of the default length on the model's own largest canvas."""
    pixels = values.get("canvas_max_pixels")
    return Workload(pixels=pixels) if isinstance(pixels, int) and pixels > 0 else Workload()


def _schedule(stock: Any, request: GenerationRequest) -> Schedule:
    """Copies both schedulers, so that neither shift nor position of one request is seen by another."""
    scheduler, audio_scheduler = copy.copy(stock.scheduler), copy.copy(stock.audio_scheduler)
    scheduler.set_shift(request.flow_shift)
    audio_scheduler.set_shift(request.audio_flow_shift)
    scheduler.set_timesteps(request.steps)  # equal grid points after the shift are collapsed: count, do not compute
    return Schedule(
        own={"scheduler": scheduler, "audio_scheduler": audio_scheduler},
        evaluations=len(scheduler.timesteps),
    )


def _inputs(request: GenerationRequest) -> Mapping[str, Any]:
    return {
        "prompt": request.prompt,
        "width": request.width,
        "height": request.height,
        "num_frames": request.frames,
        "num_inference_steps": request.steps,
        "image": request.first_image,
        "last_image": request.last_image,
        "references": list(request.references) or None,
        "output_type": "np",
    }


def _clip(values: Mapping[str, Any]) -> Clip:
    videos, audio = values.get("videos"), values.get("audio")
    return Clip(
        latents=values["latents"].float().cpu(),
        audio_latents=values["audio_latents"].float().cpu(),
        frames=None if videos is None else videos[0],
        audio=None if audio is None else audio[0].float().cpu().numpy(),
        sample_rate=values.get("sampling_rate") or 0,
        frames_per_second=float(MINIMAX_H3_FPS),
    )


MINIMAX_H3 = Family(
    name="minimax-h3",
    pipeline_class="MiniMaxH3ModularPipeline",
    blocks_class="MiniMaxH3Blocks",
    workflows={workflow: workflow.value for workflow in Workflow},
    stages={
        "before_encode": Stage.PREPARE,
        "text_encoder": Stage.TEXT_ENCODE,
        "vae_encoder": Stage.VAE_ENCODE,
        "denoise": Stage.DENOISE,
        "decode": Stage.DECODE,
    },
    media={
        Workflow.T2VA: frozenset(),
        Workflow.FL2VA: frozenset({Medium.IMAGE}),
        Workflow.REF2VA: frozenset({Medium.IMAGE}),
    },
    frames_per_second=float(MINIMAX_H3_FPS),
    limits=_limits,
    defaults=_defaults,
    canvas=_canvas,
    count_tokens=_count_tokens,
    media_of=_media_of,
    violations=_violations,
    # The schedule's 50 points are 49 evaluations.
    usual=UsualRequest(workload=_workload, passes=_DEFAULT_STEPS - 1),
    reference=_reference,
    schedule=_schedule,
    inputs=_inputs,
    clip=_clip,
)
