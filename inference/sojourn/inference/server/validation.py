"""GenerateRequest → GenerationRequest: every field judged, every violation told at once, defaults filled in.

In three passes, cheap to dear: values and their contradictions; whether this model serves what is asked; tokens and
media. A later pass runs only when those before it found nothing, so that a request for the wrong size does not cost
the decoding of its pictures.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from PIL import Image
from sojourn.inference.errors import FieldViolation, InvalidRequest, Unsupported
from sojourn.inference.requests import (
    SEED_BITS,
    GenerationRequest,
    OutputFormat,
    QualityTier,
    Workflow,
    clip_seeds,
)
from sojourn.inference.server import media, rules
from sojourn.inference.server.engine import Engine
from sojourn.v1 import inference_pb2 as pb

WORKFLOWS = {
    pb.WORKFLOW_T2VA: Workflow.T2VA,
    pb.WORKFLOW_FL2VA: Workflow.FL2VA,
    pb.WORKFLOW_REF2VA: Workflow.REF2VA,
}
QUALITY_TIERS = {
    pb.QUALITY_TIER_UNSPECIFIED: QualityTier.LOSSLESS,
    pb.QUALITY_TIER_LOSSLESS: QualityTier.LOSSLESS,
    pb.QUALITY_TIER_EXTRA_HIGH: QualityTier.EXTRA_HIGH,
    pb.QUALITY_TIER_HIGH: QualityTier.HIGH,
}
OUTPUT_FORMATS = {
    pb.OUTPUT_FORMAT_UNSPECIFIED: OutputFormat.MP4,
    pb.OUTPUT_FORMAT_MP4: OutputFormat.MP4,
    pb.OUTPUT_FORMAT_PNG_FRAMES: OutputFormat.PNG_FRAMES,
    pb.OUTPUT_FORMAT_LATENTS: OutputFormat.LATENTS,
}


def draw_seed() -> int:
    """A seed for a request that gives none, from the system's entropy."""
    return secrets.randbits(SEED_BITS)


@dataclass
class _Violations:
    """Collects what is wrong."""

    found: list[FieldViolation] = field(default_factory=list)

    def add(self, path: str, description: str | None) -> bool:
        """Notes a violation; answers whether there was one."""
        if description is not None:
            self.found.append(FieldViolation(path, description))
        return description is not None

    def raise_any(self) -> None:
        if self.found:
            raise InvalidRequest(*self.found)


def asked_workflow(message: pb.GenerateRequest) -> Workflow | None:
    """The workflow that is named or follows from the request; None for a number that names none."""
    if message.workflow != pb.WORKFLOW_UNSPECIFIED:
        return WORKFLOWS.get(message.workflow)
    if message.references:
        return Workflow.REF2VA
    return Workflow.FL2VA if message.keyframes else Workflow.T2VA


def resolve(
    message: pb.GenerateRequest, engine: Engine, *, draw_seed: Callable[[], int] = draw_seed
) -> GenerationRequest:
    """Judges a request and fills in what it leaves open.

    Args:
        message: As received.
        engine: Whose limits, defaults, tokenizer and canvas rule apply.
        draw_seed: Seed of a request without one.

    Raises:
        InvalidRequest: With every violation of the pass that found some.
        Unsupported: Valid, but not with this model, installation or version.
    """
    _judge_values(message, engine)
    workflow = asked_workflow(message)
    assert workflow is not None
    quality = QUALITY_TIERS[message.quality]
    _require_served(workflow, quality, engine)
    violations = _Violations()
    _judge_tokens(message.prompt, engine, violations)
    keyframes = _keyframes(message, violations)
    references = _references(message, engine, violations)
    violations.raise_any()
    width, height = _canvas(message, keyframes, engine)
    defaults = engine.defaults
    seed = message.seed if message.HasField("seed") else draw_seed()
    count = message.count if message.HasField("count") else 1
    request = GenerationRequest(
        prompt=message.prompt,
        workflow=workflow,
        width=width,
        height=height,
        frames=_frames(message, engine),
        steps=message.steps if message.HasField("steps") else defaults.steps,
        flow_shift=message.flow_shift if message.HasField("flow_shift") else defaults.flow_shift,
        audio_flow_shift=(
            message.audio_flow_shift if message.HasField("audio_flow_shift") else defaults.audio_flow_shift
        ),
        seeds=clip_seeds(seed, count),
        quality=quality,
        outputs=tuple(OUTPUT_FORMATS[output] for output in message.outputs) or (OutputFormat.MP4,),
        first_image=keyframes.get(pb.KEYFRAME_POSITION_FIRST),
        last_image=keyframes.get(pb.KEYFRAME_POSITION_LAST),
        references=references,
    )
    engine.check(request)
    return request


