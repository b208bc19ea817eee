"""GenerateRequest → GenerationRequest against the limits, tokenizer and canvas rule of the real model."""

import math
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from sojourn.inference.errors import InvalidRequest, TierUnavailable, Unsupported
from sojourn.inference.pipeline import Pipeline
from sojourn.inference.requests import Workflow
from sojourn.inference.server import validation
from sojourn.v1 import inference_pb2 as pb

from tests.inference.server.serving import Around, request
from tests.inference.server.test_generate import png

FIRST, LAST = pb.KEYFRAME_POSITION_FIRST, pb.KEYFRAME_POSITION_LAST


def frame(position: int = FIRST, image: bytes | None = None) -> pb.Keyframe:
    return pb.Keyframe(image=png() if image is None else image, position=position)  # type: ignore[arg-type]


def found(pipeline: Any, **fields: Any) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        validation.resolve(request(**fields), pipeline)
    return {violation.field: violation.description for violation in caught.value.violations}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 40000}, "prompt"),
        ({"prompt": "xq" * 2500}, "prompt"),
        ({"prompt": "a\x00"}, "prompt"),
        ({"size": pb.Size(width=1080, height=32)}, "size.width"),
        ({"size": pb.Size(width=32, height=-8)}, "size.height"),
        ({"size": pb.Size(width=2**31, height=32)}, "size.width"),
        ({"size": pb.Size()}, "size.width"),
        ({"size": pb.Size(width=96, height=96)}, "size"),
        ({"size": None, "aspect_ratio": pb.AspectRatio(width=9, height=1)}, "aspect_ratio"),
        ({"size": None, "aspect_ratio": pb.AspectRatio()}, "aspect_ratio"),
        ({"frames": 120}, "frames"),
        ({"frames": 0}, "frames"),
        ({"duration_seconds": math.nan}, "duration_seconds"),
        ({"duration_seconds": 5.0}, "duration_seconds"),
        ({"steps": 0}, "steps"),
        ({"steps": -1}, "steps"),
        ({"steps": 1}, "steps"),
        ({"steps": 10**9}, "steps"),
        ({"flow_shift": math.inf}, "flow_shift"),
        ({"flow_shift": 0.0}, "flow_shift"),
        ({"audio_flow_shift": -1.0}, "audio_flow_shift"),
        ({"count": 0}, "count"),
        ({"count": -1}, "count"),
        ({"count": 17}, "count"),
        ({"workflow": 77}, "workflow"),
        ({"quality": 77}, "quality"),
        ({"outputs": [77]}, "outputs[0]"),
        ({"outputs": [1, 3, 1]}, "outputs[2]"),
        ({"outputs": [0, 1]}, "outputs[1]"),
        ({"workflow": pb.WORKFLOW_T2VA, "keyframes": [frame()]}, "keyframes"),
        ({"workflow": pb.WORKFLOW_REF2VA, "keyframes": [frame()]}, "keyframes"),
        ({"workflow": pb.WORKFLOW_T2VA, "references": [pb.Reference(image=png())]}, "references"),
        ({"workflow": pb.WORKFLOW_FL2VA}, "keyframes"),
        ({"workflow": pb.WORKFLOW_REF2VA}, "references"),
        ({"keyframes": [frame()], "references": [pb.Reference(image=png())]}, "references"),
        ({"keyframes": [frame(), frame()]}, "keyframes[1].position"),
        ({"keyframes": [frame(0)]}, "keyframes[0].position"),
        ({"keyframes": [frame(9)]}, "keyframes[0].position"),
        ({"keyframes": [frame(), frame(LAST), frame()]}, "keyframes"),
        ({"keyframes": [frame(image=b"")]}, "keyframes[0].image"),
        ({"keyframes": [frame(image=b"GIF89a")]}, "keyframes[0].image"),
        ({"keyframes": [frame(image=png()[:90])]}, "keyframes[0].image"),
        ({"keyframes": [frame(image=png(400, 40))], "size": None}, "keyframes[0].image"),
        ({"references": [pb.Reference()]}, "references[0]"),
        ({"references": [pb.Reference(audio=b"x")]}, "references"),
        ({"references": [pb.Reference(image=png())] * 10}, "references"),
        ({"references": [pb.Reference(image=png())] * 13}, "references"),
        ({"references": [pb.Reference(image=png()), pb.Reference(video=b"no video")]}, "references[1].video"),
        ({"references": [pb.Reference(image=png()), pb.Reference(audio=png())]}, "references[1].audio"),
    ],
)
def test_invalid_field_is_named(pipeline: Pipeline, fields: dict[str, Any], path: str) -> None:
    assert path in found(pipeline, **fields)


