from pathlib import Path

import pytest
from sojourn.residencyd.kernel.errors import ParseFailed, SourceMissing
from sojourn.residencyd.kernel.meminfo import MemInfo, parse_meminfo, read_meminfo


def test_available_is_not_free() -> None:
    text = b"MemTotal: 125829120 kB\nMemFree:   3145728 kB\nMemAvailable: 120586240 kB\nSwapFree: 0 kB\n"
    assert parse_meminfo(text) == MemInfo(120 << 30, 3 << 30, 115 << 30, 0)


def test_a_capture(captures: Path) -> None:
    memory = read_meminfo(proc=captures / "proc")
    assert memory.total_bytes == 24683652 * 1024
    assert memory.free_bytes < memory.available_bytes < memory.total_bytes


@pytest.mark.parametrize(
    "text", [b"", b"MemTotal: 1 kB\nMemFree: 1 kB\n", b"MemTotal: x kB\nMemFree: 1 kB\nMemAvailable: 1 kB"]
)
def test_a_missing_field_is_refused(text: bytes) -> None:
    with pytest.raises(ParseFailed):
        parse_meminfo(text)


def test_a_missing_file_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(SourceMissing):
        read_meminfo(proc=tmp_path)
