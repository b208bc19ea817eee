"""For a seed, latents, frames and audio are those of the stock diffusers pipeline, bit for bit."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3AudioReference, MiniMaxH3ImageReference
from PIL import Image
from sojourn.inference.pipeline import DeviceChoice, Pipeline, Precision, load_pipeline
from sojourn.inference.requests import Clip, GenerationRequest, OutputFormat, Workflow
from sojourn.inference.watch import StepDone, Watch

MakeRequest = Callable[..., GenerationRequest]
MakeWatch = Callable[..., Watch]
Digest = Callable[[Clip], dict[str, str]]
StockDigest = Callable[[Any, GenerationRequest], dict[str, str]]
Pictures = tuple[Image.Image, Image.Image]


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 64, "height": 64, "steps": 2, "seeds": (0,)},
        {"width": 64, "height": 64, "steps": 12, "seeds": (2**64 - 1,)},
        {"width": 32, "height": 64, "seeds": (2**63,), "prompt": "a moving three, été ✓"},
        {"flow_shift": 5.0, "audio_flow_shift": 1.5, "frames": 141},
    ],
    ids=["2 steps", "12 steps, last seed", "portrait", "shifts, 141 frames"],
)
def test_shipped_model(
    digits: Pipeline,
    stock_digits: Any,
    make_request: MakeRequest,
    make_watch: MakeWatch,
    digest: Digest,
    stock_digest: StockDigest,
    changes: dict[str, Any],
) -> None:
    request = make_request(**changes)
    assert digest(digits.run_clip(request, 0, make_watch())) == stock_digest(stock_digits, request)


def workflow_requests(make_request: MakeRequest, pictures: Pictures) -> dict[str, GenerationRequest]:
    first, last = pictures
    voice = MiniMaxH3AudioReference(audio=torch.sin(torch.arange(32000) / 20)[None] * 0.3)
    picture = MiniMaxH3ImageReference(image=first)
    fl2va, ref2va = Workflow.FL2VA, Workflow.REF2VA
    return {
        "t2va": make_request(),
        "t2va, smallest canvas": make_request(width=16, height=16, seeds=(1,)),
        "fl2va, both": make_request(workflow=fl2va, first_image=first, last_image=last),
        "fl2va, last": make_request(workflow=fl2va, last_image=last, width=48, steps=12),
        "ref2va, picture": make_request(workflow=ref2va, references=(picture,), steps=2),
        "ref2va, voice and pictures": make_request(
            workflow=ref2va, references=(voice, picture, MiniMaxH3ImageReference(image=last))
        ),
    }


@pytest.mark.parametrize(
    "name",
    ["t2va", "t2va, smallest canvas", "fl2va, both", "fl2va, last", "ref2va, picture", "ref2va, voice and pictures"],
)
def test_each_workflow(
    tiny: Pipeline,
    stock_tiny: Any,
    make_request: MakeRequest,
    make_watch: MakeWatch,
    pictures: Pictures,
    digest: Digest,
    stock_digest: StockDigest,
    name: str,
) -> None:
    request = workflow_requests(make_request, pictures)[name]
    assert digest(tiny.run_clip(request, 0, make_watch())) == stock_digest(stock_tiny, request)


def test_workflows_and_parameters_all_have_an_effect(
    tiny: Pipeline, make_request: MakeRequest, make_watch: MakeWatch, pictures: Pictures, digest: Digest
) -> None:
    requests = [
        *workflow_requests(make_request, pictures).values(),
        make_request(seeds=(8,)),
        make_request(steps=4),
        make_request(flow_shift=4.0),
        make_request(audio_flow_shift=4.0),
        make_request(prompt="a moving eight"),
    ]
    digests = [digest(tiny.run_clip(request, 0, make_watch()))["latents"] for request in requests]
    assert len(set(digests)) == len(requests)


def test_order_of_requests_changes_nothing(
    tiny: Pipeline, make_request: MakeRequest, make_watch: MakeWatch, digest: Digest
) -> None:
    one, other = make_request(steps=2, flow_shift=3.0), make_request(steps=12, seeds=(9,), prompt="one")

    def run(*requests: GenerationRequest) -> list[dict[str, str]]:
        return [digest(tiny.run_clip(request, 0, make_watch())) for request in requests]

    assert run(one, other) == run(other, one)[::-1]


def test_clips_of_a_request_are_those_of_their_seeds(
    tiny: Pipeline, make_request: MakeRequest, make_watch: MakeWatch, digest: Digest
) -> None:
    both = make_request(seeds=(2**64 - 1, 0))
    for index, seed in enumerate(both.seeds):
        solo = make_request(seeds=(seed,))
        assert digest(tiny.run_clip(both, index, make_watch())) == digest(tiny.run_clip(solo, 0, make_watch()))


def test_latents_alone_are_those_of_the_whole_run_and_nothing_is_decoded(
    tiny: Pipeline, make_request: MakeRequest, make_watch: MakeWatch, digest: Digest
) -> None:
    whole = tiny.run_clip(make_request(), 0, make_watch())
    clip = tiny.run_clip(make_request(outputs=(OutputFormat.LATENTS,)), 0, make_watch())
    assert (clip.frames, clip.audio, clip.sample_rate) == (None, None, 0)
    assert digest(clip) == {name: value for name, value in digest(whole).items() if "latents" in name}


def test_requests_interleaved_step_by_step_do_not_mix_their_schedules(
    tiny: Pipeline, make_request: MakeRequest, make_watch: MakeWatch, digest: Digest
) -> None:
    requests = [make_request(steps=5, flow_shift=2.0), make_request(steps=9, audio_flow_shift=9.0, seeds=(3,))]
    solo = [digest(tiny.run_clip(request, 0, make_watch())) for request in requests]
    turns = threading.Barrier(2)

    def take_turns(event: object) -> None:
        if isinstance(event, StepDone) and event.step <= 4:  # as many steps as both have
            turns.wait(timeout=60)

    found: list[dict[str, str]] = [{}, {}]

    def run(index: int) -> None:
        found[index] = digest(tiny.run_clip(requests[index], 0, make_watch(listener=take_turns)))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == solo


def test_float32(
    tiny_folder: Path,
    stock_tiny: Any,
    make_request: MakeRequest,
    make_watch: MakeWatch,
    digest: Digest,
    stock_digest: StockDigest,
) -> None:
    pipeline = load_pipeline(tiny_folder, device=DeviceChoice.CPU, precision=Precision.FLOAT32)
    stock = diffusers.ModularPipeline.from_pretrained(str(tiny_folder))
    stock.load_components(dtype=torch.float32)
    stock.update_components(processor=stock_tiny.processor)
    request = make_request()
    assert digest(pipeline.run_clip(request, 0, make_watch())) == stock_digest(stock, request)


def test_several_threads_of_computation(
    digits: Pipeline,
    stock_digits: Any,
    make_request: MakeRequest,
    make_watch: MakeWatch,
    digest: Digest,
    stock_digest: StockDigest,
) -> None:
    request = make_request(steps=2)
    torch.set_num_threads(2)
    try:
        assert digest(digits.run_clip(request, 0, make_watch())) == stock_digest(stock_digits, request)
    finally:
        torch.set_num_threads(1)


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device(
    tiny_folder: Path, make_request: MakeRequest, make_watch: MakeWatch, digest: Digest, stock_digest: StockDigest
) -> None:
    pipeline = load_pipeline(tiny_folder)
    stock = diffusers.ModularPipeline.from_pretrained(str(tiny_folder))
    stock.load_components(dtype=torch.bfloat16)
    stock.update_components(processor=pipeline.components["processor"].value)
    stock.to("cuda")
    request = make_request()
    clip = pipeline.run_clip(request, 0, make_watch())
    expected = stock_digest(stock, request)
    assert digest(clip) == expected
