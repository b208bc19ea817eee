"""A transformer goes from parts to parts: nothing is recorded before it is there, and nothing is left behind."""

import gc
from typing import Any

import pytest
import torch
from sojourn.inference.quality.fusion_mount import MountedFusion, MountRefused, UnmountFailed
from sojourn.inference.quality.mounts import Mounts, wanted_fusion, wanted_step_cache
from sojourn.inference.quality.observer import Action, Part, silent
from sojourn.inference.quality.quality import Quality
from sojourn.inference.quality.settings import Fusions, QualitySettings
from sojourn.inference.quality.sites import SITES
from sojourn.inference.requests import QualityTier
from torch import nn

from tests.inference.quality import toys

HELIOS = SITES["HeliosTransformer3DModel"]
FUSION = wanted_fusion(HELIOS.fusions[0])
GATED, CACHE = Part.GATED_RESIDUAL, Part.STEP_CACHE


def cache(threshold: float) -> Any:
    return wanted_step_cache(HELIOS, threshold, silent)


def quality(transformers: dict[str, nn.Module | None], observer: Any, **changes: Any) -> Quality:
    return Quality(
        model_name="m", transformers=lambda: transformers, device=torch.device("cpu"), dtype=torch.bfloat16,
        fingerprint=lambda: "", settings=QualitySettings(**({"fusions": Fusions.ON} | changes)), observer=observer,
    )  # fmt: skip


def nothing() -> None:
    """Nobody cancels."""


def test_transformer_that_is_loaded_after_the_first_request_is_mounted_too() -> None:
    observer = toys.Remembering()
    transformers: dict[str, nn.Module | None] = {"transformer": None}
    tiers = quality(transformers, observer)
    with tiers.at(QualityTier.EXTRA_HIGH, ["transformer"], nothing) as used:
        assert (used.tier, used.reason) == (QualityTier.LOSSLESS, "no transformer of the request is loaded")
    assert observer.changes == []
    model = transformers["transformer"] = toys.helios()
    for _ in range(2):
        with tiers.at(QualityTier.EXTRA_HIGH, ["transformer"], nothing) as used:
            assert (used.tier, used.reason) == (QualityTier.EXTRA_HIGH, "")
    assert observer.changes == [(GATED, Action.MOUNT)]
    transformers["transformer"] = toys.helios()  # another one in its place
    with tiers.at(QualityTier.EXTRA_HIGH, ["transformer"], nothing):
        assert observer.changes == [(GATED, Action.MOUNT)] * 2
    assert observer.sites[GATED] == 12
    del model
    gc.collect()
    with tiers.at(QualityTier.LOSSLESS, ["transformer"], nothing):
        assert observer.sites[GATED] == 0, "a transformer that is gone counts no more"


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([[FUSION], []], [(GATED, "mount"), (GATED, "unmount")]),
        ([[FUSION], [FUSION, cache(1)], [FUSION]], [(GATED, "mount"), (CACHE, "mount"), (CACHE, "unmount")]),
        (
            [[cache(1)], [FUSION, cache(1)]],
            [(CACHE, "mount"), (CACHE, "unmount"), (GATED, "mount"), (CACHE, "mount")],
        ),
        ([[cache(1)], [cache(1)], [cache(2)]], [(CACHE, "mount"), (CACHE, "unmount"), (CACHE, "mount")]),
        ([[], []], []),
    ],
)
def test_only_what_changes_is_changed_and_the_step_cache_lies_on_top(steps: Any, told: Any) -> None:
    observer, model = toys.Remembering(), toys.helios()
    mounts = Mounts(observer)
    for wanted in steps:
        assert mounts.bring(model, wanted) == {}
        assert mounts.parts(model) == tuple(part.part for part in wanted)
    assert [(part, action.value) for part, action in observer.changes] == told


@pytest.mark.parametrize(
    "spoil",
    [
        lambda model: setattr(model.blocks[2], "forward", model.blocks[2].forward),
        lambda model: setattr(model.blocks[1], "_compiled_call_impl", lambda *_: None),
    ],
    ids=["forward of its own", "compiled"],
)
def test_one_rejected_site_keeps_all_of_them_off(spoil: Any) -> None:
    observer, model = toys.Remembering(), toys.helios()
    spoil(model)
    mounts = Mounts(observer)
    failed = mounts.bring(model, [FUSION])
    assert list(failed) == [GATED]
    assert "blocks." in failed[GATED]
    assert mounts.parts(model) == ()
    assert not any("forward" in block.__dict__ for block in model.blocks[:2])
    assert observer.changes == [(GATED, Action.FAILED)]


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (nn.LayerNorm(32), "is a LayerNorm and not an RMSNorm"),
        (nn.RMSNorm(32, elementwise_affine=False), "has a weight of None"),
        (nn.RMSNorm(32, dtype=torch.float64), "has a weight of torch.float64"),
    ],
)
def test_norm_that_cannot_be_read_is_rejected(norm: nn.Module, reason: str) -> None:
    model = toys.minimax_h3()
    model.transformer_blocks[1].norm1 = norm
    with pytest.raises(MountRefused, match=reason):
        MountedFusion.on(model, SITES["MiniMaxH3Transformer3DModel"].fusions[0])


def test_transformer_without_sites_is_refused() -> None:
    with pytest.raises(MountRefused, match="Linear has no site"):
        MountedFusion.on(nn.Linear(2, 2), HELIOS.fusions[0])


def test_forward_replaced_by_someone_else_is_an_error_and_not_a_lossless_run() -> None:
    observer, model = toys.Remembering(), toys.helios()
    tiers = quality({"transformer": model}, observer)
    with tiers.at(QualityTier.EXTRA_HIGH, ["transformer"], nothing):
        pass
    fused = model.blocks[1].forward
    model.blocks[1].forward = lambda *args: fused(*args)
    for _ in range(2):
        with (
            pytest.raises(UnmountFailed, match="start the process anew"),
            tiers.at(QualityTier.LOSSLESS, ["transformer"], nothing),
        ):
            raise AssertionError("it ran")
    model.blocks[1].forward = fused
    with tiers.at(QualityTier.LOSSLESS, ["transformer"], nothing) as used:
        assert used.tier is QualityTier.LOSSLESS
    assert not any("forward" in block.__dict__ for block in model.blocks)


def test_model_without_fusions_says_which_have_them() -> None:
    tiers = quality({}, toys.Remembering())
    obstacle = {offer.tier: offer.obstacle for offer in tiers.offers}[QualityTier.EXTRA_HIGH]
    assert obstacle is not None
    assert "HeliosTransformer3DModel, MiniMaxH3Transformer3DModel" in obstacle
    hashing = {offer.tier: offer.obstacle for offer in tiers.offers}[QualityTier.HIGH]
    assert hashing is not None
    assert "still being hashed" in hashing
