import copy
import dataclasses
import importlib.util
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import (
    MiniMaxH3AudioReference,
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
)
from PIL import Image
from sojourn.inference.errors import InvalidRequest, Unsupported
from sojourn.inference.pipeline import DeviceChoice, Pipeline, load_pipeline
from sojourn.inference.requests import GenerationRequest, Workflow
from sojourn.inference.server import media
from sojourn.inference.watch import Watch

MakeRequest = Callable[..., GenerationRequest]
MakeWatch = Callable[..., Watch]


def test_limits_come_from_the_model(digits: Pipeline) -> None:
    limits = digits.limits
    assert (limits.size_multiple, limits.min_edge, limits.max_edge, limits.max_pixels) == (32, 32, 128, 6144)
    assert (limits.min_frames, limits.max_frames, limits.frames_step, limits.frames_offset) == (124, 345, 17, 5)
    assert (limits.min_aspect_ratio, limits.max_aspect_ratio) == (0.25, 4)
    assert limits.min_steps == 2
    assert limits.max_prompt_tokens == 1024  # the text encoder's positions


def test_defaults_come_from_the_model(digits: Pipeline, tiny: Pipeline) -> None:
    assert dataclasses.astuple(digits.defaults) == (64, 64, 124, 50, 12.0, 3.0)
    assert (tiny.defaults.width, tiny.defaults.height) == (64, 32)  # the stock 16:9


@pytest.mark.parametrize(("ratio", "canvas"), [((1, 1), (64, 64)), ((16, 9), (96, 64)), ((1, 4), (32, 128))])
def test_canvas_follows_the_models_own_rule(digits: Pipeline, ratio: tuple[int, int], canvas: tuple[int, int]) -> None:
    assert digits.resolve_canvas(*ratio) == canvas


@pytest.mark.parametrize("ratio", [(41, 10), (1, 5), (0, 1), (-1, 1)])
def test_ratio_out_of_bounds_is_a_violation(digits: Pipeline, ratio: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match="aspect"):
        digits.resolve_canvas(*ratio)


def test_every_canvas_of_the_rule_is_within_the_limits(digits: Pipeline) -> None:
    for tenths in range(10, 401):
        for ratio in ((tenths, 100), (100, tenths)):
            if 0.25 <= ratio[0] / ratio[1] <= 4:
                width, height = digits.resolve_canvas(*ratio)
                assert max(width, height) <= digits.limits.max_edge
                assert width * height <= digits.limits.max_pixels


def test_components_are_told_with_parameters_and_bytes(digits: Pipeline) -> None:
    told = {summary.name: summary for summary in digits.summaries()}
    assert told["transformer"].class_name == "MiniMaxH3Transformer3DModel"
    assert told["transformer"].parameters == 2_847_048
    assert told["audio_vae"].size_bytes >= 4 * told["audio_vae"].parameters
    assert (told["tokenizer"].parameters, told["tokenizer"].size_bytes) == (0, 0)


def test_fingerprint_is_that_of_the_content(digits: Pipeline, tiny: Pipeline, tiny_folder: Path) -> None:
    assert digits.fingerprint() == digits.known_fingerprint
    assert len({digits.fingerprint(), tiny.fingerprint()}) == 2
    again = load_pipeline(tiny_folder, device=DeviceChoice.CPU, model_name="other")
    assert again.known_fingerprint == ""
    again.start_fingerprint()
    assert again.fingerprint() == tiny.fingerprint()
    assert (again.model_name, tiny.model_name) == ("other", "tiny")


def test_tokens_are_counted_as_the_text_encoder_sees_them(digits: Pipeline) -> None:
    assert digits.count_tokens("") == 0
    assert digits.count_tokens("a moving seven") == 3


def test_workflows_are_those_whose_weights_and_preprocessing_are_there(digits: Pipeline, tiny: Pipeline) -> None:
    assert digits.workflows == (Workflow.T2VA,)
    assert tiny.workflows == (Workflow.T2VA, Workflow.FL2VA, Workflow.REF2VA)


def test_folder_with_one_of_two_partitions_serves_what_that_one_can(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "ref", ignore=lambda _, names: {"transformer"} & set(names)))
    pipeline = load_pipeline(folder, device=DeviceChoice.CPU)
    assert pipeline.workflows == (Workflow.REF2VA,)
    assert "no transformer;" in pipeline.unavailable[Workflow.T2VA]


