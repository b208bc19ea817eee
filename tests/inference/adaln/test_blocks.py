"""`PreparePlans` in the modular pipelines of diffusers: the steps of a request find their rows, the latents stay."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.modular_pipelines import SequentialPipelineBlocks
from sojourn.inference.adaln.block import PreparePlans, release_plans, with_plans
from sojourn.inference.adaln.component import CachedTransformer
from sojourn.inference.adaln.counters import Result, Source
from sojourn.inference.adaln.families import FAMILIES
from sojourn.inference.adaln.refusals import ModelReason, ModelRefused
from torch import nn

from tests.inference.adaln.test_families import Twin
from tests.inference.adaln.zoo import SPECIMENS, TEXT, Draw, write_specimen

STEPS = 4
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A workflow from embeddings to latents.

    Attributes:
        family: Name of the family.
        blocks, workflow: In diffusers.
        inputs: Name -> shape of one row, of what is random.
        plans: Distinct ones of a request.
        config: Changes to the specimen.
        rest: Other inputs.
    """

    family: str
    blocks: str
    workflow: str
    inputs: Mapping[str, tuple[int, ...]]
    plans: int
    config: Mapping[str, Any] = field(default_factory=dict)
    rest: Mapping[str, Any] = field(default_factory=dict)


_TWO_TEXTS = {
    f"{side}prompt_embeds{number}": (TEXT, width)
    for side in ("", "negative_")
    for number, width in (("", 16), ("_2", 8))
}
_TWO_MASKS = {f"{side}prompt_embeds_mask{number}": (TEXT,) for side in ("", "negative_") for number in ("", "_2")}
_VIDEO = {"height": 32, "width": 32, "num_frames": 1}
CASES = [
    Case(
        "qwen-image", "QwenImageAutoBlocks", "text2image",
        {"prompt_embeds": (TEXT, 16), "negative_prompt_embeds": (TEXT, 16),
         "prompt_embeds_mask": (TEXT,), "negative_prompt_embeds_mask": (TEXT,)},
        plans=STEPS, config={"use_additional_t_cond": False},
    ),
    Case(
        "flux", "FluxAutoBlocks", "text2image", {"prompt_embeds": (TEXT, 32), "pooled_prompt_embeds": (32,)},
        plans=STEPS,
    ),
    Case(
        "sd3", "StableDiffusion3AutoBlocks", "text2image",
        {"prompt_embeds": (TEXT, 32), "negative_prompt_embeds": (TEXT, 32),
         "pooled_prompt_embeds": (16,), "negative_pooled_prompt_embeds": (16,)},
        plans=2 * STEPS,
    ),
    Case(
        "hunyuan-video-1.5", "HunyuanVideo15AutoBlocks", "text2video", {**_TWO_TEXTS, **_TWO_MASKS}, plans=STEPS,
        config={"in_channels": 65, "out_channels": 32}, rest=_VIDEO,
    ),
    Case(
        "hunyuan-video-1.5", "HunyuanVideo15AutoBlocks", "image2video",
        {**_TWO_TEXTS, **_TWO_MASKS, "image_latents": (32, 1, 2, 2)}, plans=STEPS,
        config={"in_channels": 65, "out_channels": 32}, rest=_VIDEO,
    ),
]  # fmt: skip


@torch.no_grad()
def latents(case: Case, model: nn.Module, cached: CachedTransformer | None, batch: int) -> torch.Tensor:
    """Runs the stock blocks from embeddings to latents."""
    workflow = getattr(diffusers, case.blocks)().get_workflow(case.workflow).sub_blocks
    leaves = {name: block for name, block in workflow.items() if name.startswith("denoise")}
    pipeline = SequentialPipelineBlocks.from_blocks_dict(with_plans(leaves, cached)).init_pipeline()
    pipeline.update_components(transformer=model, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0))
    draw = Draw(batch, DTYPE, torch.Generator().manual_seed(5))
    inputs = {
        name: torch.ones(batch, TEXT, dtype=torch.bool) if "mask" in name else draw.real(*shape)
        for name, shape in case.inputs.items()
    }
    if "image_latents" in inputs:
        inputs["image_latents"] = inputs["image_latents"][:1]  # of one image, which the blocks repeat
    state = pipeline(
        **{"height": 64, "width": 64, **case.rest, **inputs}, num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(6),
    )  # fmt: skip
    release_plans(state)
    found: torch.Tensor = state.get("latents")
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}, {case.workflow}")
def test_latents_are_those_without_the_cache(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (family,) = (family for family in FAMILIES if family.name == case.family)
    specimen = SPECIMENS[case.family]
    specimen = replace(specimen, config={**specimen.config, **case.config})
    twin = Twin(write_specimen(family.transformer, specimen, tmp_path / "model", DTYPE), DTYPE, monkeypatch)
    for batch in (1, 2):
        expected = latents(case, twin.plain, None, batch)
        assert expected.isfinite().all()
        for _ in range(2):
            assert torch.equal(latents(case, twin.model, twin.cached, batch), expected)
    assert twin.counters.requests == {Result.BUILT: 2, Result.HIT: 2}
    assert twin.counters.plans[Source.BUILT] == 2 * case.plans
    assert not twin.cached.cache.slots.pinned


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}, {case.workflow}")
def test_the_block_stands_right_before_the_loop(case: Case) -> None:
    leaves = getattr(diffusers, case.blocks)().get_workflow(case.workflow).sub_blocks
    names = list(with_plans(leaves, object()))  # type: ignore[arg-type]
    assert names.index("denoise.prepare_plans") == names.index("denoise.denoise") - 1
    assert list(with_plans(leaves, None)) == list(leaves)


def test_a_class_without_modular_blocks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_specimen("PRXTransformer2DModel", SPECIMENS["prx"], tmp_path / "model", DTYPE)
    twin = Twin(folder, DTYPE, monkeypatch)
    state = diffusers.modular_pipelines.PipelineState()
    with pytest.raises(ModelRefused, match="has no modular pipeline") as caught:
        PreparePlans(twin.cached)(None, state)
    assert caught.value.reason is ModelReason.NO_BLOCKS
