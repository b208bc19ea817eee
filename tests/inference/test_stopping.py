"""A request stops where it is told to or where it goes wrong, and leaves nothing behind."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sojourn.inference.errors import DeadlineExceeded, NonFiniteOutput, RequestCancelled
from sojourn.inference.pipeline import Pipeline
from sojourn.inference.requests import Clip, GenerationRequest
from sojourn.inference.watch import Event, Stage, StageBegan, StepDone, Watch

MakeRequest = Callable[..., GenerationRequest]
Digest = Callable[[Clip], dict[str, str]]


class Recorder:
    """A listener that keeps all events and acts on one of them."""

    def __init__(self, at: Event | None = None, action: Callable[[Watch], None] = Watch.cancel) -> None:
        self.events: list[Event] = []
        self.at = at
        self.action = action
        self.now = 0.0
        self.watch = Watch(clock=lambda: self.now, listener=self)

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if event == self.at:
            self.action(self.watch)


@pytest.fixture
def before(tiny: Pipeline, make_request: MakeRequest, digest: Digest) -> dict[str, str]:
    return digest(tiny.run_clip(make_request(), 0, Recorder().watch))


def assert_nothing_is_left(tiny: Pipeline, make_request: MakeRequest, digest: Digest, before: dict[str, str]) -> None:
    assert digest(tiny.run_clip(make_request(), 0, Recorder().watch)) == before


def test_stages_and_steps_are_told_in_order(tiny: Pipeline, make_request: MakeRequest) -> None:
    recorder = Recorder()
    tiny.run_clip(make_request(steps=3), 0, recorder.watch)
    assert recorder.events == [
        StageBegan(stage=Stage.TEXT_ENCODE),
        StageBegan(stage=Stage.DENOISE, steps=2),
        StepDone(step=1, steps=2),
        StepDone(step=2, steps=2),
        StageBegan(stage=Stage.DECODE),
    ]


def test_stages_of_keyframes(tiny: Pipeline, make_request: MakeRequest, pictures: Any) -> None:
    recorder = Recorder()
    tiny.run_clip(make_request(workflow="fl2va", first_image=pictures[0]), 0, recorder.watch)
    stages = [event.stage for event in recorder.events if isinstance(event, StageBegan)]
    assert stages == [Stage.PREPARE, Stage.TEXT_ENCODE, Stage.VAE_ENCODE, Stage.DENOISE, Stage.DECODE]


def test_steps_that_the_shift_makes_equal_are_not_counted(tiny: Pipeline, make_request: MakeRequest) -> None:
    recorder = Recorder()
    with (
        hook(tiny.components["transformer"].value, lambda output: recorder.watch.cancel()),
        pytest.raises(RequestCancelled),
    ):
        tiny.run_clip(make_request(steps=1000, flow_shift=1e6), 0, recorder.watch)
    began, done = recorder.events[-2:]
    assert isinstance(began, StageBegan)
    assert 1 < began.steps < 999
    assert done == StepDone(step=1, steps=began.steps)


@pytest.mark.parametrize(
    "at",
    [
        StageBegan(stage=Stage.TEXT_ENCODE),
        StageBegan(stage=Stage.DENOISE, steps=5),
        StepDone(step=1, steps=5),
        StepDone(step=3, steps=5),
        StepDone(step=5, steps=5),
        StageBegan(stage=Stage.DECODE),
    ],
    ids=str,
)
def test_cancel_is_seen_before_anything_more_is_told(
    tiny: Pipeline, make_request: MakeRequest, digest: Digest, before: dict[str, str], at: Event
) -> None:
    recorder = Recorder(at=at)
    with pytest.raises(RequestCancelled):
        tiny.run_clip(make_request(steps=6), 0, recorder.watch)
    assert recorder.events[-1] == at
    assert_nothing_is_left(tiny, make_request, digest, before)


@pytest.mark.parametrize("module", ["text_encoder", "vae", "audio_vae"])
def test_cancel_inside_a_block_is_seen_right_after_it(
    tiny: Pipeline, make_request: MakeRequest, digest: Digest, before: dict[str, str], module: str
) -> None:
    recorder = Recorder()
    part = tiny.components[module].value
    target = part.model if module == "text_encoder" else part.decoder
    with hook(target, lambda output: recorder.watch.cancel()), pytest.raises(RequestCancelled):
        tiny.run_clip(make_request(), 0, recorder.watch)
    last = recorder.events[-1]
    assert isinstance(last, StageBegan)
    assert last.stage is (Stage.TEXT_ENCODE if module == "text_encoder" else Stage.DECODE)
    assert_nothing_is_left(tiny, make_request, digest, before)


@pytest.mark.parametrize("at", [StageBegan(stage=Stage.TEXT_ENCODE), StepDone(step=2, steps=5)], ids=str)
def test_deadline_stops_at_the_next_check(
    tiny: Pipeline, make_request: MakeRequest, digest: Digest, before: dict[str, str], at: Event
) -> None:
    recorder = Recorder(at=at)
    recorder.watch.deadline = 10.0

    def pass_deadline(watch: Watch) -> None:
        recorder.now = 10.5

    recorder.action = pass_deadline
    with pytest.raises(DeadlineExceeded):
        tiny.run_clip(make_request(steps=6), 0, recorder.watch)
    assert recorder.events[-1] == at
    assert_nothing_is_left(tiny, make_request, digest, before)


@contextlib.contextmanager
def hook(module: torch.nn.Module, action: Callable[[Any], Any]) -> Iterator[None]:
    """Lets `action` see, and replace, what a module returns."""
    handle = module.register_forward_hook(lambda _module, _inputs, output: action(output))
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def spoiled(module: torch.nn.Module, name: str, value: float) -> Iterator[None]:
    """Puts one bad value into a parameter, on a copy, and takes it back."""
    kept = module._parameters[name]
    assert kept is not None
    bad = kept.clone()
    bad.view(-1)[0] = value
    module._parameters[name] = torch.nn.Parameter(bad, requires_grad=False)
    try:
        yield
    finally:
        module._parameters[name] = kept


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_spoiled_weight_fails_at_the_first_step(
    tiny: Pipeline, make_request: MakeRequest, digest: Digest, before: dict[str, str], value: float
) -> None:
    projection = tiny.components["transformer"].value.proj_out
    with spoiled(projection, "bias", value), pytest.raises(NonFiniteOutput) as caught:
        tiny.run_clip(make_request(steps=6), 0, Recorder().watch)
    assert (caught.value.stage, caught.value.step) == ("denoise", 1)
    assert "step 1 of stage denoise" in str(caught.value)
    assert_nothing_is_left(tiny, make_request, digest, before)


@pytest.mark.parametrize("output", [0, 1], ids=["video", "audio"])
def test_overflow_in_a_later_step_names_that_step(
    tiny: Pipeline, make_request: MakeRequest, digest: Digest, before: dict[str, str], output: int
) -> None:
    recorder = Recorder()

    def overflow(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if StepDone(step=3, steps=5) in recorder.events:
            outputs[output].view(-1)[-1] = float("inf")
        return outputs

    with hook(tiny.components["transformer"].value, overflow), pytest.raises(NonFiniteOutput) as caught:
        tiny.run_clip(make_request(steps=6), 0, recorder.watch)
    assert (caught.value.stage, caught.value.step) == ("denoise", 4)
    assert recorder.events[-1] == StepDone(step=3, steps=5)
    assert_nothing_is_left(tiny, make_request, digest, before)


@pytest.mark.parametrize(
    ("component", "path", "stage"),
    [
        ("text_encoder", "model.language_model.layers.3.mlp.down_proj", "text_encode"),
        ("vae", "post_quant_conv", "decode"),
        ("audio_vae", "dec_in_proj", "decode"),
    ],
)
def test_spoiled_weight_outside_the_loop_names_the_stage(
    tiny: Pipeline,
    make_request: MakeRequest,
    digest: Digest,
    before: dict[str, str],
    component: str,
    path: str,
    stage: str,
) -> None:
    module = tiny.components[component].value.get_submodule(path)
    with spoiled(module, "weight", float("nan")), pytest.raises(NonFiniteOutput) as caught:
        tiny.run_clip(make_request(), 0, Recorder().watch)
    assert (caught.value.stage, caught.value.step) == (stage, None)
    assert_nothing_is_left(tiny, make_request, digest, before)


@pytest.mark.parametrize("component", ["text_encoder", "transformer", "vae"])
def test_fault_inside_a_module_reaches_the_caller_as_it_is(
    tiny: Pipeline, make_request: MakeRequest, digest: Digest, before: dict[str, str], component: str
) -> None:
    def fail(output: Any) -> None:
        raise RuntimeError("out of memory, say")

    part = tiny.components[component].value
    target = {"text_encoder": lambda: part.model, "transformer": lambda: part, "vae": lambda: part.decoder}[component]()
    with hook(target, fail), pytest.raises(RuntimeError, match="out of memory, say"):
        tiny.run_clip(make_request(), 0, Recorder().watch)
    assert_nothing_is_left(tiny, make_request, digest, before)


def test_nothing_is_printed_on_the_request_path(
    tiny: Pipeline, make_request: MakeRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny.run_clip(make_request(), 0, Recorder().watch)
    with hook(tiny.components["transformer"].value, lambda output: 1 / 0), pytest.raises(ZeroDivisionError):
        tiny.run_clip(make_request(), 0, Recorder().watch)
    assert capfd.readouterr() == ("", "")
