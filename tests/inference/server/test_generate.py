"""A whole stream over a real channel, and what is in it."""

import hashlib
import io
import time
import wave
import zipfile

import av
import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from sojourn.inference.encoding import latents_sha256
from sojourn.inference.pipeline import Pipeline
from sojourn.inference.server import validation
from sojourn.inference.watch import Watch
from sojourn.v1 import inference_pb2 as pb

from tests.inference.server.serving import LATENTS, Result, request, serving

MP4, PNG = pb.OUTPUT_FORMAT_MP4, pb.OUTPUT_FORMAT_PNG_FRAMES


def direct(pipeline: Pipeline, message: pb.GenerateRequest, clip: int = 0):
    resolved = validation.resolve(message, pipeline)
    return pipeline.run_clip(resolved, clip, Watch(clock=time.monotonic))


async def test_stream_tells_everything_in_order(pipeline: Pipeline) -> None:
    async with serving(pipeline) as served:
        result = await served.client.generate(request(steps=5, outputs=[MP4, LATENTS]))
    kinds = list(dict.fromkeys(result.order))
    assert kinds == ["accepted", "progress", "artifact", "completed"]
    assert result.order.count("accepted") == result.order.count("completed") == 1
    begun = [p.stage for p in result.progress if p.step == 0]
    assert begun == [
        pb.STAGE_QUEUED, pb.STAGE_TEXT_ENCODE, pb.STAGE_DENOISE, pb.STAGE_DECODE, pb.STAGE_ENCODE_OUTPUT
    ]  # fmt: skip
    steps = [(p.step, p.steps) for p in result.progress if p.stage == pb.STAGE_DENOISE]
    assert steps == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert all(p.seconds_per_step > 0 for p in result.progress if p.step)
    assert [p.eta_seconds > 0 for p in result.progress if p.step] == [True, True, True, False]


async def test_accepted_echoes_every_parameter(pipeline: Pipeline) -> None:
    async with serving(pipeline) as served:
        result = await served.client.generate(request(count=2, seed=2**64 - 1, flow_shift=7.5))
    accepted = result.accepted
    assert accepted is not None
    assert len(bytes.fromhex(accepted.request_id)) == 16
    assert (accepted.queue_position, accepted.seed) == (0, 2**64 - 1)
    assert accepted.parameters == pb.ResolvedParameters(
        workflow=pb.WORKFLOW_T2VA, width=32, height=32, frames=124, frames_per_second=24, steps=4, flow_shift=7.5,
        audio_flow_shift=3, seeds=[2**64 - 1, 0], quality=pb.QUALITY_TIER_LOSSLESS, outputs=[LATENTS],
    )  # fmt: skip


