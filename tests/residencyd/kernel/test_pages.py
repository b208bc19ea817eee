import ctypes
import os
from pathlib import Path

import pytest
from sojourn.residencyd.kernel import pages
from sojourn.residencyd.kernel.errors import NotSupported, ProcessGone
from sojourn.residencyd.kernel.pages import (
    FILE,
    HUGE,
    PRESENT,
    SWAPPED,
    ZERO,
    PageCounts,
    PageTable,
    count_entries,
    count_exclusive,
    count_within,
    spans_of,
)

from tests.residencyd.children import GIB, MIB, PAGE, Child, child, filled, smaps, sparse


@pytest.fixture(params=["scan", "pagemap"])
def scan(request: pytest.FixtureRequest) -> bool:
    """Whether PAGEMAP_SCAN or pagemap entries are read: both must say the same."""
    if request.param == "scan":
        with PageTable(os.getpid()) as table:
            try:
                table._scan(0, PAGE)
            except NotSupported:
                pytest.skip("this kernel has no PAGEMAP_SCAN")
    return request.param == "scan"


def counted(it: Child, length: int, *, scan: bool) -> PageCounts:
    with PageTable(it.pid, scan=scan) as table:
        counts = table.count(it["address"], it["address"] + length)
        assert table.scans is scan
        return counts


def same_as_oracle(it: Child, length: int, *, scan: bool) -> PageCounts:
    counts = counted(it, length, scan=scan)
    told = smaps(it.pid, it["address"], it["address"] + length)
    assert counts.resident_bytes == told["Rss"]
    assert counts.anonymous_bytes == told["Anonymous"]
    assert counts.swapped_bytes == told["Swap"]
    return counts


def test_regions_add_up_by_category_within_each_range() -> None:
    flags = [PRESENT | FILE, PRESENT, SWAPPED, PRESENT | ZERO, PRESENT | FILE | HUGE, 0]
    found = (list(range(0, 60, 10)), list(range(10, 70, 10)), flags)
    assert count_within([(0, 60)], found) == [PageCounts(20, 10, 10, 10)]
    assert count_within([(0, 5), (5, 15), (15, 45), (45, 46), (70, 80)], found) == [
        PageCounts(5, 0, 0, 0),
        PageCounts(5, 5, 0, 0),
        PageCounts(5, 5, 10, 5),
        PageCounts(1, 0, 0, 1),
        PageCounts(),
    ]
    assert count_within([(0, 60)], ([], [], [])) == [PageCounts()]
    assert count_within([], found) == []


def test_near_ranges_are_walked_as_one() -> None:
    wanted = [(0, 10), (10, 20), (25, 30), (100, 110), (111, 112), (500, 510)]
    assert [wanted[run] for run in spans_of(wanted, gap_bytes=5)] == [wanted[:3], wanted[3:5], wanted[5:]]
    assert list(spans_of([])) == []


def test_ranges_counted_together_are_counted_alone() -> None:
    source = "a = map_(64 << 20); libc.madvise(a, 64 << 20, 15); write(a, 64 << 20, 12288); say(address=a)"
    with child(source) as it, PageTable(it.pid) as table:
        wanted = [(it["address"] + n * MIB, it["address"] + n * MIB + 7 * PAGE * (n % 5)) for n in range(0, 64, 3)]
        assert table.count_all(wanted) == [table.count(start, end) for start, end in wanted]


def test_counts_add_up() -> None:
    assert sum([PageCounts(1, 2, 3, 4), PageCounts(10, 20, 30, 40)], PageCounts()) == PageCounts(11, 22, 33, 44)
    assert PageCounts(1, 2, 3, 4).resident_bytes == 3


def test_entries_add_up_by_category(captures: Path) -> None:
    # 256 pages of a private file mapping: one written, the rest brought in around two reads.
    entries = (captures / "dit.pagemap").read_bytes()
    counts = count_entries(entries, page_bytes=1)
    assert counts == PageCounts(file_bytes=counts.file_bytes, anonymous_bytes=1)
    assert 0 < counts.file_bytes < 256
    assert count_exclusive(entries, page_bytes=1) == counts.file_bytes


def test_a_sparse_file_of_4_gib_is_mapped_not_resident_until_touched(tmp_path: Path, scan: bool) -> None:
    # On tmpfs where there is one: a disk file system would read 2 GiB of zeros, too.
    home = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    path = sparse(home / f"sojourn-{os.getpid()}-{scan}", 4 * GIB)
    try:
        with child("f = os.open(path, os.O_RDONLY); say(address=map_(4 << 30, R, SHARED, f))", path=str(path)) as it:
            assert same_as_oracle(it, 4 * GIB, scan=scan) == PageCounts()
            it.do(f"libc.madvise({it['address']}, 64 << 20, 22)")
            assert same_as_oracle(it, 4 * GIB, scan=scan).file_bytes == 64 * MIB
    finally:
        path.unlink()


