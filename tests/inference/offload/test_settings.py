"""Numbers of an installation become layers."""

import re

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
    assert found.of("transformer") == OffloadSettings(
        mode=Mode.LAYERWISE, prefetch=2, resident=0.5, policy=ResidentPolicy.STRIDED
    )
    assert found.of("vae") == OffloadSettings(mode=Mode.COMPONENT)
    assert found.of("text_encoder") == OffloadSettings()


def test_one_for_all_is_what_a_component_does_not_say_itself():
    found = parse_settings(["vae=component", "layerwise,prefetch=2,policy=strided", "transformer=auto,prefetch=3"])
    assert found.of("text_encoder") == OffloadSettings(mode=Mode.LAYERWISE, prefetch=2, policy=ResidentPolicy.STRIDED)
    assert found.of("transformer") == OffloadSettings(prefetch=3, policy=ResidentPolicy.STRIDED)
    assert found.of("vae").mode is Mode.COMPONENT


def test_no_layers_are_not_the_same_as_leaving_the_number_to_the_plan():
    assert parse_settings(["layerwise,resident=0"]).default.resident == 0
    assert parse_settings(["layerwise"]).default.resident is None


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["transformer"], "'transformer' is no offload setting; write MODE for all"),
        ([""], "'' is no offload setting"),
        (["=layerwise"], "'=layerwise' is no offload setting"),
        (["a="], "'a=' is no offload setting"),
        (["a=slow"], "modes are auto, resident, component and layerwise"),
        (["prefetch=2"], "'2' is no offload setting"),
        (["a=auto,b=1"], "followed by any of prefetch=N, resident=N"),
        (["auto,policy=last"], "policy=leading|strided"),
        (["a=auto", "a=auto"], "second offload setting for a"),
        (["auto", "layerwise"], "second offload setting for all components"),
        (["a=auto,prefetch=x"], "offload prefetch is 'x'"),
        (["layerwise,resident=-1"], "offload resident is -1.0"),
        (["component,prefetch=1"], "effect with mode auto or layerwise only"),
        (["a=resident,resident=1"], "effect with mode auto or layerwise only"),
    ],
)
def test_what_is_no_setting_is_refused_with_what_is(texts, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_settings(texts)
