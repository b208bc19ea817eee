"""Bytes of weights by where they are: storages, each once, pinned before file-backed."""

import logging
import mmap

import pytest
import torch
from sojourn.inference.offload.assemble import own_mappings
from sojourn.inference.offload.budget import HostMemory, PinLedger
from sojourn.inference.offload.lifecycle import Situation
from sojourn.inference.offload.pinning import RecordingPinDriver, pin_filled
from sojourn.inference.residency.component_map import ComponentMapPublisher, PublishedComponent
from sojourn.inference.residency.report import Residency, log_loaded, log_settled, residency_of
from torch import nn


def report(component, *hosted):
    return residency_of(component, own_mappings(), hosted=hosted)


def empty():
    return nn.Module()


def with_weights(*tensors):
    module = nn.Module()
    for i, tensor in enumerate(tensors):
        module.register_parameter(f"p{i}", nn.Parameter(tensor, False))
    return module


def test_host_weights_are_pageable():
    assert report(empty(), torch.ones(1024)) == Residency(host_pageable=4096)


def test_slices_of_one_buffer_count_once():
    buffer = torch.ones(1024)
    assert report(with_weights(buffer[:10], buffer[10:20], buffer[20:])) == Residency(host_pageable=4096)


def test_placeholders_without_memory_count_nothing():
    assert report(with_weights(torch.empty(0), torch.empty(3, device="meta"))) == Residency()


def test_a_mapped_weight_is_mapped(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(4096))
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
    assert report(with_weights(torch.frombuffer(memoryview(mapping), dtype=torch.uint8))) == Residency(host_mapped=4096)


def test_pinned_wins_over_the_name_that_it_is_mapped_under():
    ledger = PinLedger(HostMemory(available_bytes=8 << 30, shares_device=False))
    pinned = pin_filled(4096, lambda buffer: None, driver=RecordingPinDriver(), ledger=ledger)
    assert report(empty(), pinned) == Residency(host_pinned=4096)


def test_buffers_count_and_both_representations_count():
    module = with_weights(torch.ones(256))
    module.register_buffer("b", torch.ones(256))
    assert report(module, torch.ones(256)) == Residency(host_pageable=3 * 1024)


def test_an_object_that_is_no_module_has_none():
    assert report(object()) is None


@pytest.mark.parametrize(
    ("residency", "text"),
    [
        (Residency(host_pageable=1 << 29), "host pageable: 0.50 GB"),
        (Residency(), "weights: none"),
        (Residency(vram=int(4.63 * 2**30), host_pinned=int(17.25 * 2**30)), "vram: 4.63 GB, host pinned: 17.25 GB"),
        (Residency(vram=1, host_mapped=1 << 30), "vram: 0.00 GB, host mapped: 1.00 GB"),
    ],
)
def test_only_parts_that_are_not_zero_are_told(residency, text):
    assert str(residency) == text


def test_the_line_at_load_and_the_line_when_placement_has_settled(caplog):
    residency = Residency(vram=int(4.63 * 2**30), host_pinned=int(17.25 * 2**30))
    with caplog.at_level(logging.INFO):
        log_loaded("transformer", nn.Linear(1, 1), residency, size_bytes=int(21.16 * 2**30))
        log_settled({"transformer": residency, "vae": Residency()})
    assert caplog.messages == [
        "Loaded transformer: Linear. size 21.16 GB, vram: 4.63 GB, host pinned: 17.25 GB",
        "Settled: transformer (vram: 4.63 GB, host pinned: 17.25 GB), vae (weights: none)",
    ]


def test_a_map_that_cannot_be_written_is_warned_of_once_and_fails_nothing(tmp_path, caplog):
    folder = tmp_path / "shared"
    publisher = ComponentMapPublisher(folder / "map", [PublishedComponent(name="x", value=nn.Linear(2, 2))])
    for _ in range(3):
        publisher.publish(Situation())
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    folder.mkdir()
    publisher.publish(Situation())
    assert publisher.path.exists()
    assert publisher.generation == 4
    publisher.withdraw()
    publisher.withdraw()
    assert not publisher.path.exists()
