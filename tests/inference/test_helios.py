"""Helios base, mid and distilled on tiny random models of the real classes: what a chunked family has to keep."""

import dataclasses
import inspect
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.helios import denoise
from PIL import Image
from sojourn.inference.adaln.settings import Mode, PlanCacheSettings
from sojourn.inference.errors import DeadlineExceeded, InvalidRequest, NonFiniteOutput, RequestCancelled, Unsupported
from sojourn.inference.families import helios, helios_noise, helios_text
from sojourn.inference.families.helios_settings import BASE, DISTILLED, MID
from sojourn.inference.loading.folder import INDEX_NAME
from sojourn.inference.pipeline import DeviceChoice, Pipeline, Precision, load_pipeline
from sojourn.inference.requests import Clip, GenerationRequest, OutputFormat, Workflow
from sojourn.inference.tiny import tiny_random
from sojourn.inference.watch import Event, Stage, StageBegan, StepDone, Watch

RELEASES = (BASE, MID, DISTILLED)
LATENTS, DECODED = (OutputFormat.LATENTS,), (OutputFormat.PNG_FRAMES,)
Digest = Callable[[Clip], dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Model:
    """A tiny model, and the stock pipeline on it."""

    name: str
    folder: Path
    pipeline: Pipeline
    stock: Any

    def run(self, **changes: Any) -> Clip:
        watch = changes.pop("watch", None) or Watch(clock=time.monotonic)
        return self.pipeline.run_clip(self.request(**changes), 0, watch)

    def request(self, **changes: Any) -> GenerationRequest:
        fields: dict[str, Any] = {
            "prompt": "a moving seven", "workflow": Workflow.T2VA, "width": 64, "height": 64, "frames": 34,
            "steps": 2, "flow_shift": 0.0, "audio_flow_shift": 0.0, "seeds": (7,), "outputs": LATENTS,
        }  # fmt: skip
        return GenerationRequest(**(fields | changes))

    def run_stock(self, request: GenerationRequest) -> tuple[torch.Tensor, np.ndarray]:
        """Latents of all chunks and frames of the stock pipeline, with the release's guider."""
        levels = {settings.name: settings.levels for settings in RELEASES}[self.name]
        steps: dict[str, Any] = {"num_inference_steps": request.steps}
        if levels > 1:
            steps = {"pyramid_num_inference_steps_list": [request.steps] * levels}
        values = self.stock(
            prompt=request.prompt,
            width=request.width,
            height=request.height,
            num_frames=request.frames,
            generator=torch.Generator().manual_seed(request.seeds[0]),
            output_type="np",
            **steps,
            **({"image": request.first_image} if request.first_image else {}),
        ).values
        return torch.cat(values["latent_chunks"], dim=2).float(), values["videos"][0]


def load(folder: Path, *, precision: Precision = Precision.BFLOAT16) -> Model:
    pipeline = load_pipeline(folder, device=DeviceChoice.CPU, precision=precision)
    diffusers.utils.logging.set_verbosity(50)
    stock = diffusers.ModularPipeline.from_pretrained(str(folder))
    stock.load_components(dtype=getattr(torch, precision.value))
    settings = next(settings for settings in RELEASES if settings.name == pipeline.family.name)
    stock.update_components(guider=helios._guider(settings))
    return Model(pipeline.family.name, folder, pipeline, stock)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    root = tmp_path_factory.mktemp("helios")
    return {settings.name: load(tiny_random(settings.name, root / settings.name)) for settings in RELEASES}


@pytest.fixture(params=[settings.name for settings in RELEASES])
def model(models: dict[str, Model], request: pytest.FixtureRequest) -> Model:
    return models[request.param]


class Recorder:
    """A listener that keeps all events and acts on one of them."""

    def __init__(self, at: Event | None = None, action: Callable[["Recorder"], None] | None = None) -> None:
        self.events: list[Event] = []
        self.at, self.action, self.now = at, action or (lambda recorder: recorder.watch.cancel()), 0.0
        self.watch = Watch(clock=lambda: self.now, listener=self)

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if event == self.at:
            self.action(self)

    @property
    def steps(self) -> list[StepDone]:
        return [event for event in self.events if isinstance(event, StepDone)]


def test_parameters_are_those_of_stock_loading_each_library_by_its_own_rule(models: dict[str, Model]) -> None:
    """Of T5, transformers keeps the feed-forward's output in float32 beside float16, and not beside bfloat16."""
    model = models["helios-base"]
    for name in ("text_encoder", "transformer", "vae"):
        expected = getattr(model.stock, name).state_dict()
        found = model.pipeline.components[name].value.state_dict()
        assert {key: tensor.dtype for key, tensor in found.items()} == {k: t.dtype for k, t in expected.items()}
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("frames", [33, 34, 99, 132])
def test_frames_are_exactly_as_many_and_those_of_the_stock_pipeline(model: Model, frames: int) -> None:
    request = model.request(frames=frames, steps=1)
    latents, stock_frames = model.run_stock(request)
    clip = model.run(frames=frames, steps=1, outputs=DECODED)
    assert clip.frames is not None
    assert len(clip.frames) == frames
    both = min(frames, len(stock_frames))
    assert torch.equal(clip.latents, latents)
    assert np.array_equal(clip.frames[:both], stock_frames[:both])


@pytest.mark.parametrize(
    "changes",
    [{"steps": 3, "seeds": (2**64 - 1,)}, {"width": 128, "prompt": "three, été ✓"}],
    ids=["3 steps, last seed", "another size"],
)
def test_latents_are_those_of_the_stock_pipeline(model: Model, changes: dict[str, Any]) -> None:
    expected, _ = model.run_stock(model.request(**changes))
    assert torch.equal(model.run(**changes).latents, expected)


def test_first_frame_conditions_as_in_the_stock_pipeline(model: Model) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8))
    changes = {"workflow": Workflow.FL2VA, "first_image": picture, "steps": 1, "outputs": DECODED}
    latents, frames = model.run_stock(model.request(**changes))
    clip = model.run(**changes)
    assert clip.frames is not None
    assert torch.equal(clip.latents, latents)
    assert np.array_equal(clip.frames, frames[:34])