async def test_completed_sums_up(pipeline: Pipeline) -> None:
    async with serving(pipeline) as served:
        began = time.monotonic()
        result = await served.client.generate(request(count=2, outputs=[LATENTS, MP4]))
        wall = time.monotonic() - began
    completed = result.completed
    assert completed is not None
    stages = [timing.stage for timing in completed.timings]
    assert stages == [
        pb.STAGE_QUEUED, pb.STAGE_TEXT_ENCODE, pb.STAGE_DENOISE, pb.STAGE_DECODE, pb.STAGE_ENCODE_OUTPUT
    ]  # fmt: skip
    assert 0 < sum(timing.seconds for timing in completed.timings) <= wall
    assert completed.model_fingerprint == pipeline.fingerprint()
    assert [(clip.clip, clip.seed) for clip in completed.clips] == [(0, 7), (1, 8)]
    assert completed.quality == pb.QUALITY_TIER_LOSSLESS
    for summary in completed.artifacts:
        data = result.artifacts[summary.index]
        assert (summary.size_bytes, summary.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    where = {(chunk.index, chunk.clip, chunk.format) for chunk in result.chunks}
    assert where == {(0, 0, LATENTS), (1, 0, MP4), (2, 1, LATENTS), (3, 1, MP4)}


@pytest.mark.parametrize("fields", [{}, {"seed": 2**64 - 1, "steps": 2}, {"size": pb.Size(width=64, height=32)}])
async def test_latents_are_bit_identical_to_a_direct_run(pipeline: Pipeline, fields: dict[str, object]) -> None:
    message = request(**fields)
    async with serving(pipeline) as served:
        result = await served.client.generate(message)
    clip = direct(pipeline, message)
    tensors = safetensors.torch.load(result.artifacts[0])
    assert torch.equal(tensors["latents"], clip.latents)
    assert torch.equal(tensors["audio_latents"], clip.audio_latents)
    raw = tensors["latents"].numpy().tobytes() + tensors["audio_latents"].numpy().tobytes()
    assert result.sha256 == [hashlib.sha256(raw).hexdigest()] == [latents_sha256(clip)]


async def test_clips_of_a_request_equal_single_ones(pipeline: Pipeline) -> None:
    async with serving(pipeline) as served:
        together = await served.client.generate(request(count=2, seed=2**64 - 1))
        first = await served.client.generate(request(seed=2**64 - 1))
        second = await served.client.generate(request(seed=0))
    assert together.sha256 == first.sha256 + second.sha256


async def test_unset_seed_is_drawn_and_reproduces(pipeline: Pipeline) -> None:
    async with serving(pipeline) as served:
        drawn = await served.client.generate(request(seed=None))
        other = await served.client.generate(request(seed=None))
        assert drawn.accepted is not None
        again = await served.client.generate(request(seed=drawn.accepted.seed))
    assert drawn.sha256 == again.sha256 != other.sha256


async def test_chunks_are_at_most_a_mebibyte_and_uninterrupted(pipeline: Pipeline) -> None:
    largest = request(size=pb.Size(width=48, height=48), frames=345, outputs=[PNG, LATENTS])
    async with serving(pipeline) as served:
        messages = [response async for response in served.client.call(largest)]
    assert all(message.ByteSize() <= 2**20 for message in messages)
    result = Result()
    for message in messages:
        result.add(message)
    indices = [chunk.index for chunk in result.chunks]
    assert indices == sorted(indices)
    assert indices.count(0) > 1, "the test wants an artifact of several chunks"
    for index in (0, 1):
        marks = [chunk.last for chunk in result.chunks if chunk.index == index]
        assert marks == [False] * (len(marks) - 1) + [True]


async def test_formats_hold_the_same_clip(pipeline: Pipeline) -> None:
    message = request(outputs=[PNG, MP4])
    async with serving(pipeline) as served:
        result = await served.client.generate(message)
    clip = direct(pipeline, message)
    archive = zipfile.ZipFile(io.BytesIO(result.artifacts[0]))
    assert archive.namelist() == [*(f"frame_{i:05d}.png" for i in range(124)), "audio.wav"]
    frame = np.asarray(Image.open(archive.open("frame_00123.png")))
    assert np.array_equal(frame, (clip.frames[123].clip(0, 1) * 255).round().astype("uint8"))
    with wave.open(archive.open("audio.wav")) as sound:
        assert (sound.getnchannels(), sound.getframerate(), sound.getnframes()) == (2, 32000, clip.audio.shape[1])
    with av.open(io.BytesIO(result.artifacts[1])) as container:
        video = container.streams.video[0]
        assert sum(1 for _ in container.decode(video)) == 124
        assert (video.average_rate, video.width, video.height, video.pix_fmt) == (24, 32, 32, "yuv420p")
        assert container.streams.audio[0].codec_context.name == "aac"
    assert [c.mime_type for c in result.chunks if c.last] == ["application/zip", "video/mp4"]


async def test_latents_alone_decode_nothing(pipeline: Pipeline) -> None:
    async with serving(pipeline) as served:
        result = await served.client.generate(request())
    assert pb.STAGE_DECODE not in {progress.stage for progress in result.progress}


def png(width: int = 40, height: int = 40) -> bytes:
    out = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(out, "PNG")
    return out.getvalue()


async def test_keyframes_anchor_canvas_and_clip(pipeline: Pipeline) -> None:
    first = pb.Keyframe(image=png(80, 40), position=pb.KEYFRAME_POSITION_FIRST)
    last = pb.Keyframe(image=png(40, 40), position=pb.KEYFRAME_POSITION_LAST)
    message = request(keyframes=[last, first], size=None, steps=2)
    async with serving(pipeline) as served:
        result = await served.client.generate(message)
        plain = await served.client.generate(request(size=pb.Size(width=64, height=32), steps=2))
    assert result.accepted is not None
    parameters = result.accepted.parameters
    assert parameters.workflow == pb.WORKFLOW_FL2VA
    assert (parameters.width, parameters.height) == pipeline.resolve_canvas(80, 40)
    assert pb.STAGE_VAE_ENCODE in {progress.stage for progress in result.progress}
    assert result.sha256 != plain.sha256


async def test_references_condition_in_their_order(pipeline: Pipeline) -> None:
    references = [pb.Reference(image=png(40, 40)), pb.Reference(image=png(60, 40))]
    async with serving(pipeline) as served:
        result = await served.client.generate(request(references=references, steps=2))
        turned = await served.client.generate(request(references=references[::-1], steps=2))
    assert result.accepted is not None
    assert result.accepted.parameters.workflow == pb.WORKFLOW_REF2VA
    assert result.sha256 != turned.sha256


async def test_defaults_apply_to_what_is_left_open(pipeline: Pipeline) -> None:
    resolved = validation.resolve(pb.GenerateRequest(prompt="a moving seven"), pipeline, draw_seed=lambda: 5)
    defaults = pipeline.defaults
    assert (resolved.width, resolved.height, resolved.frames) == (defaults.width, defaults.height, defaults.frames)
    assert (resolved.steps, resolved.flow_shift, resolved.audio_flow_shift) == (50, 12.0, 3.0)
    assert (resolved.seeds, resolved.outputs, resolved.quality) == ((5,), ("mp4",), "lossless")
