"""The record that describes a family of models to the engine."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sojourn.inference.errors import FieldViolation
from sojourn.inference.offload.activations import Workload
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
        own: Components with a state, such as schedulers, by name; they take the place of the model's for this request.
        evaluations: Steps of the denoising loop, over all its chunks and levels.
    """

    own: Mapping[str, Any]
    evaluations: int


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Where the steps of the denoising loop can be seen from.

    Attributes:
        scheduler: Component whose `step` ends each of them, for loops inside a block; None for a loop over blocks,
            where the guard is the last one.
        frames: Frames that a step works on, of a clip of so many.
    """

    scheduler: str | None = None
    frames: Callable[[int], int] = lambda frames: frames


@dataclass(frozen=True, kw_only=True)
class UsualRequest:
    """What memory is planned for.

    Attributes:
        workload: The largest request, by the values of the model's index.
        passes: Passes through the transformer of a request with the defaults, those for guidance included.
    """

    workload: Callable[[Mapping[str, Any]], Workload]
    passes: int


@dataclass(frozen=True, kw_only=True)
class Family:
    """What differs between families. `stock` is the diffusers pipeline object that holds the components.

    Attributes:
        name: Name of the family, such as "minimax-h3".
        pipeline_class: Class of the modular pipeline, as a modular index names it.
        blocks_class: Its blocks in diffusers.
        workflows: The workflows that it has, by the names that its blocks know them by.
        stages: The stage that each top-level block belongs to.
        replaced: Blocks of ours in place of stock ones, by the name of the leaf.
        companions: Components that a folder may leave out, and how they are made then.
        loop: Where the steps of the denoising loop can be seen from.
        media: What each workflow has to show to the text encoder, at the least.
        frames_per_second: Rate of what it makes.
        limits: What a request may ask of this model.
        defaults: What a request gets that does not say.
        canvas: Resolves an aspect ratio (width, height) to a canvas (width, height) by the model's own rule;
            ValueError where the ratio is out of bounds.
        count_tokens: Tokens of a prompt.
        media_of: What a request holds for the text encoder to see.
        usual: What memory is planned for.
        violations: What is wrong with the prompt and media of a request, beyond the limits.
        reference: One reference of a request, as the family's own type, from its kind ("image", "video", "audio") and
            the decoded medium (a PIL image, `server.media.Video` or `Audio`); ValueError where it takes none.
        schedule: The schedule of a request.
        inputs: A request as the keyword arguments of the blocks, all but generator and schedule.
        clip: The clip from the values that the blocks left.
        adapt: Changes the loaded components once, before the first request.
        memory: What is kept for the length of one request.
        is_classic: Whether a folder with an index that is not modular is of this family, by the class of the pipeline
            and the other values that the index has.
    """

    name: str
    pipeline_class: str
    blocks_class: str
    workflows: Mapping[Workflow, str]
    stages: Mapping[str, Stage]
    media: Mapping[Workflow, frozenset[Medium]]
    frames_per_second: float
    limits: Callable[[Any], Limits]
    defaults: Callable[[Any], Defaults]
    canvas: Callable[[Any, float, float], tuple[int, int]]
    count_tokens: Callable[[Any, str], int]
    media_of: Callable[[GenerationRequest], frozenset[Medium]]
    usual: UsualRequest
    violations: Callable[[GenerationRequest], Sequence[FieldViolation]]
    reference: Callable[[str, Any], object]
    schedule: Callable[[Any, GenerationRequest], Schedule]
    inputs: Callable[[GenerationRequest], Mapping[str, Any]]
    clip: Callable[[Mapping[str, Any]], Clip]
    loop: Loop = Loop()
    replaced: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    companions: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    adapt: Callable[[Any], None] = lambda stock: None
    memory: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    is_classic: Callable[[str, Mapping[str, Any]], bool] = lambda pipeline_class, values: False

    def owns(self, pipeline_class: str, values: Mapping[str, Any]) -> bool:
        """Whether a folder is of this family, by what its index says."""
        return pipeline_class == self.pipeline_class or self.is_classic(pipeline_class, values)
