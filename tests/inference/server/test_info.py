"""Where memory stands, read from a /proc and a cgroup that are passed in."""

from pathlib import Path

import pytest
import torch
from sojourn.inference.server.info import memory


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:     64 kB\n")
    (tmp_path / "proc" / "self" / "status").write_text("Name:\tx\nVmRSS:\t      7 kB\n")
    return tmp_path / "proc"


@pytest.mark.parametrize(
    ("limit", "used", "available"),
    [("max", "1", 64 * 1024), ("30000", "10000", 20_000), ("99999999", "1", 64 * 1024), ("10", "30", 0)],
)
def test_host_memory_is_the_tighter_of_machine_and_cgroup(
    proc: Path, tmp_path: Path, limit: str, used: str, available: int
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    told = memory(proc=proc, cgroup=tmp_path)
    assert (told.process_resident_bytes, told.host_available_bytes) == (7 * 1024, available)


def test_what_cannot_be_read_hides_nothing_else(proc: Path, tmp_path: Path) -> None:
    assert memory(proc=proc, cgroup=tmp_path / "absent").host_available_bytes == 64 * 1024
    (proc / "meminfo").unlink()
    assert memory(proc=proc, cgroup=tmp_path).process_resident_bytes == 7 * 1024


def test_device_memory_is_told_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 9))
    assert (memory(device="cpu").device_free_bytes, memory(device="cpu").device_total_bytes) == (0, 0)
    told = memory(device=torch.device("cuda:0"))
    assert (told.device_free_bytes, told.device_total_bytes) == (3, 9)
