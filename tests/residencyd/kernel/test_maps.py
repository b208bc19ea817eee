import mmap
import os
from pathlib import Path

import pytest
from sojourn.residencyd.kernel.errors import NotSupported, ParseFailed, ProcessGone
from sojourn.residencyd.kernel.maps import MapsQuery, MapsTable, parse_line, parse_maps, read_maps

from tests.residencyd.children import child


def test_every_line_is_one_mapping(captures: Path) -> None:
    for text in sorted(captures.glob("proc/*/maps")):
        assert len(parse_maps(text.read_bytes())) == len(text.read_bytes().splitlines())


@pytest.mark.parametrize(
    "name",
    [
        "/models/my models/dit 01.safetensors",
        "/models/two  blanks/te.safetensors",
        "/models/new\nline.safetensors",
        "/models/back\\slash.safetensors",
        "/models/vae.safetensors (deleted)",
        "/models/gone.safetensors (deleted)",
        "/memfd:sojourn-pinned (deleted)",
        "/dev/zero (deleted)",
        "/SYSV00000000 (deleted)",
        "/dev/shm/weights",
        "[heap]",
    ],
)
def test_a_name_is_kept_whole(captures: Path, name: str) -> None:
    mappings = read_maps(4711, proc=captures / "proc")
    assert name in {mapping.name for mapping in mappings}


def test_a_deleted_file_and_one_that_is_called_so_are_told_apart_by_inode_only(captures: Path) -> None:
    by_name = {mapping.name: mapping for mapping in read_maps(4711, proc=captures / "proc")}
    gone = by_name["/models/gone.safetensors (deleted)"]
    live = by_name["/models/vae.safetensors (deleted)"]
    assert gone.looks_deleted
    assert live.looks_deleted
    assert gone.device == live.device == (0xFE, 0)
    assert gone.inode != live.inode


def test_a_line_without_a_name_does_not_swallow_the_next(captures: Path) -> None:
    mappings = read_maps(4714, proc=captures / "proc")
    assert [mapping.name for mapping in mappings] == ["/bin/x", "", "", "", "[heap]"]
    assert [mapping.inode for mapping in mappings] == [12, 0, 0, 0, 0]


def test_the_fields_of_a_line() -> None:
    mapping = parse_line(b"7f1010000000-7f1020000000 rw-s 0001f000 fe:0a 7                          /m x")
    assert mapping == (0x7F1010000000, 0x7F1020000000, "rw-s", 0x1F000, (254, 10), 7, "/m x")
    assert mapping.size_bytes == 1 << 28
    assert not mapping.private


@pytest.mark.parametrize(
    "line",
    [b"", b"x", b"00-01 r--p", b"zz-01 r--p 0 0:0 0", b"02-01 r--p 0 0:0 0", b"01-01 r--p 0 0:0 0", b"1-2 r--p 0 0 0"],
)
def test_a_malformed_line_is_refused(line: bytes) -> None:
    with pytest.raises(ParseFailed):
        parse_line(line)


def test_lines_out_of_order_are_read_again_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torn = b"2000-3000 r--p 0 00:00 0\n1000-2000 r--p 0 00:00 0\n"
    whole = b"1000-2000 r--p 0 00:00 0\n2000-3000 r--p 0 00:00 0\n"
    answers = iter([torn, whole, torn, torn])
    monkeypatch.setattr("sojourn.residencyd.kernel.maps.read_bytes", lambda path: next(answers))
    assert len(read_maps(1, proc=tmp_path)) == 2
    with pytest.raises(ParseFailed, match="not in order"):
        read_maps(1, proc=tmp_path)


def test_the_table_finds_what_a_range_meets() -> None:
    table = MapsTable(parse_maps(b"1000-2000 r--p 0 00:00 0\n2000-3000 r--p 0 00:00 0\n5000-6000 r--p 0 00:00 0\n"))

    def starts(start: int, end: int) -> list[int]:
        return [mapping.start for mapping in table.overlapping(start, end)]

    assert starts(0x1000, 0x2000) == [0x1000]
    assert starts(0x1FFF, 0x2001) == [0x1000, 0x2000]
    assert starts(0x3000, 0x5000) == []
    assert starts(0x0, 0x10000) == [0x1000, 0x2000, 0x5000]
    assert starts(0x5800, 0x5801) == [0x5000]
    assert MapsTable(()).overlapping(0, 1) == []


def test_queries_and_text_say_the_same(tmp_path: Path) -> None:
    odd = tmp_path / "a b\nc (deleted)"
    odd.write_bytes(b"x" * 8192)
    with child(
        "f = os.open(path, os.O_RDONLY); map_(8192, R, PRIVATE, f); map_(4096, R, SHARED, f); say()", path=str(odd)
    ) as it:
        text = [mapping for mapping in read_maps(it.pid) if mapping.name != "[vsyscall]"]
        try:
            with MapsQuery(it.pid) as query:
                asked = query.overlapping(0, 1 << 63)
        except NotSupported:
            pytest.skip("this kernel has no PROCMAP_QUERY")
    assert asked == text


def test_a_query_beyond_the_last_mapping_finds_nothing() -> None:
    try:
        with MapsQuery(os.getpid()) as query:
            assert query.overlapping(0xFFFF_FFFF_FFFF_F000, 0xFFFF_FFFF_FFFF_FFFF) == []
    except NotSupported:
        pytest.skip("this kernel has no PROCMAP_QUERY")


def test_an_older_kernel_has_no_queries(captures: Path) -> None:
    with pytest.raises(NotSupported, match=r"6\.11"):
        MapsQuery(4711, proc=captures / "proc")


@pytest.mark.parametrize("reader", [read_maps, MapsQuery])
def test_a_process_that_is_not_there_is_gone(tmp_path: Path, reader: type) -> None:
    with pytest.raises(ProcessGone):
        reader(1, proc=tmp_path)


def test_a_process_that_has_ended_is_gone_not_empty() -> None:
    with child("say()") as it:
        it.process.kill()
        os.waitid(os.P_PID, it.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessGone):
            read_maps(it.pid)


def test_this_process_sees_its_own_mapping() -> None:
    with mmap.mmap(-1, 12 * 4096, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS):
        shared = [m for m in read_maps(os.getpid()) if m.name == "/dev/zero (deleted)"]
    assert any(mapping.size_bytes == 12 * 4096 for mapping in shared)
