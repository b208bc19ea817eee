import gc
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sojourn.inference.loading.errors import WeightsError
from sojourn.inference.loading.mapping import MappedFile
from sojourn.inference.loading.safetensors_file import read_safetensors


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "w.safetensors"
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "bf16": torch.randn(5, 7, generator=generator).bfloat16(),
        "f32": torch.randn(3, generator=generator),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, path)
    return path


def test_tensors_are_those_that_safetensors_reads(path: Path) -> None:
    mapped = MappedFile(read_safetensors(path))
    for name, expected in load_file(path).items():
        found = mapped.tensor(name)
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert torch.equal(found, expected)


def test_each_tensor_lies_where_the_mapping_says_and_the_kernel_agrees(path: Path) -> None:
    mapped = MappedFile(read_safetensors(path))
    tensor, where = mapped.tensor("bf16"), mapped.range_of("bf16")
    assert tensor.data_ptr() == where.address
    assert where.length == 70
    line = next(line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path)))
    span, permissions, file_offset, _, inode = line.split()[:5]
    begin, end = (int(part, 16) for part in span.split("-"))
    assert permissions.startswith("r--")
    assert begin <= where.address < end
    assert where.address - begin + int(file_offset, 16) == where.offset
    assert int(inode) == where.inode


def test_closing_while_tensors_live_keeps_them_readable_and_unmaps_with_the_last(path: Path) -> None:
    mapped = MappedFile(read_safetensors(path))
    tensor = mapped.tensor("f32")
    expected = tensor.clone()
    mapped.close()
    mapped.close()
    assert torch.equal(tensor, expected)
    with pytest.raises(ValueError, match="no longer mapped"):
        mapped.tensor("f32")
    del tensor
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_misaligned_tensor_is_read_right(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (1 + -len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1.5, -2.0))
    assert MappedFile(read_safetensors(path)).tensor("w").tolist() == [1.5, -2.0]


def test_file_that_changed_after_its_check_is_not_mapped(path: Path) -> None:
    file = read_safetensors(path)
    with path.open("r+b") as opened:
        opened.truncate(file.identity.size - 1)
    with pytest.raises(WeightsError) as caught:
        MappedFile(file)
    assert caught.value.reason == "WeightsChanged"


def test_dtype_that_torch_lacks_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "f6.safetensors"
    header = json.dumps({"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"123")
    with pytest.raises(WeightsError) as caught:
        MappedFile(read_safetensors(path)).tensor("w")
    assert caught.value.found == "F6_E2M3"
