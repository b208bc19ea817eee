"""Arithmetic on address ranges, against sets of pages."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from sojourn.inference.offload.spans import Span, divided, merged, size_of, whole_pages, without

PAGE = 16
spans = st.lists(st.builds(lambda a, n: Span(a, a + n), st.integers(0, 400), st.integers(0, 90)), max_size=6)


def addresses(some):
    return {address for span in some for address in range(*span)}


@given(spans)
def test_merging_keeps_the_addresses_and_leaves_gaps_between(some):
    result = merged(some)
    assert addresses(result) == addresses(some)
    assert all(a.end < b.start for a, b in itertools.pairwise(result))


@given(spans, spans)
def test_without_is_the_difference(some, others):
    assert addresses(without(some, others)) == addresses(some) - addresses(others)


@given(spans)
def test_whole_pages_take_no_byte_of_a_neighbour(some):
    result = whole_pages(some, page_bytes=PAGE)
    inside = addresses(some)
    pages = {p for p in range(0, 512, PAGE) if set(range(p, p + PAGE)) <= inside}
    assert addresses(result) == {address for page in pages for address in range(page, page + PAGE)}


@given(spans, st.integers(0, 600))
def test_dividing_keeps_everything_and_cuts_at_pages(some, size):
    first, rest = divided(some, size, page_bytes=PAGE)
    assert [*addresses(first), *addresses(rest)] != [] or not addresses(some)
    assert size_of(first) + size_of(rest) == size_of(some)
    assert size_of(first) <= size
    assert size - size_of(first) < PAGE or not rest
