"""Each layer gets the tier that budget and device allow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn.inference.offload.budget import HostMemory
from sojourn.inference.offload.hosting import HostTier, LayerBytes, plan_hosting

GIB = 1 << 30
PINNED, MAPPED, PAGEABLE = HostTier.PINNED, HostTier.MAPPED, HostTier.PAGEABLE


def plan(*, available, budget, layers=4, streamed=None, mapped=1.0, shares_device=False):
    sizes = [LayerBytes(copy_bytes=GIB, mapped_bytes=int(mapped * GIB))] * layers
    return plan_hosting(
        sizes,
        streamed=range(layers) if streamed is None else streamed,
        memory=HostMemory(available_bytes=int(available * GIB), shares_device=shares_device),
        pin_budget_bytes=int(budget * GIB),
    )


def test_all_are_pinned_when_the_budget_covers_them():
    assert plan(available=100, budget=50).tiers == (PINNED,) * 4


def test_streamed_layers_are_pinned_before_resident_ones():
    assert plan(available=100, budget=2, streamed=(2, 3)).tiers == (PAGEABLE, PAGEABLE, PINNED, PINNED)


def test_what_is_unpinned_and_fits_is_copied():
    assert plan(available=100, budget=0).tiers == (PAGEABLE,) * 4


def test_what_is_unpinned_and_does_not_fit_stays_on_the_mapping():
    result = plan(available=7, budget=2)
    assert result.tiers == (PINNED, PINNED, MAPPED, MAPPED)
    assert result.new_anonymous_bytes == 2 * GIB
    assert result.fits


def test_pins_are_given_back_from_the_tail_when_the_host_is_short():
    assert plan(available=5.5, budget=4).tiers == (PINNED, MAPPED, MAPPED, MAPPED)


def test_a_copy_that_replaces_an_anonymous_original_takes_nothing():
    result = plan(available=5, budget=4, mapped=0)
    assert result.tiers == (PINNED,) * 4
    assert result.new_anonymous_bytes == 0


@pytest.mark.parametrize(("mapped", "tier"), [(1.0, MAPPED), (0, PAGEABLE)])
def test_nothing_is_copied_where_the_device_shares_host_memory(mapped, tier):
    result = plan(available=100, budget=0, mapped=mapped, shares_device=True)
    assert result.tiers == (tier,) * 4
    assert result.new_anonymous_bytes == 0


@given(
    sizes=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=12),
    available=st.integers(0, 60),
    budget=st.integers(0, 60),
    shares=st.booleans(),
    data=st.data(),
)
def test_no_plan_pins_more_than_the_budget_or_copies_more_than_fits(sizes, available, budget, shares, data):
    layers = [LayerBytes(copy_bytes=copy * GIB, mapped_bytes=min(copy, mapped) * GIB) for copy, mapped in sizes]
    streamed = data.draw(st.permutations(range(len(layers))))[: data.draw(st.integers(0, len(layers)))]
    memory = HostMemory(available_bytes=available * GIB, shares_device=shares)
    result = plan_hosting(layers, streamed=streamed, memory=memory, pin_budget_bytes=budget * GIB)
    assert result.pinned_bytes <= budget * GIB
    assert result.pinned_bytes == sum(
        size.copy_bytes for size, tier in zip(layers, result.tiers, strict=True) if tier is PINNED
    )
    assert result.fits
    assert shares is False or result.pinned_bytes == 0
