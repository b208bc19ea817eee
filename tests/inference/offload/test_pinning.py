"""Pinned stores take exactly what was booked, show by name, and give everything back."""

import gc
import os

import pytest
import torch
from sojourn.inference.offload.budget import HostMemory, PinLedger
from sojourn.inference.offload.hosting import HostTier
from sojourn.inference.offload.observer import Fallback, Silent
from sojourn.inference.offload.pinning import RecordingPinDriver, RegisterFailed, pin_filled, pinned_size_bytes
from sojourn.inference.offload.stack import find_layers, stack_layers
from sojourn.inference.offload.stores import Pinner, mapped_store
from sojourn.residencyd.kernel.maps import PINNED_STORE_NAME, MapsTable, read_maps
from sojourn.residencyd.kernel.process import read_status

from tests.inference.offload.toys import Stack

MIB = 1 << 20


def ledger(spendable=1 << 30):
    return PinLedger(HostMemory(available_bytes=spendable + (2 << 30), shares_device=False))


def zeros(buffer):
    buffer.zero_()


@pytest.mark.parametrize("size", [0.563, 1.125, 2.083])
def test_booked_bytes_are_locked_bytes_and_no_power_of_two(size):
    size_bytes, driver, books = int(size * 64 * MIB) + 1, RecordingPinDriver(), ledger()
    before = read_status(os.getpid()).rss_shared_bytes
    buffer = pin_filled(size_bytes, zeros, driver=driver, ledger=books)
    grown = read_status(os.getpid()).rss_shared_bytes - before
    assert buffer.numel() == size_bytes
    assert books.committed_bytes == sum(driver.locked.values()) == pinned_size_bytes(size_bytes)
    assert abs(grown - books.committed_bytes) <= os.sysconf("SC_PAGESIZE")


def test_a_pinned_store_shows_by_name_in_maps():
    buffer = pin_filled(MIB, zeros, driver=RecordingPinDriver(), ledger=ledger())
    (mapping,) = MapsTable(read_maps(os.getpid())).overlapping(buffer.data_ptr(), buffer.data_ptr() + 1)
    assert mapping.name == f"/memfd:{PINNED_STORE_NAME} (deleted)"


def test_memory_and_lease_last_as_long_as_any_view():
    driver, books = RecordingPinDriver(), ledger()
    buffer = pin_filled(MIB, zeros, driver=driver, ledger=books)
    view = buffer[100:200].view(torch.int32)
    del buffer
    gc.collect()
    assert books.committed_bytes == MIB
    assert driver.locked
    del view
    gc.collect()
    assert books.committed_bytes == 0
    assert not driver.locked


def test_what_the_budget_refuses_is_not_allocated():
    driver, books = RecordingPinDriver(), ledger(spendable=MIB)
    assert pin_filled(MIB + 1, zeros, driver=driver, ledger=books) is None
    assert not driver.locked
    assert books.committed_bytes == 0


@pytest.mark.parametrize("fails", ["driver", "fill"])
def test_a_failure_gives_the_lease_back(fails):
    driver, books = RecordingPinDriver(refuse_from_bytes=0 if fails == "driver" else None), ledger()

    def fill(buffer):
        if fails == "fill":
            raise RegisterFailed("on purpose")

    with pytest.raises(RegisterFailed):
        pin_filled(MIB, fill, driver=driver, ledger=books)
    assert books.committed_bytes == 0


class Fallbacks(Silent):
    def __init__(self):
        self.reasons = []

    def fell_back(self, *, reason):
        self.reasons.append(reason)


@pytest.mark.parametrize(
    ("driver", "books", "reason"),
    [
        (RecordingPinDriver(), ledger(spendable=0), Fallback.PIN),
        (RecordingPinDriver(refuse_from_bytes=0), ledger(), Fallback.REGISTER),
    ],
)
def test_what_cannot_be_pinned_is_pageable_warned_of_once_and_counted(driver, books, reason):
    model = Stack(2)
    stack = stack_layers(model, find_layers(model))
    sources = [mapped_store(unit.layout, stack.parameters) for unit in stack.units]
    observer, warnings = Fallbacks(), []
    pinner = Pinner(driver=driver, ledger=books, observer=observer, warn=warnings.append)
    stores = [pinner.store(source) for source in sources]
    assert [store.tier for store in stores] == [HostTier.PAGEABLE] * 2
    assert observer.reasons == [reason] * 2
    assert len(warnings) == 1
    assert books.committed_bytes == 0


def test_a_pinned_store_holds_what_its_source_held(seed):
    model = Stack(2)
    stack = stack_layers(model, find_layers(model))
    originals = {name: parameter.data for name, parameter in stack.parameters.items()}
    driver, books = RecordingPinDriver(), ledger()
    pinner = Pinner(driver=driver, ledger=books, observer=Silent(), warn=print)
    for unit in stack.units:
        store = pinner.store(mapped_store(unit.layout, originals))
        assert store.tier is HostTier.PINNED
        views = unit.layout.views({dtype: run for dtype, _, run in store.runs})
        for name, view in views.items():
            assert torch.equal(view, originals[name])
            assert view.stride() == originals[name].stride()
