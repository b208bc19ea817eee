from pathlib import Path, PurePosixPath

import pytest
from sojourn.residencyd.kernel.cgroups import (
    Group,
    available_bytes,
    leaf_folder,
    parse_limit,
    parse_membership,
    parse_memory_stat,
    parse_number,
    read_groups,
    tightest,
)
from sojourn.residencyd.kernel.errors import ParseFailed, SourceMissing

from tests.residencyd.children import GIB

V2 = "0::/kubepods/pod11/model\n"
V1 = "4:memory:/kubepods/pod11/model\n0::/\n"


def proc_of(tmp_path: Path, membership: str) -> Path:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(membership)
    return tmp_path


def group(limit: int | None, usage: int, cache: int = 0) -> Group:
    return Group(Path("x"), limit, usage, cache, 0)


@pytest.mark.parametrize(
    ("tree", "membership", "leaf", "room"),
    [
        pytest.param("v2", V2, "kubepods/pod11/model", 6 * GIB, id="a fuller ancestor with a larger limit binds"),
        pytest.param("v2-container", V2, "", 13 * GIB, id="the host's path leads nowhere: the mount is the group"),
        pytest.param("v2-container", "0::/\n", "", 13 * GIB, id="a namespace of its own"),
        pytest.param("v1", V1, "memory/kubepods/pod11/model", 6 * GIB, id="v1, totals with children"),
        pytest.param("v1", "7:cpu,memory:/kubepods/pod11\n", "memory/kubepods/pod11", 6 * GIB, id="controllers joined"),
        pytest.param("v1", "4:memory:/a/b/kubepods/pod11\n", "memory/kubepods/pod11", 6 * GIB, id="a suffix is found"),
        pytest.param("v1", "4:memory:/docker/zzz\n", "memory", None, id="no suffix: the v1 mount, uncapped"),
        pytest.param("uncapped", V2, "", None, id="max is no limit"),
        pytest.param("full", V2, "", 0, id="no room is not no limit"),
        pytest.param("zero-limit", V2, "", 0, id="a limit of nothing"),
        pytest.param("empty", V2, None, None, id="nothing groups memory"),
        pytest.param("v2-container", "9:name=systemd:/\n", "", 13 * GIB, id="no line of memory at all"),
    ],
)
def test_the_tightest_room(
    captures: Path, tmp_path: Path, tree: str, membership: str, leaf: str | None, room: int | None
) -> None:
    root = captures / "cgroup" / tree
    groups = read_groups(proc=proc_of(tmp_path, membership), root=root)
    assert (groups[0].path if groups else None) == (root / leaf if leaf is not None else None)
    found = tightest(groups)
    assert (found.room_bytes if found else None) == room


def test_shared_memory_is_neither_reclaimable_nor_mapped_file(captures: Path, tmp_path: Path) -> None:
    groups = read_groups(proc=proc_of(tmp_path, V2), root=captures / "cgroup" / "v2")
    pod = next(found for found in groups if found.path.name == "pod11")
    assert pod.reclaimable_bytes == 2 * GIB
    assert pod.mapped_file_bytes == GIB
    assert pod.room_bytes == (32 - 10 + 2) * GIB


@pytest.mark.parametrize(
    ("machine", "groups", "available"),
    [
        (900 * GIB, (group(32 * GIB, 8 * GIB),), 24 * GIB),
        (12 * GIB, (group(900 * GIB, 8 * GIB),), 12 * GIB),
        (12 * GIB, (), 12 * GIB),
        (12 * GIB, (group(None, 500 * GIB),), 12 * GIB),
        (12 * GIB, (group(8 * GIB, 8 * GIB, 3 * GIB), group(None, 8 * GIB)), 3 * GIB),
        (12 * GIB, (group(4 * GIB, 8 * GIB),), 0),
        (100 * GIB, (group(64 * GIB, 8 * GIB), group(80 * GIB, 75 * GIB)), 5 * GIB),
    ],
)
def test_available_is_the_least_of_machine_and_groups(machine: int, groups: tuple[Group, ...], available: int) -> None:
    assert available_bytes(machine, groups) == available


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (b"max\n", None),
        (b"9223372036854771712\n", None),
        (b"0\n", 0),
        (b"1073741824\n", GIB),
        (b"9223372036854775807", None),
    ],
)
def test_limits(text: bytes, limit: int | None) -> None:
    assert parse_limit(text) == limit


@pytest.mark.parametrize("text", [b"", b"many", b"-1", b"1 2"])
def test_no_number_is_refused(text: bytes) -> None:
    with pytest.raises(ParseFailed):
        parse_number(text)


def test_a_malformed_stat_is_refused() -> None:
    with pytest.raises(ParseFailed):
        parse_memory_stat(b"file\n")


def test_membership_of_a_hybrid_host() -> None:
    paths = parse_membership(b"4:memory:/a:b/c\n1:name=systemd:/x\n0::/u\n")
    assert paths == {1: PurePosixPath("/a:b/c"), 2: PurePosixPath("/u")}


def test_a_path_with_parents_in_it_stays_below_the_mount(tmp_path: Path) -> None:
    assert leaf_folder(tmp_path / "mount", PurePosixPath("/../../etc"), exists=lambda _: False) == tmp_path / "mount"
    assert leaf_folder(tmp_path, PurePosixPath("/../x"), exists=lambda _: True) == tmp_path / "x"


def test_a_process_without_cgroups_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(SourceMissing):
        read_groups(proc=tmp_path, root=tmp_path)


def test_this_machine_can_be_read() -> None:
    groups = read_groups()
    assert available_bytes(1 << 50, groups) > 0
