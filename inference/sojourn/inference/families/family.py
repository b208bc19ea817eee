"""The record that describes a family of models to the engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sojourn.inference.errors import FieldViolation
from sojourn.inference.requests import Clip, Defaults, GenerationRequest, Limits, Workflow
from sojourn.inference.watch import Stage


class Medium(StrEnum):
    """What a request may hold besides text that the text encoder has to see."""

    IMAGE = "image"
    VIDEO = "video"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The noise schedule of one request, on objects of its own.

    Attributes:
        schedulers: By component name; they take the place of the model's for this request.
        evaluations: How often the transformer will run.
    """

    schedulers: Mapping[str, Any]
    evaluations: int


@dataclass(frozen=True, kw_only=True)
class Family:
    """What differs between families. `stock` is the diffusers pipeline object that holds the components.

    Attributes:
        name: Name of the family, such as "minimax-h3".
        pipeline_class: Class of the pipeline as the model's index names it.
        blocks_class: Its blocks in diffusers.
        stages: The stage that each top-level block belongs to.
        media: What each workflow has to show to the text encoder, at the least.
        frames_per_second: Rate of what it makes.
        limits: What a request may ask of this model.
        defaults: What a request gets that does not say.
        canvas: Resolves an aspect ratio (width, height) to a canvas (width, height) by the model's own rule;
            ValueError where the ratio is out of bounds.
        count_tokens: Tokens of a prompt.
        media_of: What a request holds for the text encoder to see.
        violations: What is wrong with the prompt and media of a request, beyond the limits.
        decode_reference: One reference of a request from its kind ("image", "video", "audio") and encoded bytes;
            ValueError where the bytes are not such a medium.
        schedule: The schedule of a request.
        inputs: A request as the keyword arguments of the blocks, all but generator and schedule.
        clip: The clip from the values that the blocks left.
    """

    name: str
    pipeline_class: str
    blocks_class: str
    stages: Mapping[str, Stage]
    media: Mapping[Workflow, frozenset[Medium]]
    frames_per_second: float
    limits: Callable[[Any], Limits]
    defaults: Callable[[Any], Defaults]
    canvas: Callable[[Any, float, float], tuple[int, int]]
    count_tokens: Callable[[Any, str], int]
    media_of: Callable[[GenerationRequest], frozenset[Medium]]
    violations: Callable[[GenerationRequest], Sequence[FieldViolation]]
    decode_reference: Callable[[str, bytes], object]
    schedule: Callable[[Any, GenerationRequest], Schedule]
    inputs: Callable[[GenerationRequest], Mapping[str, Any]]
    clip: Callable[[Mapping[str, Any]], Clip]
