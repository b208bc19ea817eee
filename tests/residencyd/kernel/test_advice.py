import ctypes
import errno
import mmap
import os
from pathlib import Path

import pytest
from sojourn.residencyd.kernel import syscalls
from sojourn.residencyd.kernel.advice import (
    Advice,
    chunks,
    cold,
    inner_pages,
    outer_pages,
    page_out,
    populate_read,
    will_need,
)
from sojourn.residencyd.kernel.maps import read_maps
from sojourn.residencyd.kernel.pages import PageTable

from tests.residencyd.children import MIB, NOBODY, PAGE, child, filled, run_as


def test_what_is_given_away_lies_within_and_what_is_brought_in_covers() -> None:
    assert inner_pages(1000, 10000, page_bytes=4096) == (4096, 4096)
    assert outer_pages(1000, 10000, page_bytes=4096) == (0, 12288)
    assert inner_pages(4096, 4096, page_bytes=4096) == outer_pages(4096, 4096, page_bytes=4096) == (4096, 4096)
    assert inner_pages(1, 100, page_bytes=4096) == (4096, 0)
    assert outer_pages(5000, 0, page_bytes=4096) == (4096, 0)


def test_chunks_cover_a_range_once() -> None:
    assert list(chunks(100, 25, 10)) == [(100, 10), (110, 10), (120, 5)]
    assert list(chunks(100, 0, 10)) == []


def test_willneed_goes_in_chunks_of_8_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(syscalls, "madvise", lambda *call: calls.append(call))
    advised = will_need(PAGE + 1, 20 * MIB)
    assert {call[2] for call in calls} == {Advice.WILLNEED}
    assert max(call[1] for call in calls) == 8 * MIB
    assert sum(call[1] for call in calls) == advised.requested_bytes == advised.accepted_bytes == 20 * MIB + PAGE
    assert calls[0][0] == PAGE


def test_a_refused_chunk_is_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_second(address: int, *_: int) -> None:
        if address == 8 * MIB:
            raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(syscalls, "madvise", refuse_second)
    advised = will_need(0, 20 * MIB)
    assert advised.requested_bytes == 20 * MIB
    assert advised.accepted_bytes == 12 * MIB
    assert advised.error == errno.EINVAL
    assert advised.reason == "locked"


def test_nothing_asked_for_nothing_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "madvise", lambda *_: pytest.fail("called"))
    for call in (will_need, populate_read, cold, page_out):
        assert call(12345, 0).requested_bytes == 0
    assert page_out(12345, 10).requested_bytes == 0
    assert page_out(12345, 10).reason == ""


def mapped(path: Path) -> tuple[mmap.mmap, int]:
    """A mapping in this process, and its address."""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
    return memory, next(m.start for m in read_maps(os.getpid()) if m.inode == path.stat().st_ino)


def resident(address: int, length: int) -> int:
    with PageTable(os.getpid()) as table:
        return table.count(address, address + length).resident_bytes


def test_populate_brings_in_and_page_out_lets_go(tmp_path: Path) -> None:
    path = filled(tmp_path / "weights", 16 * MIB)
    memory, address = mapped(path)
    with memory:
        assert populate_read(address, 16 * MIB).accepted_bytes == 16 * MIB
        assert resident(address, 16 * MIB) == 16 * MIB
        assert cold(address, 16 * MIB).accepted_bytes == 16 * MIB
        assert resident(address, 16 * MIB) == 16 * MIB
        assert page_out(address + 1, 8 * MIB).accepted_bytes == 8 * MIB - PAGE
        # The page before the range stays in memory, but a large folio that has to be split may lose its mapping.
        assert resident(address, 16 * MIB) in (8 * MIB, 8 * MIB + PAGE)
        assert page_out(address, 16 * MIB).accepted_bytes == 16 * MIB
        assert resident(address, 16 * MIB) == 0


def test_page_out_of_shared_pages_is_accepted_and_does_nothing(tmp_path: Path) -> None:
    path = filled(tmp_path / "weights", 4 * MIB)
    memory, address = mapped(path)
    source = "f = os.open(path, os.O_RDONLY); a = map_(4 << 20, R, SHARED, f); read(a, 4 << 20); say()"
    with memory:
        populate_read(address, 4 * MIB)
        with child(source, path=str(path)):
            assert page_out(address, 4 * MIB).accepted_bytes == 4 * MIB
            assert resident(address, 4 * MIB) == 4 * MIB
        page_out(address, 4 * MIB)
        assert resident(address, 4 * MIB) == 0


BY_A_STRANGER = """
import json, mmap, os, sys
from sojourn.residencyd.kernel.advice import page_out, populate_read
from sojourn.residencyd.kernel.maps import read_maps
from sojourn.residencyd.kernel.maps import read_maps
from sojourn.residencyd.kernel.pages import PageTable
become()
file = os.open(sys.argv[1], os.O_RDONLY)
memory = mmap.mmap(file, 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
address = next(m.start for m in read_maps(os.getpid()) if m.inode == os.fstat(file).st_ino)
populate_read(address, len(memory))
advised = page_out(address, len(memory))
with PageTable(os.getpid()) as table:
    print(json.dumps([advised.accepted_bytes, table.count(address, address + len(memory)).resident_bytes]))
"""


@pytest.mark.usefixtures("as_root")
def test_page_out_of_a_strangers_file_is_accepted_and_does_nothing(open_path: Path) -> None:
    path = filled(open_path / "weights", 4 * MIB)
    path.chmod(0o644)
    assert run_as(NOBODY, BY_A_STRANGER, str(path)) == [4 * MIB, 4 * MIB]
    os.chown(path, NOBODY, NOBODY)
    assert run_as(NOBODY, BY_A_STRANGER, str(path)) == [4 * MIB, 0]


def test_a_locked_part_is_refused_by_name(tmp_path: Path) -> None:
    path = filled(tmp_path / "weights", 4 * MIB)
    memory, address = mapped(path)
    libc = ctypes.CDLL(None)
    with memory:
        populate_read(address, 4 * MIB)
        if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(MIB)):
            pytest.skip("mlock is not allowed here")
        assert page_out(address, 4 * MIB).reason == "locked"
        assert resident(address, 4 * MIB) >= MIB


def test_beyond_the_end_of_the_file_is_refused_by_name(tmp_path: Path) -> None:
    path = filled(tmp_path / "weights", 2 * MIB)
    memory, address = mapped(path)
    with memory:
        os.truncate(path, MIB)
        advised = populate_read(address, 2 * MIB, chunk_bytes=MIB)
        assert advised.accepted_bytes == MIB
        assert advised.reason == "truncated"
