from pathlib import Path

import pytest
from sojourn.residencyd.kernel.errors import ParseFailed, SourceMissing
from sojourn.residencyd.kernel.pressure import RESOURCES, Pressure, parse_pressure, read_pressure


def test_microseconds_become_seconds(captures: Path) -> None:
    leaf = captures / "cgroup" / "v2" / "kubepods" / "pod11" / "model"
    assert read_pressure("memory", folders=[leaf], proc=captures / "proc") == Pressure(2.5, 0.5)


@pytest.mark.parametrize("resource", RESOURCES)
def test_the_machines_own_where_the_group_has_none(captures: Path, resource: str) -> None:
    found = read_pressure(resource, folders=[captures / "nowhere"], proc=captures / "proc")
    assert found.waiting_seconds >= found.stalled_seconds >= 0


def test_cpu_had_no_full_line_once() -> None:
    assert parse_pressure(b"some avg10=0.00 avg60=0.00 avg300=0.00 total=1000000\n") == Pressure(1.0, 0.0)


@pytest.mark.parametrize("text", [b"", b"some\n", b"some total=x\n", b"full total=1\n"])
def test_anything_else_is_refused(text: bytes) -> None:
    with pytest.raises(ParseFailed):
        parse_pressure(text)


def test_a_kernel_without_it_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(SourceMissing):
        read_pressure("io", proc=tmp_path)
