"""A request as the engine sees it: complete, validated, frozen; nothing in it is shared with another request."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from PIL import Image

SEED_BITS = 64


class Workflow(StrEnum):
    """What conditions the generation; the names are those of the diffusers workflows."""

    T2VA = "t2va"
    FL2VA = "fl2va"
    REF2VA = "ref2va"


class QualityTier(StrEnum):
    """How far the result may be from that of the stock pipeline."""

    LOSSLESS = "lossless"
    EXTRA_HIGH = "extra-high"
    HIGH = "high"


class OutputFormat(StrEnum):
    """What a clip is encoded as."""

    MP4 = "mp4"
    PNG_FRAMES = "png-frames"
    LATENTS = "latents"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a request may ask for; units as in the message `sojourn.v1.Limits`.

    Attributes:
        trained_sizes: (width, height) that alone are served unless a request says otherwise; empty where any size
            within the limits is as good.
        max_flow_shift: 0 of a model that sets its shifts by itself.
    """

    size_multiple: int
    min_edge: int
    max_edge: int
    max_pixels: int
    min_aspect_ratio: float
    max_aspect_ratio: float
    min_frames: int
    max_frames: int
    frames_step: int
    frames_offset: int
    min_steps: int
    max_steps: int
    max_count: int
    max_prompt_characters: int
    max_prompt_tokens: int
    max_media_bytes: int
    max_flow_shift: float = 100.0
    trained_sizes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a request gets that does not say; sizes in pixels."""

    width: int
    height: int
    frames: int
    steps: int
    flow_shift: float
    audio_flow_shift: float


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One request with every parameter resolved.

    Attributes:
        width, height: Canvas in pixels.
        frames: Frames of each clip.
        steps: Points of the noise schedule (the stock pipeline's `num_inference_steps`).
        flow_shift, audio_flow_shift: Shifts of the video and audio schedules.
        seeds: One for each clip, 0 ≤ seed < 2**64.
        first_image, last_image: RGB keyframes of fl2va.
        references: References of ref2va in the order that the model reads them, as the family's own types.
    """

    prompt: str
    workflow: Workflow
    width: int
    height: int
    frames: int
    steps: int
    flow_shift: float
    audio_flow_shift: float
    seeds: tuple[int, ...]
    quality: QualityTier = QualityTier.LOSSLESS
    outputs: tuple[OutputFormat, ...] = (OutputFormat.MP4,)
    first_image: "Image.Image | None" = None
    last_image: "Image.Image | None" = None
    references: Sequence[object] = ()

    @property
    def decodes(self) -> bool:
        """Whether frames and audio are needed, and not the latents alone."""
        return any(output is not OutputFormat.LATENTS for output in self.outputs)


def clip_seeds(seed: int, count: int) -> tuple[int, ...]:
    """Seeds of the `count` clips of a request: seed, seed + 1, … modulo 2**64."""
    return tuple((seed + clip) % 2**SEED_BITS for clip in range(count))


@dataclass(frozen=True, kw_only=True)
class Clip:
    """What the pipeline made for one seed.

    Attributes:
        latents: Denoised video latents, float32, as the stock pipeline's `latents`
            (MiniMax-H3: [1, C, latent frames, latent height, latent width]).
        audio_latents: Denoised audio latents, float32 (MiniMax-H3: [2, C, audio latents]); None without audio.
        frames: RGB frames [F, H, W, 3], float32 in 0..1; None where only the latents were asked for.
        audio: Waveform [channels, samples], float32 in -1..1; None without audio or decoding.
        sample_rate: Samples per second of `audio`; 0 without it.
        frames_per_second: Rate of `frames`.
        quality: The tier that it was made at.
        quality_reason: What of the tier asked for could not be mounted, and why; "" where all of it was.
    """

    latents: "torch.Tensor"
    audio_latents: "torch.Tensor | None"
    frames: np.ndarray | None
    audio: np.ndarray | None
    sample_rate: int
    frames_per_second: float
    quality: QualityTier = QualityTier.LOSSLESS
    quality_reason: str = ""