def test_all_violations_are_told_at_once(pipeline: Pipeline) -> None:
    told = found(
        pipeline,
        prompt="",
        size=pb.Size(width=1080, height=0),
        frames=1,
        steps=0,
        flow_shift=math.nan,
        audio_flow_shift=101.0,
        count=0,
        outputs=[3, 3, 9],
        quality=9,
        workflow=pb.WORKFLOW_FL2VA,
    )
    assert set(told) == {
        "prompt", "size.width", "size.height", "frames", "steps", "flow_shift", "audio_flow_shift", "count",
        "outputs[1]", "outputs[2]", "quality", "keyframes",
    }  # fmt: skip


def test_nothing_is_rounded(pipeline: Pipeline) -> None:
    assert "nearest valid: 16 or 32" in found(pipeline, size=pb.Size(width=17, height=32))["size.width"]
    for multiple in (16, 32, 48):
        resolved = validation.resolve(request(size=pb.Size(width=multiple, height=16)), pipeline)
        assert (resolved.width, resolved.height) == (multiple, 16)


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_seeds_are_taken_over_their_whole_range(pipeline: Pipeline, seed: int) -> None:
    resolved = validation.resolve(request(seed=seed, count=2), pipeline)
    assert resolved.seeds == (seed, (seed + 1) % 2**64)


def test_seed_zero_is_not_unset(pipeline: Pipeline) -> None:
    assert validation.resolve(request(seed=0), pipeline, draw_seed=lambda: 9).seeds == (0,)
    assert validation.resolve(request(seed=None), pipeline, draw_seed=lambda: 9).seeds == (9,)


def test_drawn_seeds_span_64_bits() -> None:
    drawn = [validation.draw_seed() for _ in range(64)]
    assert len(set(drawn)) == 64
    assert 2**60 < max(drawn) < 2**64


def test_duration_comes_to_frames(pipeline: Pipeline) -> None:
    assert validation.resolve(request(duration_seconds=141 / 24), pipeline).frames == 141


def test_aspect_ratio_follows_the_models_rule(pipeline: Pipeline) -> None:
    resolved = validation.resolve(request(size=None, aspect_ratio=pb.AspectRatio(width=4, height=1)), pipeline)
    assert (resolved.width, resolved.height) == pipeline.resolve_canvas(4, 1)


def test_first_keyframe_in_time_anchors_the_canvas(pipeline: Pipeline) -> None:
    keyframes = [frame(LAST, png(40, 80)), frame(FIRST, png(80, 40))]
    resolved = validation.resolve(request(size=None, keyframes=keyframes), pipeline)
    assert (resolved.width, resolved.height) == pipeline.resolve_canvas(80, 40)
    assert resolved.first_image is not None
    assert resolved.first_image.size == (80, 40)
    only_last = validation.resolve(request(size=None, keyframes=keyframes[:1]), pipeline)
    assert (only_last.width, only_last.height) == pipeline.resolve_canvas(40, 80)


@pytest.mark.parametrize("quality", [pb.QUALITY_TIER_EXTRA_HIGH, pb.QUALITY_TIER_HIGH])
def test_tier_that_is_not_served_is_refused(pipeline: Pipeline, quality: Any) -> None:
    name = {pb.QUALITY_TIER_EXTRA_HIGH: "extra-high", pb.QUALITY_TIER_HIGH: "high"}[quality]
    with pytest.raises(
        TierUnavailable, match=f"^quality tier {name} is not available for tiny: .*; or ask for lossless$"
    ):
        validation.resolve(request(quality=quality), pipeline)


def test_workflow_that_is_not_served_says_what_to_load(pipeline: Pipeline) -> None:
    class Lacking(Around):
        unavailable: ClassVar = {Workflow.REF2VA: "the model folder has no transformer_ref"}

    with pytest.raises(Unsupported, match="ref2va: the model folder has no transformer_ref"):
        validation.resolve(request(references=[pb.Reference(image=png())]), Lacking(pipeline))


def test_media_are_not_decoded_for_a_request_that_is_wrong_anyway(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(data: bytes) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(validation.media, "decode_still", never)
    assert set(found(pipeline, keyframes=[frame()], steps=0)) == {"steps"}


def test_oversized_medium_is_refused(pipeline: Pipeline) -> None:
    class Small(Around):
        limits = replace(pipeline.limits, max_media_bytes=100)

    assert "at most 100 are taken" in found(Small(pipeline), keyframes=[frame()])["keyframes[0].image"]
