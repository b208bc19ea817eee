"""Numbers of an installation become layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn.inference.offload.settings import (
    Mode,
    OffloadSettings,
    ResidentPolicy,
    parse_settings,
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


def test_settings_are_read_by_component():
    found = parse_settings(["transformer=layerwise,prefetch=2,resident=0.5,policy=strided", "vae=component"])
    assert found["transformer"] == OffloadSettings(
        mode=Mode.LAYERWISE, prefetch=2, resident=0.5, policy=ResidentPolicy.STRIDED
    )
    assert found["vae"] == OffloadSettings(mode=Mode.COMPONENT)


@pytest.mark.parametrize(
    "texts", [["transformer"], ["=layerwise"], ["a=slow"], ["a=auto,b=1"], ["a=auto", "a=auto"], ["a=auto,prefetch=x"]]
)
def test_what_is_no_setting_is_refused(texts):
    with pytest.raises(ValueError):  # noqa: PT011 - whichever word is wrong, it is named
        parse_settings(texts)
