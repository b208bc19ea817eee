"""Tiers through the pipeline: lossless is the stock pipeline's bits whatever ran before, and nothing is hidden."""

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from sojourn.inference.adaln.settings import Mode as PlanMode
from sojourn.inference.adaln.settings import PlanCacheSettings
from sojourn.inference.errors import RequestCancelled, TierUnavailable
from sojourn.inference.offload.options import OffloadOptions
from sojourn.inference.offload.settings import parse_settings
from sojourn.inference.pipeline import Pipeline
from sojourn.inference.quality.blocks import minimax_h3 as blocks
from sojourn.inference.quality.observer import Action, Part
from sojourn.inference.quality.settings import Fusions, QualitySettings
from sojourn.inference.requests import Clip, GenerationRequest, OutputFormat, QualityTier, Workflow
from sojourn.inference.watch import StepDone, Watch

from tests.inference.quality.toys import Remembering

MakeRequest = Callable[..., GenerationRequest]
MakeWatch = Callable[..., Watch]
Run = Callable[..., Clip]
TIERS = list(QualityTier)
STEPS = 8


@pytest.fixture(scope="session")
def run(tiered: Pipeline, make_request: MakeRequest) -> Run:
    def run(tier: QualityTier, *, pipeline: Pipeline = tiered, **changes: Any) -> Clip:
        small = {"quality": tier, "steps": STEPS, "width": 16, "height": 16, "outputs": (OutputFormat.LATENTS,)}
        request = make_request(**(small | changes))
        return pipeline.run_clip(request, 0, Watch(clock=lambda: 0.0))

    return run


@pytest.fixture(scope="session")
def stock(stock_tiny: Any, stock_digest: Any, make_request: MakeRequest) -> dict[str, str]:
    whole = stock_digest(stock_tiny, make_request(steps=STEPS, width=16, height=16))
    return {name: value for name, value in whole.items() if "latents" in name}


@pytest.fixture(scope="session")
def alone(
    load_tiered: Callable[..., Pipeline], run: Run, digest: Any, stock: dict[str, str]
) -> dict[QualityTier, dict[str, str]]:
    """What each tier gives on a pipeline that has run nothing else; of lossless, the stock pipeline."""
    return {tier: digest(run(tier, pipeline=load_tiered())) for tier in TIERS[1:]} | {QualityTier.LOSSLESS: stock}


@pytest.fixture(autouse=True)
def _checked(run: Run, digest: Any, stock: dict[str, str]) -> Iterator[None]:
    """After every test, whatever it did, lossless is lossless."""
    yield
    clip = run(QualityTier.LOSSLESS)
    assert (clip.quality, clip.quality_reason) == (QualityTier.LOSSLESS, "")
    assert digest(clip) == stock


@pytest.mark.parametrize(("first", "second"), list(itertools.product(TIERS, TIERS)), ids=str)
def test_each_tier_is_its_own_after_any_other_and_lossless_is_stock(
    run: Run, digest: Any, stock: dict[str, str], alone: dict[QualityTier, dict[str, str]],
    first: QualityTier, second: QualityTier,
) -> None:  # fmt: skip
    for tier in (first, second, QualityTier.LOSSLESS):
        clip = run(tier)
        assert (clip.quality, clip.quality_reason) == (tier, "")
        assert digest(clip) == alone[tier]


def test_tiers_differ(alone: dict[QualityTier, dict[str, str]]) -> None:
    assert len({clip["latents"] for clip in alone.values()}) == len(TIERS)


def test_high_skips_some_evaluations_and_starts_every_clip_afresh(run: Run, observer: Remembering) -> None:
    seen = []
    for _ in range(2):
        observer.evaluations.clear()
        run(QualityTier.HIGH)
        seen.append(list(observer.evaluations))
    assert seen[0] == seen[1]
    assert len(seen[0]) == STEPS - 1
    assert seen[0][0] is False
    assert 0 < sum(seen[0]) < STEPS - 1


