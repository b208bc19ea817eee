"""A chunked model behind the server: any number of frames, progress over chunks and levels, sizes by training."""

import io
import zipfile
from pathlib import Path

import pytest
from sojourn.inference.pipeline import DeviceChoice, Pipeline, load_pipeline
from sojourn.inference.tiny import tiny_random
from sojourn.v1 import inference_pb2 as pb

from tests.inference.server.serving import Slowed, request, serving, violations

# Two steps at each of three levels.
STEPS = 2
CHUNK = 3 * STEPS


@pytest.fixture(scope="module")
def mid(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder: Path = tiny_random("helios-mid", tmp_path_factory.mktemp("models") / "mid")
    return load_pipeline(folder, device=DeviceChoice.CPU)


def asked(**fields: object) -> pb.GenerateRequest:
    return request(**({"steps": STEPS, "frames": 67, "size": pb.Size(width=64, height=64)} | fields))


async def test_a_clip_has_the_frames_asked_for_and_progress_goes_over_all_chunks(mid: Pipeline) -> None:
    async with serving(mid) as served:
        result = await served.client.generate(asked(outputs=[pb.OUTPUT_FORMAT_PNG_FRAMES], size=None))
    assert result.accepted is not None
    parameters = result.accepted.parameters
    assert (parameters.width, parameters.height, parameters.frames, parameters.flow_shift) == (64, 64, 67, 0)
    assert len(zipfile.ZipFile(io.BytesIO(result.artifacts[0])).namelist()) == 67
    steps = [(p.step, p.steps) for p in result.progress if p.stage == pb.STAGE_DENOISE]
    assert steps == [(step, 3 * CHUNK) for step in range(3 * CHUNK + 1)]


async def test_cancel_in_the_second_chunk_frees_the_slot_within_a_step_and_harms_nothing(mid: Pipeline) -> None:
    engine, second_chunk_second_level = Slowed(mid, 0.05), CHUNK + STEPS + 1
    async with serving(engine) as served:
        before = (await served.client.generate(asked())).sha256
        call = served.client.call(asked(seed=1))
        async for response in call:
            if response.WhichOneof("event") == "progress" and response.progress.step >= second_chunk_second_level:
                break
        done = engine.steps_done[1]
        call.cancel()
        await served.until_idle()
        assert engine.steps_done[1] <= done + 2  # the one that ran, and one if it ended while the cancel travelled
        assert (await served.client.generate(asked())).sha256 == before


async def test_sizes_are_those_of_the_training_unless_asked_for_on_purpose(mid: Pipeline) -> None:
    async with serving(mid) as served:
        limits = (await served.client.info()).limits
        assert [(size.width, size.height) for size in limits.trained_sizes] == [(64, 64), (128, 64)]
        other = pb.Size(width=64, height=128)
        error = await served.client.error(asked(size=other, frames=1))
        assert "none of the sizes that the model was trained for (64×64 or 128×64)" in violations(error)["size"]
        result = await served.client.generate(asked(size=other, frames=1, untrained_size=True))
        assert result.accepted is not None
        assert (result.accepted.parameters.width, result.accepted.parameters.height) == (64, 128)
        error = await served.client.error(asked(size=pb.Size(width=96, height=64), untrained_size=True))
        assert "nearest valid: 64 or 128" in violations(error)["size.width"]


async def test_what_the_family_does_not_take_is_refused(mid: Pipeline) -> None:
    async with serving(mid) as served:
        error = await served.client.error(asked(flow_shift=3.0, audio_flow_shift=3.0))
        assert set(violations(error)) == {"flow_shift", "audio_flow_shift"}
        reference = pb.Reference(image=b"\x89PNG")
        error = await served.client.error(asked(references=[reference]))
        assert "no such workflow; ask for one of t2va, fl2va" in (error.details() or "")


def test_deadlines_are_judged_by_all_steps_of_all_chunks(mid: Pipeline) -> None:
    from sojourn.inference.server import validation
    from sojourn.inference.server.admission import work_of

    resolved = validation.resolve(asked(), mid)
    work = work_of(resolved, evaluations=mid.evaluations(resolved), step_frames=mid.step_frames(resolved))
    assert (work.evaluations, work.voxels, work.step_voxels) == (3 * CHUNK, 64 * 64 * 67, 64 * 64 * 33)
