"""Stand-ins: the forward runs unchanged on stored rows, and what cannot work is refused by name."""

import copy
import threading
from dataclasses import replace

import pytest
import torch
from sojourn.inference.adaln.cursor import Cursor
from sojourn.inference.adaln.families import FAMILIES, MINIMAX_H3, family_of
from sojourn.inference.adaln.family import Inputs
from sojourn.inference.adaln.refusals import ModelReason, ModelRefused, PlanMissing
from sojourn.inference.adaln.replace import check_model, check_unchanged, replace_projections, stand_ins
from sojourn.inference.adaln.settings import Precision
from sojourn.inference.adaln.standin import StandIn
from sojourn.inference.adaln.table import Projection
from torch import nn

from tests.inference.adaln.toys import TOY, Rig, Toy, make_rig, step, toy


def mounted(rig: Rig) -> tuple[Toy, Cursor]:
    """A transformer of the same weights with stand-ins that read from the rig's cache."""
    transformer = copy.deepcopy(rig.transformer)
    replace_projections(transformer, TOY)
    cursor = Cursor(rig.cache.slab, rig.cache.find)
    for stand_in in stand_ins(transformer):
        stand_in.attach(cursor)
    return transformer, cursor


def forward(transformer: Toy, cursor: Cursor, inputs: Inputs) -> torch.Tensor:
    cursor.begin(inputs)
    try:
        return transformer(torch.ones(3), inputs["timestep"])
    finally:
        cursor.end()


def test_the_forward_on_stand_ins_equals_the_one_on_projections() -> None:
    rig = make_rig()
    transformer, cursor = mounted(rig)
    rig.build([0.1], [0.2, 0.7])
    for values in ((0.1,), (0.2, 0.7)):
        inputs = step(*values)
        assert torch.equal(forward(transformer, cursor, inputs), rig.transformer(torch.ones(3), inputs["timestep"]))


def test_the_tensors_of_a_request_are_recognised_without_a_look_at_their_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = make_rig()
    transformer, cursor = mounted(rig)
    inputs = step(0.1, 0.2)
    with rig.cache.prepare([inputs]) as lease:
        monkeypatch.setattr(type(TOY), "plans", None)
        assert rig.cache.find(inputs) is lease.steps[0]
        forward(transformer, cursor, inputs)


def test_tensors_that_were_written_to_are_looked_at_again() -> None:
    rig = make_rig()
    inputs = step(0.1)
    with rig.cache.prepare([inputs]):
        inputs["timestep"].add_(1)
        with pytest.raises(PlanMissing):
            rig.cache.find(inputs)


def test_a_stand_in_has_no_parameters_and_is_in_no_state_dict() -> None:
    transformer = toy()
    replace_projections(transformer, TOY)
    assert not [name for name in transformer.state_dict() if "modulation" in name]
    assert not [name for name, _ in transformer.named_parameters() if "modulation" in name]


def test_a_stand_in_has_the_dtype_and_device_that_callers_ask_a_linear_for() -> None:
    stand_in = StandIn("p", Projection(4, 2, torch.bfloat16, bias=True), torch.device("cpu"))
    assert stand_in.weight.dtype == torch.bfloat16
    assert stand_in.weight.numel() == 0
    assert (stand_in.in_features, stand_in.out_features) == (2, 4)
    assert next(stand_in.buffers()).device.type == "cpu"


def test_a_forward_without_a_plan_says_so() -> None:
    rig = make_rig()
    transformer, cursor = mounted(rig)
    with pytest.raises(PlanMissing, match="no request has prepared"):
        forward(transformer, cursor, step(0.1))
    with pytest.raises(PlanMissing, match="outside of the transformer's forward"):
        transformer(torch.ones(3), torch.tensor([0.1]))
    bare = StandIn("p", Projection(4, 2, torch.bfloat16, bias=True), torch.device("cpu"))
    with pytest.raises(PlanMissing, match="not attached"):
        bare(torch.ones(1, 2))


def test_rows_of_another_count_are_never_handed_out() -> None:
    rig = make_rig()
    transformer, cursor = mounted(rig)
    rig.build([0.1])
    cursor.begin(step(0.1))
    with pytest.raises(PlanMissing, match="projects 2 rows, the plan was made for 1"):
        transformer(torch.ones(3), torch.tensor([0.1, 0.2]))


def test_a_transformer_cast_after_loading_says_so() -> None:
    rig = make_rig()
    transformer, cursor = mounted(rig)
    rig.build([0.1])
    transformer.blocks.half()
    with pytest.raises(PlanMissing, match=r"was cast to torch\.float16"):
        forward(transformer, cursor, step(0.1))


def test_a_request_that_outlives_its_weights_fails() -> None:
    rig = make_rig()
    transformer, cursor = mounted(rig)
    inputs = step(0.1)
    with rig.cache.prepare([inputs]):
        rig.cache.invalidate()
        with pytest.raises(PlanMissing, match="weights were replaced"):
            forward(transformer, cursor, inputs)


def test_a_linear_that_runs_more_often_than_known_says_so() -> None:
    rig = make_rig()
    _, cursor = mounted(rig)
    rig.build([0.1])
    cursor.begin(step(0.1))
    cursor.rows("norm_out.modulation", torch.empty(1, 8))
    with pytest.raises(PlanMissing, match="call 2 in one forward, plans are known for 1"):
        cursor.rows("norm_out.modulation", torch.empty(1, 8))