def test_mounted_on_change_only_and_symmetrically(run: Run, observer: Remembering, caplog: Any) -> None:
    run(QualityTier.LOSSLESS)
    observer.changes.clear()
    caplog.set_level("DEBUG", logger="sojourn.inference.quality")
    for tier in (QualityTier.EXTRA_HIGH, QualityTier.EXTRA_HIGH, QualityTier.HIGH, QualityTier.HIGH):
        run(tier)
    assert observer.changes == [(Part.NORM_MODULATE, Action.MOUNT), (Part.STEP_CACHE, Action.MOUNT)]
    layers = 2
    assert observer.sites == {Part.NORM_MODULATE: 2 * layers + 1, Part.STEP_CACHE: layers}
    observer.changes.clear()
    run(QualityTier.EXTRA_HIGH)
    run(QualityTier.LOSSLESS)
    run(QualityTier.LOSSLESS)
    assert observer.changes == [(Part.STEP_CACHE, Action.UNMOUNT), (Part.NORM_MODULATE, Action.UNMOUNT)]
    assert observer.sites == {Part.NORM_MODULATE: 0, Part.STEP_CACHE: 0}
    told = [(record.part, record.getMessage(), record.sites) for record in caplog.records]
    assert told == [
        ("norm_modulate", "quality part: mount", 2 * layers + 1),
        ("step_cache", "quality part: mount", layers),
        ("step_cache", "quality part: unmount", layers),
        ("norm_modulate", "quality part: unmount", 2 * layers + 1),
    ]


@pytest.mark.parametrize("tier", [QualityTier.EXTRA_HIGH, QualityTier.HIGH])
def test_cancel_in_a_fused_run(
    tiered: Pipeline, make_request: MakeRequest, make_watch: MakeWatch, run: Run, digest: Any, alone: Any,
    tier: QualityTier,
) -> None:  # fmt: skip
    watch: Watch

    def cancel(event: object) -> None:
        if isinstance(event, StepDone) and event.step == 5:
            watch.cancel()

    watch = make_watch(listener=cancel)
    with pytest.raises(RequestCancelled):
        tiered.run_clip(make_request(quality=tier, steps=STEPS), 0, watch)
    assert digest(run(tier)) == alone[tier]


@pytest.mark.parametrize("tier", [QualityTier.EXTRA_HIGH, QualityTier.HIGH])
@pytest.mark.parametrize("call", [1, 4, 9])
def test_exception_in_the_middle_of_a_fused_forward(
    run: Run, digest: Any, alone: Any, monkeypatch: pytest.MonkeyPatch, tier: QualityTier, call: int
) -> None:
    calls = itertools.count(1)

    def failing(*operands: Any) -> Any:
        if next(calls) == call:
            raise RuntimeError("out of memory")
        return fusion.kernels["cpu"](*operands)

    fusion = blocks.NORM_MODULATE
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "NORM_MODULATE", replace(fusion, kernels={"cpu": failing}))
        with pytest.raises(RuntimeError, match="out of memory"):
            run(tier)
    assert digest(run(tier)) == alone[tier]


def test_site_that_cannot_be_mounted_keeps_the_family_off_and_is_told(
    load_tiered: Callable[..., Pipeline], run: Run, digest: Any, stock: dict[str, str], caplog: Any
) -> None:
    observer = Remembering()
    pipeline = load_tiered(quality_observer=observer)
    norm = pipeline.components["transformer"].value.transformer_blocks[1].norm2
    handle = norm.register_forward_hook(lambda *_: None)
    caplog.set_level("DEBUG", logger="sojourn.inference.quality")
    clip = run(QualityTier.EXTRA_HIGH, pipeline=pipeline)
    reason = "norm_modulate could not be mounted: transformer_blocks.1.norm2 has hooks"
    assert clip.quality is QualityTier.LOSSLESS
    assert clip.quality_reason.startswith(reason)
    assert digest(clip) == stock, "the reference ran"
    assert observer.changes == [(Part.NORM_MODULATE, Action.FAILED)]
    assert observer.sites == {Part.NORM_MODULATE: 0}
    assert [record.getMessage() for record in caplog.records] == ["quality part: failed"]
    high = run(QualityTier.HIGH, pipeline=pipeline)
    assert high.quality is QualityTier.HIGH
    assert high.quality_reason.startswith(reason)
    handle.remove()
    healed = run(QualityTier.EXTRA_HIGH, pipeline=pipeline)
    assert (healed.quality, healed.quality_reason) == (QualityTier.EXTRA_HIGH, "")


