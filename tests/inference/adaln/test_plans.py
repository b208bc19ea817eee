import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sojourn.inference.adaln.plans import Plan, distinct
from sojourn.inference.adaln.refusals import PlansRefused, RequestReason

from tests.inference.adaln.toys import plan


def test_the_key_is_the_exact_bits() -> None:
    assert plan(0.1, 0.2).key == plan(0.1, 0.2).key
    neighbour = torch.nextafter(torch.tensor([0.1]), torch.tensor([1.0]))
    assert plan(0.1).key != Plan.of({"timestep": neighbour}, 1).key


def test_positive_and_negative_zero_are_different_plans() -> None:
    assert plan(0.0).key != plan(-0.0).key
    assert plan(0.0, -0.0, 0.0, 0.0, 0.0).length == 2


def test_equal_values_of_different_dtypes_are_different_plans() -> None:
    half = Plan.of({"timestep": torch.tensor([0.5], dtype=torch.float64)}, 1)
    assert half.key != plan(0.5).key


def test_the_row_count_is_part_of_the_key() -> None:
    scalar = {"timestep": torch.tensor(0.5)}
    assert Plan.of(scalar, 1).key != Plan.of(scalar, 2).key


def test_names_and_shapes_are_part_of_the_key() -> None:
    one, two = torch.tensor([1.0]), torch.tensor([[1.0]])
    assert Plan.of({"timestep": one}, 1).key != Plan.of({"guidance": one}, 1).key
    assert Plan.of({"timestep": one}, 1).key != Plan.of({"timestep": two}, 1).key


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused(value: float) -> None:
    with pytest.raises(PlansRefused, match="timestep holds a NaN or infinity") as caught:
        plan(0.5, value)
    assert caught.value.reason is RequestReason.NONFINITE


def test_of_many_rows_only_distinct_ones_are_stored() -> None:
    assert plan(0.5, 0.25, 0.5, 0.5).rows_are_distinct
    repeated = plan(0.5, 0.25, 0.5, 0.5, 0.5)
    assert repeated.row_index == (0, 1, 0, 0, 0)
    assert repeated.first_rows == (0, 1)
    assert repeated.length == 2
    assert not repeated.rows_are_distinct


def test_a_value_for_all_rows_does_not_tell_them_apart() -> None:
    made = Plan.of({"timestep": torch.full((5,), 0.5), "guidance": torch.tensor(4.0)}, 5)
    assert made.length == 1


def test_a_plan_keeps_its_inputs_when_the_caller_writes_into_them() -> None:
    timestep = torch.tensor([0.5])
    made = Plan.of({"timestep": timestep}, 1)
    timestep += 1
    assert made.inputs["timestep"].item() == 0.5


def test_distinct_keeps_the_order_of_first_occurrence() -> None:
    a, b, c = plan(0.1), plan(0.2), plan(0.3)
    assert [p.key for p in distinct([a, b, a, c, b])] == [a.key, b.key, c.key]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=4))
def test_equal_keys_mean_equal_bits(values: list[float]) -> None:
    again = plan(*values)
    assert again.key == plan(*values).key
    longer = plan(*values, 0.0)
    assert longer.key != again.key