@pytest.mark.parametrize(
    ("workflow", "advice"), [(Workflow.FL2VA, "preprocessor_config.json"), (Workflow.REF2VA, "transformer_ref")]
)
def test_workflow_that_cannot_be_served_is_refused_with_what_to_change(
    digits: Pipeline, make_request: MakeRequest, make_watch: MakeWatch, workflow: Workflow, advice: str
) -> None:
    with pytest.raises(Unsupported, match=advice):
        digits.run_clip(make_request(workflow=workflow), 0, make_watch())


def test_video_reference_without_its_preprocessing_is_refused_with_what_to_install(
    tiny: Pipeline, make_request: MakeRequest
) -> None:
    if tiny.components["processor"].value.video_processor is not None:
        pytest.skip("video pre-processing is installed here")
    video = MiniMaxH3VideoReference(frames=[Image.new("RGB", (32, 32))] * 48)
    with pytest.raises(Unsupported, match="pip install torchvision"):
        tiny.check(make_request(workflow=Workflow.REF2VA, references=(video,)))


def test_soundtrack_that_needs_a_missing_package_is_refused_with_its_name(
    tiny: Pipeline, make_request: MakeRequest, make_watch: MakeWatch
) -> None:
    if importlib.util.find_spec("torchaudio"):
        pytest.skip("it is installed here")
    references = (picture(), MiniMaxH3AudioReference(audio=torch.zeros(1, 44100), sample_rate=44100))
    with pytest.raises(Unsupported, match="torchaudio"):
        tiny.run_clip(make_request(workflow=Workflow.REF2VA, references=references), 0, make_watch())


def picture(width: int = 32, height: int = 32) -> MiniMaxH3ImageReference:
    return MiniMaxH3ImageReference(image=Image.new("RGB", (width, height)))


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"prompt": "a <|image_pad|>"}, "prompt", "leave it out"),
        ({"references": (picture(),) * 10}, "references", "10 image references, and at most 9"),
        ({"references": (MiniMaxH3AudioReference(audio=torch.zeros(1, 8)),)}, "references", "audio alone"),
        ({"references": (picture(10, 41),)}, "references", "picture at 0 is 10x41"),
    ],
)
def test_what_the_blocks_would_refuse_half_way_is_refused_before(
    tiny: Pipeline, make_request: MakeRequest, changes: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tiny.check(make_request(workflow=Workflow.REF2VA, **({"references": (picture(),)} | changes)))
    (violation,) = caught.value.violations
    assert violation.field == field
    assert message in violation.description


def test_references_become_the_familys_types(tiny: Pipeline) -> None:
    image = tiny.reference("image", Image.new("RGB", (40, 30)))
    assert isinstance(image, MiniMaxH3ImageReference)
    audio = tiny.reference("audio", media.Audio(samples=np.zeros((1, 800), np.float32), sample_rate=8000))
    assert isinstance(audio, MiniMaxH3AudioReference)
    assert (audio.sample_rate, tuple(audio.audio.shape)) == (8000, (1, 800))


def test_cuda_without_a_device_is_refused(tiny_folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(Unsupported, match="cuda"):
        load_pipeline(tiny_folder, device=DeviceChoice.CUDA)


def test_setting_up_a_request_takes_less_than_a_millisecond(tiny: Pipeline, make_request: MakeRequest) -> None:
    request, seconds = make_request(), []
    for _ in range(20):
        begin = time.perf_counter()
        tiny._for_request(tiny.family.schedule(tiny._stock, request).own)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.001


def test_blocks_survive_a_deep_copy_and_hold_nothing_of_a_request(
    tiny: Pipeline, make_request: MakeRequest, make_watch: MakeWatch
) -> None:
    def attributes(block: Any) -> dict[str, Any]:
        own = {name: value for name, value in vars(block).items() if name != "sub_blocks"}
        return {"": own} | {name: attributes(part) for name, part in block.sub_blocks.items()}

    blocks = [copy.deepcopy(block) for block in tiny._blocks.values()]
    before = [str(attributes(block)) for block in blocks]
    tiny.run_clip(make_request(), 0, make_watch())
    assert [str(attributes(block)) for block in tiny._blocks.values()] == before


def test_checkpoints_stand_between_all_blocks(tiny: Pipeline) -> None:
    for blocks in tiny._blocks.values():
        names = [name for name in blocks.sub_blocks if not name.endswith(".begin")]
        assert names[1::2] == [f"{name}.check" for name in names[::2]]
        loop = blocks.sub_blocks["denoise.denoise"]
        assert list(loop.sub_blocks)[-1] == "guard"