def test_float32(models: dict[str, Model]) -> None:
    model = load(models["helios-mid"].folder, precision=Precision.FLOAT32)
    expected, _ = model.run_stock(model.request())
    assert torch.equal(model.run().latents, expected)


def test_one_seed_is_one_clip_whatever_ran_between(model: Model) -> None:
    before = model.run().latents
    model.run(seeds=(8,), steps=3, width=128, prompt="one")
    torch.manual_seed(123)
    np.random.seed(123)
    for at in (StepDone(step=1, steps=len_steps(model)), StepDone(step=3, steps=len_steps(model))):
        with pytest.raises(RequestCancelled):
            model.run(watch=Recorder(at).watch)
    assert torch.equal(model.run().latents, before)
    assert not torch.equal(model.run(seeds=(8,)).latents, before)


def test_requests_side_by_side_do_not_mix(model: Model) -> None:
    """Step by step in turns: schedulers, guiders and what is kept of the text are each request's own."""
    changes: list[dict[str, Any]] = [{"prompt": "one"}, {"prompt": "two", "seeds": (3,), "steps": 3}]
    alone = [model.run(**change).latents for change in changes]
    turns, found = threading.Barrier(2), [torch.empty(0)] * 2

    def take_turns(event: Event) -> None:
        if isinstance(event, StepDone) and event.step <= len_steps(model):  # as many steps as both have
            turns.wait(timeout=60)

    def run(index: int) -> None:
        watch = Watch(clock=time.monotonic, listener=take_turns)
        found[index] = model.run(**changes[index], watch=watch).latents

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [torch.equal(ours, expected) for ours, expected in zip(found, alone, strict=True)] == [True, True]


def len_steps(model: Model) -> int:
    return model.pipeline.evaluations(model.request())


@pytest.mark.parametrize(
    ("name", "steps", "frames", "expected"),
    [
        ("helios-base", 5, 33, 5),
        ("helios-base", 5, 132, 20),
        ("helios-mid", 4, 34, 2 * 3 * 4),
        ("helios-distilled", 2, 99, 3 * (4 + 2 + 2)),  # the first chunk is amplified
    ],
)
def test_progress_counts_steps_over_all_chunks_and_levels(
    models: dict[str, Model], name: str, steps: int, frames: int, expected: int
) -> None:
    model, recorder = models[name], Recorder()
    assert model.pipeline.evaluations(model.request(steps=steps, frames=frames)) == expected
    model.run(steps=steps, frames=frames, watch=recorder.watch)
    assert recorder.events == [
        StageBegan(stage=Stage.TEXT_ENCODE),
        StageBegan(stage=Stage.DENOISE, steps=expected),
        *(StepDone(step=step, steps=expected) for step in range(1, expected + 1)),
    ]


def test_cancel_in_the_second_chunk_at_its_second_level_ends_within_the_step(models: dict[str, Model]) -> None:
    model = models["helios-mid"]
    second_chunk_second_level = 3 * 4 + 4 + 1
    recorder = Recorder(StepDone(step=second_chunk_second_level, steps=24))
    with pytest.raises(RequestCancelled):
        model.run(steps=4, watch=recorder.watch)
    assert recorder.events[-1] == recorder.at


