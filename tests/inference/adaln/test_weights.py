"""Weights in the mapped checkpoint: views, parts, and pages that go out again."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sojourn.inference.adaln.weights import MappedWeights, Part
from sojourn.inference.loading.mapping import MappedFile
from sojourn.inference.loading.safetensors_file import read_safetensors

ROWS, COLUMNS = 2048, 1024


@pytest.fixture
def weights(tmp_path: Path) -> MappedWeights:
    torch.manual_seed(0)
    tensors = {name: torch.randn(ROWS, COLUMNS) for name in ("a.weight", "b.weight", "c.weight")}
    save_file({**tensors, "a.bias": torch.randn(ROWS)}, tmp_path / "model.safetensors")
    return MappedWeights([MappedFile(read_safetensors(tmp_path / "model.safetensors"))])


def resident_bytes(tensor: torch.Tensor) -> int:
    """Resident bytes of the mapping around a tensor, as the kernel counts them."""
    address, resident = tensor.data_ptr(), 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, _, end = head.partition("-")
            inside = int(start, 16) <= address < int(end, 16)
        elif inside and line.startswith("Rss:"):
            resident = int(line.split()[1]) * 1024
    return resident


def test_a_tensor_is_a_view_of_the_file(weights: MappedWeights, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for name, expected in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(weights.tensor(Part(name)), expected)
    first = weights.tensor(Part("a.weight"))
    assert first.data_ptr() == weights.tensor(Part("a.weight")).data_ptr()


def test_a_part_is_some_rows(weights: MappedWeights) -> None:
    whole = weights.tensor(Part("b.weight"))
    part = weights.tensor(Part("b.weight", 100, 300))
    assert torch.equal(part, whole[100:300])
    assert part.data_ptr() == whole[100].data_ptr()
    assert weights.tensor(Part("a.bias", 5, 9)).shape == (4,)


def test_pages_come_in_when_prefetched_and_go_out_when_released(weights: MappedWeights) -> None:
    parts = [Part("b.weight")]
    tensor = weights.tensor(parts[0])
    before = resident_bytes(tensor)
    weights.prefetch(parts)
    there = resident_bytes(tensor)
    weights.release(parts)
    gone = resident_bytes(tensor)
    assert there - before >= 0.9 * tensor.nbytes
    assert there - gone >= 0.9 * tensor.nbytes


def test_releasing_a_tensor_leaves_its_neighbours_in_memory(weights: MappedWeights) -> None:
    neighbour = weights.tensor(Part("c.weight"))
    weights.prefetch([Part("c.weight"), Part("b.weight")])
    before = resident_bytes(neighbour)
    weights.release([Part("b.weight")])
    assert before - resident_bytes(neighbour) <= neighbour.nbytes + 4096


def test_a_released_tensor_reads_the_same_again(weights: MappedWeights) -> None:
    tensor = weights.tensor(Part("a.weight"))
    copy = tensor.clone()
    weights.release([Part("a.weight")])
    assert torch.equal(tensor, copy)