# First pass: values.


def _judge_values(message: pb.GenerateRequest, engine: Engine) -> None:
    violations = _Violations()
    violations.add("prompt", rules.wrong_prompt_text(message.prompt, engine.limits))
    _judge_workflow(message, violations)
    _judge_canvas(message, engine, violations)
    _judge_numbers(message, engine, violations)
    _judge_outputs(message.outputs, violations)
    if message.quality not in QUALITY_TIERS:
        violations.add("quality", f"{message.quality} names no tier; valid: {_names(pb.QualityTier)}")
    _judge_keyframes(message, engine, violations)
    _judge_references(message, engine, violations)
    violations.raise_any()


def _names(enum: object) -> str:
    return ", ".join(name for name, number in enum.items() if number != 0)  # type: ignore[attr-defined]


def _judge_workflow(message: pb.GenerateRequest, violations: _Violations) -> None:
    workflow = asked_workflow(message)
    if workflow is None:
        violations.add("workflow", f"{message.workflow} names no workflow; valid: {_names(pb.Workflow)}")
        return
    keyframes, references = len(message.keyframes), len(message.references)
    if keyframes and references:
        violations.add("references", "keyframes and references exclude each other; send one of the two")
    elif keyframes and workflow is not Workflow.FL2VA:
        violations.add("keyframes", f"{workflow} takes none; drop them, or ask for fl2va")
    elif references and workflow is not Workflow.REF2VA:
        violations.add("references", f"{workflow} takes none; drop them, or ask for ref2va")
    elif workflow is Workflow.FL2VA and not keyframes:
        violations.add("keyframes", "fl2va takes 1 or 2, none is there; add one, or ask for t2va")
    elif workflow is Workflow.REF2VA and not references:
        violations.add("references", f"ref2va takes 1 to {rules.MAX_REFERENCES}, none is there; ask for t2va")


def _judge_canvas(message: pb.GenerateRequest, engine: Engine, violations: _Violations) -> None:
    limits, canvas = engine.limits, message.WhichOneof("canvas")
    if canvas == "size":
        width, height = message.size.width, message.size.height
        wrong_width = violations.add("size.width", rules.wrong_edge(width, limits))
        wrong_height = violations.add("size.height", rules.wrong_edge(height, limits))
        if not wrong_width and not wrong_height:
            wrong_area = violations.add("size", rules.wrong_area(width, height, limits))
            if not wrong_area and not message.untrained_size:
                violations.add("size", rules.untrained_size(width, height, limits))
    elif canvas == "aspect_ratio":
        ratio = message.aspect_ratio
        violations.add("aspect_ratio", rules.wrong_aspect_ratio(ratio.width, ratio.height, limits))


def _judge_numbers(message: pb.GenerateRequest, engine: Engine, violations: _Violations) -> None:
    limits, defaults = engine.limits, engine.defaults
    length = message.WhichOneof("length")
    if length == "frames":
        violations.add("frames", rules.wrong_frames(message.frames, limits))
    elif length == "duration_seconds":
        rate = engine.frames_per_second
        violations.add("duration_seconds", rules.wrong_duration(message.duration_seconds, rate, limits))
    if message.HasField("steps"):
        violations.add("steps", rules.wrong_steps(message.steps, limits))
    if message.HasField("flow_shift"):
        violations.add("flow_shift", rules.wrong_shift(message.flow_shift, defaults.flow_shift, limits))
    if message.HasField("audio_flow_shift"):
        shift = message.audio_flow_shift
        violations.add("audio_flow_shift", rules.wrong_shift(shift, defaults.audio_flow_shift, limits))
    if message.HasField("count"):
        violations.add("count", rules.wrong_count(message.count, limits))


def _judge_outputs(outputs: Sequence[pb.OutputFormat.ValueType], violations: _Violations) -> None:
    seen: dict[OutputFormat, int] = {}
    for index, output in enumerate(outputs):
        path, output_format = f"outputs[{index}]", OUTPUT_FORMATS.get(output)
        if output_format is None:
            violations.add(path, f"{output} names no format; valid: {_names(pb.OutputFormat)}")
        elif output_format in seen:
            violations.add(path, f"{output_format} is there already as outputs[{seen[output_format]}]; ask for it once")
        else:
            seen[output_format] = index


