"""With the cache on, latents, frames and audio are those with it off, bit for bit, and no projection is loaded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3AudioReference, MiniMaxH3ImageReference
from PIL import Image
from sojourn.inference.adaln.counters import Counters, Result, Source
from sojourn.inference.adaln.refusals import PlansRefused
from sojourn.inference.adaln.settings import Mode, PlanCacheSettings
from sojourn.inference.pipeline import DeviceChoice, Pipeline, Precision, load_pipeline
from sojourn.inference.requests import Clip, GenerationRequest, OutputFormat, Workflow
from sojourn.inference.tiny import tiny_random
from sojourn.inference.watch import Watch

MakeRequest = Callable[..., GenerationRequest]
MakeWatch = Callable[..., Watch]
Digest = Callable[[Clip], dict[str, str]]
Pictures = tuple[Image.Image, Image.Image]

ON = PlanCacheSettings(mode=Mode.ON, host_bytes=50_000_000)
OFF = PlanCacheSettings(mode=Mode.OFF)


def load(folder: Path, settings: PlanCacheSettings, counters: Counters | None = None) -> Pipeline:
    return load_pipeline(folder, device=DeviceChoice.CPU, plan_settings=settings, plan_observer=counters)


class Both:
    """A model twice: as it is, and on stored rows."""

    def __init__(self, folder: Path, settings: PlanCacheSettings = ON) -> None:
        self.plain = load(folder, OFF)
        self.counters = Counters()
        self.cached = load(folder, settings, self.counters)


@pytest.fixture(scope="module")
def digits_twice(digits_folder: Path) -> Both:
    return Both(digits_folder)


@pytest.fixture(scope="module")
def tiny_twice(tiny_folder: Path) -> Both:
    return Both(tiny_folder)


@pytest.fixture(scope="module")
def deep_twice(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """A bfloat16 transformer of 24 layers."""
    return Both(tiny_random("minimax-h3", tmp_path_factory.mktemp("models") / "deep", layers=24))


@pytest.fixture(scope="module")
def references(pictures: Pictures) -> dict[str, tuple[Any, ...]]:
    picture, other = (MiniMaxH3ImageReference(image=image) for image in pictures)
    voice = MiniMaxH3AudioReference(audio=torch.sin(torch.arange(32000) / 20)[None] * 0.3)
    return {"picture": (picture,), "voice": (voice, picture, other)}


def assert_equal(both: Both, request: GenerationRequest, make_watch: MakeWatch, digest: Digest) -> None:
    expected = digest(both.plain.run_clip(request, 0, make_watch()))
    assert digest(both.cached.run_clip(request, 0, make_watch())) == expected
    assert digest(both.cached.run_clip(request, 0, make_watch())) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 64, "height": 64, "steps": 2},
        {"width": 64, "height": 64, "steps": 12},
        {"steps": 30, "outputs": (OutputFormat.LATENTS,)},
        {"flow_shift": 5.0, "audio_flow_shift": 1.5, "steps": 8},
        {"flow_shift": 1.0, "audio_flow_shift": 1.0, "steps": 5},
        {"flow_shift": 100.0, "audio_flow_shift": 0.5, "steps": 6},
    ],
    ids=lambda changes: ", ".join(f"{name} {value}" for name, value in changes.items()),
)
def test_the_shipped_model(
    digits_twice: Both, make_request: MakeRequest, make_watch: MakeWatch, digest: Digest, changes: dict[str, Any]
) -> None:
    assert_equal(digits_twice, make_request(**changes), make_watch, digest)


@pytest.mark.parametrize("workflow", ["t2va", "fl2va", "fl2va, both", "ref2va, picture", "ref2va, voice"])
@pytest.mark.parametrize(
    ("model", "steps", "shifts"),
    [("tiny_twice", 2, (12.0, 3.0)), ("tiny_twice", 9, (4.0, 7.0)), ("deep_twice", 5, (12.0, 3.0))],
)
def test_every_workflow(
    request: pytest.FixtureRequest,
    make_request: MakeRequest,
    make_watch: MakeWatch,
    digest: Digest,
    pictures: Pictures,
    references: dict[str, tuple[Any, ...]],
    model: str,
    workflow: str,
    steps: int,
    shifts: tuple[float, float],
) -> None:
    name, _, kind = workflow.partition(", ")
    asked = make_request(
        workflow=Workflow(name),
        steps=steps,
        flow_shift=shifts[0],
        audio_flow_shift=shifts[1],
        first_image=pictures[0] if name == "fl2va" else None,
        last_image=pictures[1] if kind == "both" else None,
        references=references.get(kind, ()),
    )
    assert_equal(request.getfixturevalue(model), asked, make_watch, digest)


def test_weights_that_are_computed_in_another_dtype_than_stored(
    tiny_folder: Path, make_request: MakeRequest, make_watch: MakeWatch, digest: Digest
) -> None:
    plain, cached = (
        load_pipeline(tiny_folder, device=DeviceChoice.CPU, precision=Precision.FLOAT32, plan_settings=settings)
        for settings in (OFF, ON)
    )
    rows = cached.plans.transformers["transformer"].cache.slab.rows
    assert set(rows) == {torch.float32}
    request = make_request(steps=6)
    assert digest(cached.run_clip(request, 0, make_watch())) == digest(plain.run_clip(request, 0, make_watch()))


def test_rows_from_the_host_tier_and_from_the_store_give_the_same_clip(
    tiny_folder: Path, tmp_path: Path, make_request: MakeRequest, make_watch: MakeWatch, digest: Digest
) -> None:
    one, other = make_request(steps=4), make_request(steps=5)
    settings = replace(ON, plans=4, store=tmp_path)
    first = Both(tiny_folder, settings)
    expected = digest(first.plain.run_clip(one, 0, make_watch()))
    for asked in (one, other, one):
        found = digest(first.cached.run_clip(asked, 0, make_watch()))
        assert (found == expected) == (asked is one)
    assert first.counters.requests == {Result.BUILT: 2, Result.HOST: 1}
    counters = Counters()
    second = load(tiny_folder, settings, counters)
    assert digest(second.run_clip(one, 0, make_watch())) == expected
    assert counters.requests == {Result.STORE: 1}
    assert counters.read_bytes == 0


def test_each_transformer_has_weights_and_a_cache_of_its_own(
    tiny_folder: Path,
    make_request: MakeRequest,
    make_watch: MakeWatch,
    digest: Digest,
    references: dict[str, tuple[Any, ...]],
) -> None:
    both = Both(tiny_folder)
    caches = {name: cached.cache for name, cached in both.cached.plans.transformers.items()}
    assert set(caches) == {"transformer", "transformer_ref"}
    both.cached.run_clip(make_request(), 0, make_watch())
    assert [len(cache.slots.published) for cache in caches.values()] == [2, 0]
    asked = make_request(workflow=Workflow.REF2VA, references=references["picture"])
    assert_equal(both, asked, make_watch, digest)
    assert len(caches["transformer_ref"].slots.published) == 2
    rows = [cache.slab.rows[torch.bfloat16][0, 0] for cache in caches.values()]
    assert not torch.equal(*rows)


def test_the_stock_forward_is_unchanged(tiny_twice: Both) -> None:
    plain, cached = (part.components["transformer"].value for part in (tiny_twice.plain, tiny_twice.cached))
    assert type(plain) is type(cached)
    assert "forward" not in vars(cached)


def test_projections_are_never_loaded(digits_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sojourn.inference.loading.mapping import MappedFile

    read: list[str] = []
    tensor = MappedFile.tensor

    def spy(self: MappedFile, name: str) -> torch.Tensor:
        read.append(name)
        return tensor(self, name)

    monkeypatch.setattr(MappedFile, "tensor", spy)
    pipeline = load(digits_folder, ON)
    assert "transformer_blocks.0.attn.to_q.weight" in read
    assert not [name for name in read if "adaln_proj" in name or name.startswith("norm_out.linear")]
    transformer = pipeline.components["transformer"].value
    assert not [name for name in transformer.state_dict() if "adaln_proj" in name or "norm_out.linear" in name]
    assert not [name for name, buffer in transformer.named_buffers() if buffer.is_meta]


def test_memory_falls_by_the_projections(digits_twice: Both) -> None:
    sizes = [part.components["transformer"].size_bytes for part in (digits_twice.plain, digits_twice.cached)]
    table = digits_twice.cached.plans.transformers["transformer"].cache.slab.table
    assert sizes[0] - sizes[1] == table.weight_bytes


def test_a_request_whose_rows_are_held_reads_no_weight(
    tiny_folder: Path, make_request: MakeRequest, make_watch: MakeWatch
) -> None:
    counters = Counters()
    pipeline = load(tiny_folder, ON, counters)
    for seed in range(3):
        pipeline.run_clip(make_request(seeds=(seed,), prompt=f"seed {seed}"), 0, make_watch())
    table = pipeline.plans.transformers["transformer"].cache.slab.table
    assert counters.requests == {Result.BUILT: 1, Result.HIT: 2}
    assert counters.plans[Source.GPU] == 4
    assert counters.read_bytes == table.weight_bytes


def test_a_request_with_more_steps_than_the_slab_holds_is_refused_and_the_next_one_served(
    tiny_folder: Path, make_request: MakeRequest, make_watch: MakeWatch, digest: Digest
) -> None:
    both = Both(tiny_folder, replace(ON, plans=3))
    with pytest.raises(PlansRefused, match="has 5 different plans and --adaln-plans is 3; set it to 5"):
        both.cached.run_clip(make_request(steps=6), 0, make_watch())
    with pytest.raises(PlansRefused):
        both.cached.check(make_request(steps=6))
    both.cached.check(make_request(steps=4))
    assert both.counters.requests == {Result.REFUSED: 2}
    assert_equal(both, make_request(steps=4), make_watch, digest)


def test_a_request_ends_its_lease_however_it_ends(
    tiny_folder: Path, make_request: MakeRequest, make_watch: MakeWatch
) -> None:
    pipeline = load(tiny_folder, ON)
    cache = pipeline.plans.transformers["transformer"].cache
    pipeline.run_clip(make_request(), 0, make_watch())
    assert not cache.slots.pinned
    watch = make_watch()

    def stop(event: object) -> None:
        if cache.slots.pinned:
            watch.cancel()

    watch.listener = stop
    with pytest.raises(BaseException, match="cancelled"):
        pipeline.run_clip(make_request(), 0, watch)
    assert not cache.slots.pinned


def test_requests_side_by_side_read_their_own_rows(
    tiny_folder: Path, make_request: MakeRequest, make_watch: MakeWatch, digest: Digest
) -> None:
    import threading

    both = Both(tiny_folder)
    requests = [make_request(steps=5, flow_shift=2.0), make_request(steps=7, audio_flow_shift=9.0, seeds=(3,))]
    expected = [digest(both.plain.run_clip(asked, 0, make_watch())) for asked in requests]
    found: list[dict[str, str]] = [{}, {}]

    def run(index: int) -> None:
        found[index] = digest(both.cached.run_clip(requests[index], 0, make_watch()))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
