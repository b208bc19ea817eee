"""The shipped Helios shows the digit that it is asked for, in every chunk, and moves on over the seams."""

import io
import time
import zipfile
from pathlib import Path

import diffusers
import pytest
import safetensors.torch
import torch
from sojourn.inference.pipeline import DeviceChoice, Pipeline, load_pipeline
from sojourn.inference.requests import GenerationRequest, OutputFormat, Workflow
from sojourn.inference.watch import Watch
from sojourn.v1 import inference_pb2 as pb

from tests.inference.server.serving import request, serving
from tools.demo_model import data
from tools.demo_model.evaluate import FIRST_CLIP_SEED, PROMPT, as_grey
from tools.demo_model.helios import chunks, evaluate

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "helios-digits"
# A margin below what tools/demo_model/helios/README.md has measured of it.
CLIPS_RIGHT, FRAMES_RIGHT = 0.7, 0.5


@pytest.fixture(scope="module")
def digits_of_helios() -> Pipeline:
    return load_pipeline(MODEL, device=DeviceChoice.CPU)


@pytest.fixture(scope="module")
def clips(digits_of_helios: Pipeline) -> list[evaluate.Clip]:
    """One clip of each digit through our pipeline, on the model's own size."""
    made = []
    for digit in range(10):
        asked = GenerationRequest(
            prompt=PROMPT.format(data.WORDS[digit]),
            workflow=Workflow.T2VA,
            width=digits_of_helios.defaults.width,
            height=digits_of_helios.defaults.height,
            frames=2 * chunks.FRAMES,
            steps=evaluate.STEPS,
            flow_shift=0.0,
            audio_flow_shift=0.0,
            seeds=(FIRST_CLIP_SEED,),
            outputs=(OutputFormat.PNG_FRAMES,),
        )
        clip = digits_of_helios.run_clip(asked, 0, Watch(clock=time.monotonic))
        assert clip.frames is not None
        made.append(evaluate.Clip(digit, as_grey(clip.frames)))
    return made


@pytest.fixture(scope="module")
def report(clips: list[evaluate.Clip]) -> evaluate.Report:
    out = ROOT / "out"
    out.mkdir(exist_ok=True)
    evaluate.save_sheet(clips, out / "helios.png")
    return evaluate.judge_clips(clips, psnr_db=0.0, seconds_per_clip=0.0, guidance_scale=0.0)


def test_most_clips_show_the_digit_asked_for_in_every_chunk(report: evaluate.Report) -> None:
    print(f"\nclips {report.clip_accuracy:.1%}, frames by chunk {report.frame_accuracy_by_chunk}")
    assert report.clip_accuracy >= CLIPS_RIGHT
    assert min(report.frame_accuracy_by_chunk) >= FRAMES_RIGHT


def test_the_digit_moves(report: evaluate.Report) -> None:
    assert report.speed_px_per_s >= 6


async def test_served_with_its_own_guider_it_is_the_stock_pipelines(digits_of_helios: Pipeline) -> None:
    """Latents through a server equal those of the stock pipeline, whose guider is the folder's, too."""
    stock = diffusers.ModularPipeline.from_pretrained(str(MODEL))
    stock.load_components(dtype=torch.bfloat16)
    expected = stock(
        prompt="a moving seven", height=64, width=64, num_frames=34, num_inference_steps=3,
        generator=torch.Generator().manual_seed(7), output="latent_chunks",
    )  # fmt: skip
    assert (
        stock.guider.config.guidance_scale == digits_of_helios.components["guider"].value.config.guidance_scale != 5.0
    )
    async with serving(digits_of_helios) as served:
        asked = request(frames=34, steps=3, size=None, outputs=[pb.OUTPUT_FORMAT_LATENTS, pb.OUTPUT_FORMAT_PNG_FRAMES])
        result = await served.client.generate(asked)
    found = safetensors.torch.load(result.artifacts[0])["latents"]
    assert torch.equal(found, torch.cat(expected, dim=2).float())
    assert len(zipfile.ZipFile(io.BytesIO(result.artifacts[1])).namelist()) == 34