def _judge_keyframes(message: pb.GenerateRequest, engine: Engine, violations: _Violations) -> None:
    if len(message.keyframes) > rules.MAX_KEYFRAMES:
        violations.add("keyframes", f"{len(message.keyframes)} keyframes; at most {rules.MAX_KEYFRAMES} are taken")
        return
    seen: dict[int, int] = {}
    for index, keyframe in enumerate(message.keyframes):
        path, position = f"keyframes[{index}]", keyframe.position
        violations.add(f"{path}.image", rules.wrong_media_size(len(keyframe.image), engine.limits))
        if position not in (pb.KEYFRAME_POSITION_FIRST, pb.KEYFRAME_POSITION_LAST):
            violations.add(f"{path}.position", f"{position} names no end; valid: {_names(pb.KeyframePosition)}")
        elif position in seen:
            name = pb.KeyframePosition.Name(position)
            violations.add(f"{path}.position", f"{name} is there already as keyframes[{seen[position]}]")
        seen.setdefault(position, index)


def _judge_references(message: pb.GenerateRequest, engine: Engine, violations: _Violations) -> None:
    if len(message.references) > rules.MAX_REFERENCES:
        violations.add("references", f"{len(message.references)} references; at most {rules.MAX_REFERENCES} are taken")
        return
    kinds = []
    for index, reference in enumerate(message.references):
        path, kind = f"references[{index}]", reference.WhichOneof("media")
        if kind is None:
            violations.add(path, "it holds no medium; set one of image, video, audio")
            continue
        kinds.append(kind)
        violations.add(f"{path}.{kind}", rules.wrong_media_size(len(getattr(reference, kind)), engine.limits))
    violations.add("references", rules.wrong_reference_kinds(kinds))


# Second pass: what is served.


def _require_served(workflow: Workflow, quality: QualityTier, engine: Engine) -> None:
    if (obstacle := engine.unavailable.get(workflow)) is not None:
        raise Unsupported(f"{engine.model_name} cannot serve workflow {workflow}: {obstacle}")
    engine.require_tier(quality)


# Third pass: tokens and media.


def _judge_tokens(prompt: str, engine: Engine, violations: _Violations) -> None:
    violations.add("prompt", rules.wrong_prompt_tokens(engine.count_tokens(prompt), engine.limits))


def _keyframes(message: pb.GenerateRequest, violations: _Violations) -> dict[int, Image.Image]:
    images: dict[int, Image.Image] = {}
    for index, keyframe in enumerate(message.keyframes):
        try:
            images[keyframe.position] = media.decode_still(keyframe.image)
        except media.UndecodableMedium as error:
            violations.add(f"keyframes[{index}].image", str(error))
    return images


_DECODERS: dict[str, Callable[[bytes], Image.Image | media.Video | media.Audio]] = {
    "image": media.decode_still,
    "video": media.decode_video,
    "audio": media.decode_audio,
}


def _references(message: pb.GenerateRequest, engine: Engine, violations: _Violations) -> tuple[object, ...]:
    decoded = []
    for index, reference in enumerate(message.references):
        kind = reference.WhichOneof("media")
        assert kind is not None
        try:
            decoded.append(engine.reference(kind, _DECODERS[kind](getattr(reference, kind))))
        except media.UndecodableMedium as error:
            violations.add(f"references[{index}].{kind}", str(error))
    return tuple(decoded)


def _canvas(message: pb.GenerateRequest, keyframes: dict[int, Image.Image], engine: Engine) -> tuple[int, int]:
    canvas = message.WhichOneof("canvas")
    if canvas == "size":
        return message.size.width, message.size.height
    if canvas == "aspect_ratio":
        return engine.resolve_canvas(message.aspect_ratio.width, message.aspect_ratio.height)
    if not keyframes:
        return engine.defaults.width, engine.defaults.height
    # The stock pipeline anchors the canvas on the first keyframe in time.
    position = min(keyframes)
    image = keyframes[position]
    if (wrong := rules.wrong_aspect_ratio(*image.size, engine.limits)) is not None:
        index = next(index for index, keyframe in enumerate(message.keyframes) if keyframe.position == position)
        raise InvalidRequest(FieldViolation(f"keyframes[{index}].image", f"{wrong}; or set size or aspect_ratio"))
    return engine.resolve_canvas(*image.size)


def _frames(message: pb.GenerateRequest, engine: Engine) -> int:
    length = message.WhichOneof("length")
    if length == "frames":
        return message.frames
    if length == "duration_seconds":
        return round(message.duration_seconds * engine.frames_per_second)
    return engine.defaults.frames