def test_a_second_call_reads_the_second_plan() -> None:
    rig = make_rig()
    _, cursor = mounted(rig)

    def twice(inputs: Inputs) -> tuple[Inputs, ...]:
        return inputs, {"timestep": inputs["timestep"] + 0.5}

    rig.cache.family = replace(TOY, calls=twice)
    rig.build([0.25])
    cursor.begin(step(0.25))
    first, second = (cursor.rows("norm_out.modulation", torch.empty(1, 8)) for _ in range(2))
    cursor.end()
    rig.cache.family = TOY
    assert torch.equal(first, rig.rows("norm_out.modulation", 0.25))
    assert torch.equal(second, rig.rows("norm_out.modulation", 0.75))


def test_forwards_on_two_threads_read_their_own_plans() -> None:
    rig = make_rig()
    transformer, cursor = mounted(rig)
    rig.build([0.1], [0.9])
    expected = {value: rig.transformer(torch.ones(3), torch.tensor([value])) for value in (0.1, 0.9)}
    wrong: list[float] = []

    def run(value: float) -> None:
        outputs = [forward(transformer, cursor, step(value)) for _ in range(50)]
        wrong.extend(value for output in outputs if not torch.equal(output, expected[value]))

    threads = [threading.Thread(target=run, args=(value,)) for value in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_requests_on_several_threads_build_one_after_another() -> None:
    rig = make_rig(plans=4, pages=6)
    errors: list[BaseException] = []

    def run(offset: float) -> None:
        try:
            for turn in range(20):
                with rig.cache.prepare([step(offset + turn % 3 / 10)]):
                    pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(offset,)) for offset in (0.0, 0.05, 0.01)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    rig.check()
    assert rig.counters.requests.total() == 60


# Refusals, by name.


def test_a_quantised_model_is_refused() -> None:
    transformer = toy()
    transformer.config = {"quantization_config": {"quant_method": "bitsandbytes"}}
    with pytest.raises(ModelRefused, match="is quantised") as caught:
        check_model(transformer, TOY)
    assert caught.value.reason is ModelReason.QUANTISED


def test_a_projection_that_is_no_plain_linear_is_refused_and_nothing_is_replaced() -> None:
    class Linear4bit(nn.Linear):
        pass

    transformer = toy()
    transformer.norm_out.modulation = Linear4bit(8, 6)
    with pytest.raises(ModelRefused, match=r"norm_out\.modulation is a Linear4bit and not a plain Linear"):
        replace_projections(transformer, TOY)
    assert not stand_ins(transformer)


def test_layerwise_fp8_casting_is_refused() -> None:
    from diffusers.hooks import apply_layerwise_casting

    transformer = toy()
    apply_layerwise_casting(transformer, storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    with pytest.raises(ModelRefused, match="stored in fp8") as caught:
        replace_projections(transformer, TOY)
    assert caught.value.reason is ModelReason.FP8_CAST


@pytest.mark.parametrize("precision", list(Precision))
def test_a_transformer_or_block_that_was_compiled_is_refused_under_match(precision: Precision) -> None:
    transformer = toy()
    check_unchanged(transformer, precision)
    transformer.blocks[1].compile()
    if precision is Precision.FP32:
        check_unchanged(transformer, precision)
        return
    with pytest.raises(ModelRefused, match=r"blocks.1 is compiled") as caught:
        check_unchanged(transformer, precision)
    assert caught.value.reason is ModelReason.COMPILED


def test_a_timestep_per_token_is_refused() -> None:
    with pytest.raises(ModelRefused, match=r"timestep has shape \[1, 3\]") as caught:
        MINIMAX_H3.plans({"timestep": torch.zeros(1, 3)})
    assert caught.value.reason is ModelReason.PER_TOKEN_TIMESTEPS


@pytest.mark.parametrize("name", ["HeliosTransformer3DModel", "WanTransformer3DModel", "Flux2Transformer2DModel"])
def test_families_without_a_projection_per_block_are_refused(name: str) -> None:
    with pytest.raises(ModelRefused, match="no modulation projection per block") as caught:
        family_of(name)
    assert caught.value.reason is ModelReason.NO_PROJECTION


def test_an_unknown_class_is_refused() -> None:
    with pytest.raises(ModelRefused, match="not a family that the plan cache knows"):
        family_of("UNet2DConditionModel")


def test_the_regexes_of_a_family_are_anchored() -> None:
    assert MINIMAX_H3.is_projection_tensor("transformer_blocks.12.adaln_proj.linear.weight")
    assert MINIMAX_H3.is_projection_tensor("norm_out.linear.bias")
    for other in (
        "token_refiner.refiner_blocks.0.norm_out.linear.weight",
        "x.transformer_blocks.0.adaln_proj.linear.weight",
        "transformer_blocks.0.adaln_proj.linear.weight_scale",
        "transformer_blocks.0.adaln_proj.linear.lora_A.weight",
        "norm_out.norm.weight",
    ):
        assert not MINIMAX_H3.is_projection_tensor(other)


def test_every_family_is_a_class_of_diffusers() -> None:
    import diffusers

    for family in FAMILIES:
        assert hasattr(diffusers, family.transformer)
