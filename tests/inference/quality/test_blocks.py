"""The fused forwards are the stock ones but for the fused operation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from sojourn.inference.quality.blocks import helios as helios_blocks
from sojourn.inference.quality.blocks import minimax_h3 as h3_blocks
from sojourn.inference.quality.fusion_mount import MountedFusion
from sojourn.inference.quality.fusions.fusion import Fusion
from sojourn.inference.quality.sites import SITES

from tests.inference.quality import toys

Case = tuple[Callable[..., Any], Callable[..., dict[str, Any]], Any, str]
CASES: dict[str, Case] = {
    "MiniMax-H3": (toys.minimax_h3, toys.h3_inputs, h3_blocks, "NORM_MODULATE"),
    "Helios": (toys.helios, toys.helios_inputs, helios_blocks, "GATED_RESIDUAL"),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def mount(model: Any) -> MountedFusion:
    return MountedFusion.on(model, SITES[type(model).__name__].fusions[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("batch", [1, 2])
def test_reference_in_a_fused_forward_gives_the_stock_bits(
    case: Case, dtype: torch.dtype, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, inputs, blocks, name = case
    model = make(dtype=dtype)
    stock = toys.bits(toys.run(model, inputs(batch=batch)))
    taken: list[int] = []
    fusion: Fusion = getattr(blocks, name)

    def reference(*operands: Any) -> torch.Tensor:
        taken.append(1)
        return fusion.reference(*operands)

    monkeypatch.setattr(blocks, name, replace(fusion, kernels={"cpu": reference}))
    mounted = mount(model)
    assert toys.bits(toys.run(model, inputs(batch=batch))) == stock
    assert len(taken) == mounted.sites, "a site that is not eligible took the stock path, and nothing was compared"


@pytest.mark.parametrize("batch", [1, 2])
def test_every_site_takes_the_fused_operation_and_the_result_stays_near(
    case: Case, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, inputs, blocks, name = case
    model = make()
    stock = toys.run(model, inputs(batch=batch))[0]
    exact = toys.run(make(dtype=torch.float32), inputs(batch=batch))[0]
    fusion: Fusion = getattr(blocks, name)
    taken: list[int] = []

    def counted(*operands: Any) -> torch.Tensor:
        taken.append(1)
        return fusion.kernels["cpu"](*operands)

    monkeypatch.setattr(blocks, name, replace(fusion, kernels={"cpu": counted}))
    mounted = mount(model)
    fused = toys.run(model, inputs(batch=batch))[0]
    assert len(taken) == mounted.sites
    assert not torch.equal(fused, stock), "nothing was fused"
    assert error(fused, exact) <= 1.5 * error(stock, exact)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).pow(2).mean().sqrt())


@pytest.mark.parametrize(
    ("changes", "history"),
    [({"guidance_cross_attn": False}, True), ({"zero_history_timestep": False}, True), ({}, False)],
)
def test_every_way_through_a_helios_block(
    changes: dict[str, Any], history: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toys.helios(**changes)
    inputs = toys.helios_inputs(history=history)
    stock = toys.bits(toys.run(model, inputs))
    fusion = helios_blocks.GATED_RESIDUAL
    monkeypatch.setattr(helios_blocks, "GATED_RESIDUAL", replace(fusion, kernels={}))
    mount(model)
    assert toys.bits(toys.run(model, inputs)) == stock


def test_one_modulation_row_for_all_tokens_of_a_helios_block(monkeypatch: pytest.MonkeyPatch) -> None:
    block = toys.helios().blocks[0]
    draw = torch.Generator().manual_seed(3)
    hidden, text = (torch.randn(2, rows, 32, generator=draw).bfloat16() for rows in (6, 4))
    temb, rotary = torch.randn(2, 6, 32, generator=draw), torch.randn(2, 6, 32, generator=draw)
    with torch.no_grad():
        stock = block(hidden, text, temb, rotary, 6)
        with monkeypatch.context() as patch:
            patch.setattr(helios_blocks, "GATED_RESIDUAL", replace(helios_blocks.GATED_RESIDUAL, kernels={}))
            assert torch.equal(helios_blocks.block(block, hidden, text, temb, rotary, 6), stock)
        fused = helios_blocks.block(block, hidden, text, temb, rotary, 6)
    assert not torch.equal(fused, stock)
    torch.testing.assert_close(fused, stock, atol=0.1, rtol=0.05)


def test_mounting_leaves_nothing_behind(case: Case) -> None:
    make, inputs, _, _ = case
    model = make()
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    stock = toys.bits(toys.run(model, inputs()))
    mounted = mount(model)
    toys.run(model, inputs())
    mounted.undo()
    mounted.undo()
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    assert toys.bits(toys.run(model, inputs())) == stock


def test_gradients_take_the_reference(case: Case) -> None:
    make, inputs, _, _ = case
    model = make()
    stock = toys.bits(toys.run(model, inputs()))
    mount(model)
    with torch.enable_grad():
        found = model(
            **toys.cast(inputs(), torch.bfloat16 if "Helios" in type(model).__name__ else torch.float32),
            return_dict=False,
        )
    assert toys.bits([part.detach() for part in found]) == stock