def test_deadline_counts_within_a_chunk(model: Model) -> None:
    def pass_deadline(recorder: Recorder) -> None:
        recorder.now = 10.5

    recorder = Recorder(StepDone(step=len_steps(model) - 1, steps=len_steps(model)), pass_deadline)
    recorder.watch.deadline = 10.0
    with pytest.raises(DeadlineExceeded):
        model.run(watch=recorder.watch)
    assert recorder.events[-1] == recorder.at


def test_overflow_names_its_step_in_any_chunk(model: Model) -> None:
    recorder, last = Recorder(), len_steps(model)

    def overflow(_module: object, _inputs: object, output: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        if len(recorder.steps) == last - 1:
            output[0].view(-1)[-1] = float("inf")
        return output

    before = model.run().latents
    handle = model.pipeline.components["transformer"].value.register_forward_hook(overflow)
    try:
        with pytest.raises(NonFiniteOutput) as caught:
            model.run(watch=recorder.watch)
    finally:
        handle.remove()
    assert (caught.value.stage, caught.value.step) == ("denoise", last)
    assert torch.equal(model.run().latents, before)


def test_cancel_between_two_chunks_is_seen_while_decoding(models: dict[str, Model]) -> None:
    model, recorder, decoded = models["helios-base"], Recorder(), []

    def cancel(*_: object) -> None:
        decoded.append(None)
        recorder.watch.cancel()

    # The VAE's quantiser is passed once a chunk.
    handle = model.pipeline.components["vae"].value.post_quant_conv.register_forward_hook(cancel)
    try:
        with pytest.raises(RequestCancelled):
            model.run(frames=99, steps=1, outputs=DECODED, watch=recorder.watch)
    finally:
        handle.remove()
    assert len(decoded) == 1


def test_keys_and_values_of_the_text_are_made_once_a_request(model: Model) -> None:
    transformer = model.pipeline.components["transformer"].value
    calls: dict[str, int] = {}
    parts = {
        "embedder": transformer.condition_embedder.text_embedder.linear_1,
        "keys": transformer.blocks[1].attn2.to_k,
        "values": transformer.blocks[1].attn2.to_v,
        "queries": transformer.blocks[1].attn2.to_q,
    }

    def count(name: str) -> Callable[..., None]:
        return lambda *_: calls.__setitem__(name, calls.get(name, 0) + 1)

    handles = [part.register_forward_hook(count(name)) for name, part in parts.items()]
    try:
        model.run()
    finally:
        for handle in handles:
            handle.remove()
    prompts = 1 if model.name == "helios-distilled" else 2  # the empty one, for guidance
    assert (calls["embedder"], calls["keys"], calls["values"]) == (prompts, prompts, prompts)
    assert calls["queries"] == prompts * len_steps(model)
    assert helios_text._kept.get() is None


def test_plan_cache_is_refused_with_the_reason_and_auto_leaves_it_off(models: dict[str, Model]) -> None:
    assert models["helios-base"].pipeline.plans.off_reason == "no_projection"
    with pytest.raises(Unsupported, match="HeliosTransformer3DModel has no modulation projection per block"):
        load_pipeline(
            models["helios-base"].folder, device=DeviceChoice.CPU, plan_settings=PlanCacheSettings(mode=Mode.ON)
        )


def test_settings_are_those_of_the_stock_blocks() -> None:
    """What the records say of guidance is what the denoising blocks themselves declare."""
    for settings in RELEASES:
        blocks = getattr(diffusers, settings.blocks_class)().get_workflow("text2video").sub_blocks
        loop = next(block for name, block in blocks.items() if name.startswith("denoise.") and block.sub_blocks)
        inner = loop.sub_blocks["denoise_inner"]
        declared = next(spec for spec in inner.expected_components if spec.name == "guider")
        made = helios._guider(settings)
        assert type(made) is declared.type_hint
        assert {name: made.config[name] for name in declared.config} == dict(declared.config)
        amplified = [param.default for param in inner.inputs if param.name == "is_amplify_first_chunk"]
        assert any(amplified) == settings.amplifies_first_chunk


def test_only_trained_sizes_are_offered_and_only_those_that_the_levels_can_halve(model: Model) -> None:
    class Stock:
        """A release: no sizes of its own in the index."""

        config: ClassVar[dict[str, Any]] = {}
        vae_scale_factor_spatial = 8
        transformer = model.pipeline.components["transformer"].value

    settings = next(settings for settings in RELEASES if settings.name == model.name)
    limits, defaults = helios._limits(settings, Stock), helios._defaults(settings, Stock)
    all_sizes = ((640, 384), (384, 640), (832, 480), (480, 832))
    assert limits.trained_sizes == (all_sizes if settings.levels == 1 else all_sizes[:2])
    assert (defaults.width, defaults.height, defaults.frames, defaults.steps) == (640, 384, 132, settings.steps)
    assert helios._canvas(settings, Stock, 5, 3) == (640, 384)
    assert model.pipeline.limits.trained_sizes == ((64, 64), (128, 64))  # this model's own
    with pytest.raises(InvalidRequest, match="not within 1:2 to 2:1"):
        model.pipeline.resolve_canvas(3, 1)


@pytest.mark.parametrize("gamma", [1 / 3, 0.2])
def test_block_noise_has_the_covariance_of_the_pyramid(gamma: float) -> None:
    """Also at the released gamma, where the stock factorisation fails or not by the last bit of a library."""
    generator = torch.Generator().manual_seed(0)
    noise = denoise.sample_block_noise(1, 4, 8, 64, 64, gamma, (1, 2, 2), device="cpu", generator=generator)
    patches = noise.view(1, 4, 8, 32, 2, 32, 2).permute(0, 1, 2, 3, 5, 4, 6).reshape(-1, 4)
    expected = torch.eye(4) * (1 + gamma) - gamma
    assert torch.allclose(patches.T.cov(), expected, atol=0.02)
    factor = helios_noise._factor(gamma)
    assert torch.allclose(factor @ factor.T, expected, atol=1e-6)


def test_fallback_draws_as_the_stock_function_where_both_exist() -> None:
    shape, gamma = (1, 2, 3, 8, 8), 0.2
    stock = helios_noise._stock_noise(*shape, gamma, device="cpu", generator=torch.Generator().manual_seed(1))
    factor = torch.linalg.cholesky(torch.eye(4) * (1 + gamma + 1e-8) - gamma)
    ours = helios_noise._noise_of(factor, shape, device="cpu", generator=torch.Generator().manual_seed(1))
    assert torch.allclose(ours, stock, atol=1e-6)


def test_folders_that_are_not_modular_are_told_by_class_and_value(models: dict[str, Model], tmp_path: Path) -> None:
    """The releases come with the index of a classic pipeline, and mid and distilled with one class."""
    for name, classic in (
        ("helios-base", {"_class_name": "HeliosPipeline"}),
        ("helios-mid", {"_class_name": "HeliosPyramidPipeline"}),
        ("helios-distilled", {"_class_name": "HeliosPyramidPipeline", "is_distilled": True}),
    ):
        folder = tmp_path / name
        shutil.copytree(models[name].folder, folder)
        index = json.loads((folder / INDEX_NAME).read_text())
        (folder / INDEX_NAME).unlink()
        parts = {
            part: entry[:2] for part, entry in index.items() if isinstance(entry, list) and part != "trained_sizes"
        }
        classic |= {"trained_sizes": index["trained_sizes"], "transformer_2": [None, None], **parts}
        (folder / "model_index.json").write_text(json.dumps(classic))
        pipeline = load_pipeline(folder, device=DeviceChoice.CPU)
        assert pipeline.family.name == name
        request = models[name].request(steps=1, frames=1)
        again = pipeline.run_clip(request, 0, Watch(clock=time.monotonic))
        assert torch.equal(again.latents, models[name].run(steps=1, frames=1).latents)


def test_last_keyframes_references_and_other_workflows_are_refused(models: dict[str, Model]) -> None:
    model, picture = models["helios-base"], Image.new("RGB", (64, 64))
    with pytest.raises(InvalidRequest, match="leave the last one out"):
        model.pipeline.check(model.request(workflow=Workflow.FL2VA, first_image=picture, last_image=picture))
    with pytest.raises(InvalidRequest, match="takes no image references"):
        model.pipeline.reference("image", picture)
    with pytest.raises(Unsupported, match="no such workflow; ask for one of t2va, fl2va"):
        model.pipeline.check(model.request(workflow=Workflow.REF2VA))


def test_nothing_is_printed_on_the_request_path(model: Model, capfd: pytest.CaptureFixture[str]) -> None:
    model.run(outputs=DECODED)
    assert capfd.readouterr() == ("", "")


def test_stock_step_still_has_the_arguments_that_are_covered() -> None:
    """The guard covers `step` of the request's scheduler, whose first result is what is checked."""
    for scheduler in (diffusers.HeliosScheduler, diffusers.HeliosDMDScheduler):
        names = list(inspect.signature(scheduler.step).parameters)
        assert names[:4] == ["self", "model_output", "timestep", "sample"]
