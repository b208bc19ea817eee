"""Numbers of an installation become layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn.inference.offload.settings import (
    OffloadSettings,
    ResidentPolicy,
    prefetch_layers,
    resident_layers,
    streamed_layers,
)


@pytest.mark.parametrize(
    ("value", "layers", "expected"),
    [(0.0, 50, 1), (0.5, 50, 25), (0.99, 50, 50), (1, 50, 1), (3, 50, 3), (2.9, 50, 2), (80, 50, 50), (0.5, 1, 1)],
)
def test_prefetch_is_a_share_below_one_and_a_count_from_there(value, layers, expected):
    assert prefetch_layers(value, layers) == expected


@pytest.mark.parametrize(
    ("value", "layers", "expected"),
    [(0.0, 50, 0), (0.001, 50, 1), (0.7, 50, 35), (1, 50, 1), (35, 50, 35), (99, 50, 50)],
)
def test_residents_are_a_share_below_one_and_a_count_from_there(value, layers, expected):
    assert resident_layers(value, layers) == expected


def test_strided_residents_spread_the_stream_evenly():
    assert streamed_layers(50, 35, ResidentPolicy.STRIDED) == (
        *(0, 3, 7, 10, 13, 17, 20, 23, 27, 30, 33, 37, 40, 43, 47),
    )


def test_leading_residents_leave_the_tail_to_the_stream():
    assert streamed_layers(8, 3, ResidentPolicy.LEADING) == (3, 4, 5, 6, 7)


@given(layers=st.integers(1, 32), policy=st.sampled_from(ResidentPolicy), data=st.data())
def test_both_policies_stream_exactly_the_rest(layers, policy, data):
    resident = data.draw(st.integers(0, layers))
    streamed = streamed_layers(layers, resident, policy)
    assert len(set(streamed)) == layers - resident
    assert all(0 <= layer < layers for layer in streamed)
    assert list(streamed) == sorted(streamed)


@pytest.mark.parametrize("field", ["prefetch", "resident"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_number_that_is_none_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"offload {field} is"):
        OffloadSettings(**{field: value})