def test_step_cache_that_cannot_be_mounted_leaves_the_fusions(
    load_tiered: Callable[..., Pipeline], run: Run, digest: Any, alone: Any
) -> None:
    from diffusers.hooks import MagCacheConfig
    from sojourn.inference.quality.sites import SITES
    from sojourn.inference.quality.step_cache import register_blocks

    pipeline = load_tiered()
    transformer = pipeline.components["transformer"].value
    register_blocks(SITES["MiniMaxH3Transformer3DModel"])
    transformer._cache_config = MagCacheConfig(calibrate=True)  # as if someone had enabled one
    clip = run(QualityTier.HIGH, pipeline=pipeline)
    assert clip.quality is QualityTier.EXTRA_HIGH
    assert clip.quality_reason == ("step_cache could not be mounted: the transformer runs with MagCacheConfig already")
    assert digest(clip) == alone[QualityTier.EXTRA_HIGH]


def test_requests_of_different_tiers_at_once(run: Run, digest: Any, alone: Any) -> None:
    asked = [*TIERS, QualityTier.LOSSLESS]
    found: list[dict[str, str]] = [{}] * len(asked)

    def one(index: int) -> None:
        found[index] = digest(run(asked[index]))

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone[tier] for tier in asked]


@pytest.mark.parametrize("tier", [QualityTier.EXTRA_HIGH, QualityTier.HIGH])
def test_plan_cache_changes_no_bit_of_a_tier(
    load_tiered: Callable[..., Pipeline], run: Run, digest: Any, alone: Any, tier: QualityTier
) -> None:
    pipeline = load_tiered(plan_settings=PlanCacheSettings(mode=PlanMode.ON))
    assert digest(run(tier, pipeline=pipeline)) == alone[tier]


@pytest.mark.parametrize("tier", [QualityTier.EXTRA_HIGH, QualityTier.HIGH])
def test_layerwise_offload_changes_no_bit_of_a_tier(
    load_tiered: Callable[..., Pipeline], run: Run, digest: Any, alone: Any, tier: QualityTier
) -> None:
    options = OffloadOptions(settings=parse_settings(["transformer=layerwise,prefetch=1"]))
    pipeline = load_tiered(offload=options)
    assert digest(run(tier, pipeline=pipeline)) == alone[tier]
    assert digest(run(QualityTier.LOSSLESS, pipeline=pipeline)) == alone[QualityTier.LOSSLESS]


def test_other_transformer_of_another_workflow_has_parts_of_its_own(
    run: Run, digest: Any, alone: Any, pictures: Any, observer: Remembering
) -> None:
    from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3ImageReference

    references = (MiniMaxH3ImageReference(image=pictures[0]),)
    run(QualityTier.EXTRA_HIGH)
    run(QualityTier.EXTRA_HIGH, workflow=Workflow.REF2VA, references=references)
    assert observer.sites[Part.NORM_MODULATE] == 10
    run(QualityTier.LOSSLESS)
    assert observer.sites[Part.NORM_MODULATE] == 5
    run(QualityTier.LOSSLESS, workflow=Workflow.REF2VA, references=references)
    assert observer.sites[Part.NORM_MODULATE] == 0


def test_refusals_say_what_and_why_and_what_to_change(
    tiered: Pipeline, load_tiered: Callable[..., Pipeline], make_request: MakeRequest
) -> None:
    def refusal(pipeline: Pipeline, **changes: Any) -> str:
        with pytest.raises(TierUnavailable) as raised:
            pipeline.check(make_request(**changes))
        return str(raised.value)

    high = {"quality": QualityTier.HIGH}
    assert "it was measured from 3 to 20 steps, not for 50; or ask for lossless" in refusal(tiered, steps=50, **high)
    outside = refusal(tiered, workflow=Workflow.FL2VA, **high)
    assert outside.startswith("quality tier high is not available for tiny: it was measured for t2va, not for fl2va")
    bare = load_tiered(quality_settings=QualitySettings(fusions=Fusions.OFF))
    assert "fusions are switched off; set --fusions auto" in refusal(bare, quality=QualityTier.EXTRA_HIGH)
    assert "measure it with bench/step_cache.py and start with --step-cache-table" in refusal(bare, **high)


def test_offers_say_what_is_served_and_what_is_known_of_it(tiered: Pipeline) -> None:
    offers = {offer.tier: offer for offer in tiered.offers}
    assert list(offers) == TIERS
    assert [offer.obstacle for offer in offers.values()] == [None, None, None]
    error = offers[QualityTier.HIGH].error
    assert error is not None
    assert error.lowest_psnr_db == 30.0
    assert offers[QualityTier.EXTRA_HIGH].error is None