def test_written_pages_of_a_private_file_mapping_are_anonymous(tmp_path: Path, scan: bool) -> None:
    path = filled(tmp_path / "weights", 4 * MIB)
    source = "f = os.open(path, os.O_RDONLY); a = map_(4 << 20, R | W, PRIVATE, f); read(a, 4 << 20); write(a, 1 << 20)"
    with child(f"{source}; say(address=a)", path=str(path)) as it:
        assert same_as_oracle(it, 4 * MIB, scan=scan) == PageCounts(3 * MIB, MIB, 0, 0)


def test_half_touched_pages_in_a_comb_are_counted_one_by_one(tmp_path: Path, scan: bool) -> None:
    with child("a = map_(32 << 20); libc.madvise(a, 32 << 20, 15); write(a, 32 << 20, 8192); say(address=a)") as it:
        counts = same_as_oracle(it, 32 * MIB, scan=scan)
    assert counts.anonymous_bytes == 16 * MIB


def test_the_zero_page_is_nobodys_memory() -> None:
    with child(
        "a = map_(1 << 20); libc.madvise(a, 1 << 20, 15); read(a, 1 << 20); write(a, 8192); say(address=a)"
    ) as it:
        with PageTable(it.pid) as table:
            try:
                table._scan(0, PAGE)
            except NotSupported:
                pytest.skip("pagemap entries do not show it")
        assert same_as_oracle(it, MIB, scan=True).anonymous_bytes == 8192


def test_an_older_kernel_is_read_by_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(25, "ENOTTY")

    monkeypatch.setattr(pages.fcntl, "ioctl", refuse)
    with child("a = map_(1 << 20); write(a, 1 << 16); say(address=a)") as it, PageTable(it.pid) as table:
        assert table.count(it["address"], it["address"] + MIB).anonymous_bytes == 1 << 16
        assert not table.scans


def test_a_partial_page_counts_whole() -> None:
    with child("a = map_(1 << 20); write(a, 1 << 20); say(address=a)") as it, PageTable(it.pid) as table:
        assert table.count(it["address"] + 1, it["address"] + 2).resident_bytes == PAGE
        assert table.count(it["address"] + PAGE - 1, it["address"] + PAGE + 1).resident_bytes == 2 * PAGE
        assert table.count(it["address"], it["address"]).resident_bytes == 0


def test_pages_that_another_process_maps_are_not_exclusive(tmp_path: Path) -> None:
    path = filled(tmp_path / "weights", MIB)
    source = "f = os.open(path, os.O_RDONLY); a = map_(1 << 20, R, SHARED, f); read(a, 1 << 20); say(address=a)"
    with child(source, path=str(path)) as it, PageTable(it.pid) as table:
        assert table.exclusive_file_bytes(it["address"], it["address"] + MIB) == MIB
        with child(source, path=str(path)):
            assert table.exclusive_file_bytes(it["address"], it["address"] + MIB) == 0
        assert table.exclusive_file_bytes(it["address"], it["address"] + MIB) == MIB


def test_a_process_that_ends_between_open_and_count_is_gone_not_empty(scan: bool) -> None:
    with child("a = map_(1 << 20); write(a, 1 << 20); say(address=a)") as it, PageTable(it.pid, scan=scan) as table:
        assert table.count(it["address"], it["address"] + MIB).resident_bytes == MIB
        it.process.kill()
        it.process.wait()
        with pytest.raises(ProcessGone):
            table.count(it["address"], it["address"] + MIB)


def test_a_walk_that_stands_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages.fcntl, "ioctl", lambda *_: 0)
    with PageTable(os.getpid()) as table:
        assert table.count(4096, 1 << 40) == PageCounts()


def test_ranges_beyond_user_space_hold_nothing() -> None:
    with PageTable(os.getpid()) as table:
        assert table.count(0xFFFF_FFFF_FF60_0000, 0xFFFF_FFFF_FF60_1000) == PageCounts()
    with PageTable(os.getpid(), scan=False) as table:
        assert table.count(0xFFFF_FFFF_FF60_0000, 0xFFFF_FFFF_FF60_1000) == PageCounts()


def test_own_buffers_are_found() -> None:
    buffer = ctypes.create_string_buffer(b"x" * MIB, MIB)
    with PageTable(os.getpid()) as table:
        assert table.count(ctypes.addressof(buffer), ctypes.addressof(buffer) + MIB).resident_bytes >= MIB
