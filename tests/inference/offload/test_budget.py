"""What may be locked is granted, what does not fit is refused, and the books are what is locked."""

import pytest
from sojourn.inference.offload.budget import HostMemory, PinLedger, pin_benefit

GIB = 1 << 30


def host(available_gib, *, shares_device=False):
    return HostMemory(available_bytes=int(available_gib * GIB), shares_device=shares_device)


@pytest.mark.parametrize(("size", "available", "fits"), [(62, 32, False), (20, 128, True)])
def test_copies_fit_or_do_not(size, available, fits):
    assert host(available).copies_fit(size * GIB) is fits


def test_copies_leave_four_gib_free():
    assert not host(32).copies_fit(28 * GIB)
    assert host(32).copies_fit(28 * GIB - 1)
    assert host(0).copies_fit(0)


def test_the_reserve_is_five_percent_but_never_less_than_two_gib():
    assert host(100).pin_budget_bytes == 95 * GIB
    assert host(8).pin_budget_bytes == 6 * GIB
    assert host(1).pin_budget_bytes == 0


def test_nothing_is_locked_where_the_device_computes_in_host_memory():
    assert host(100, shares_device=True).pin_budget_bytes == 0


def test_the_reserve_is_not_spendable():
    assert PinLedger(host(40)).request(39 * GIB) is None
    assert PinLedger(host(40)).request(38 * GIB) is not None


def test_a_second_component_is_refused_when_the_budget_is_spent_and_granted_when_it_is_given_back():
    ledger = PinLedger(host(40))
    first = ledger.request(30 * GIB)
    assert ledger.request(10 * GIB) is None
    first.release()
    first.release()
    assert ledger.committed_bytes == 0
    assert ledger.request(10 * GIB) is not None


def test_zero_bytes_are_granted_on_a_zero_budget():
    assert PinLedger(host(1)).request(0) is not None
    assert PinLedger(host(1)).request(1) is None


def test_what_another_process_has_taken_meanwhile_is_not_granted():
    ledger = PinLedger(host(40), available_now=lambda: 12 * GIB)
    assert ledger.request(11 * GIB) is None
    assert ledger.request(10 * GIB) is not None


def test_pins_go_where_a_request_copies_most():
    assert pin_benefit(1000, 50) == 50_000
    assert pin_benefit(1000, 0) == pin_benefit(1000, 1) == 1000
    assert pin_benefit(20 * GIB, 1) > pin_benefit(1 * GIB, 4)
    assert pin_benefit(3 * GIB, 50) > pin_benefit(21 * GIB, 1)
