"""Mutated inputs neither crash a reader nor hold it up: each is understood, or refused by its typed error.

What is mutated are the checked-in captures. 10 000 inputs over all readers; a failing one prints its seed.
"""

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sojourn.residencyd import claims
from sojourn.residencyd.errors import MapError
from sojourn.residencyd.kernel import cgroups, maps, meminfo, mounts, pages, pressure, process, process_io
from sojourn.residencyd.kernel.errors import ParseFailed
from sojourn.residencyd.scanner import Scanner
from sojourn.residencyd.settings import Settings
from sojourn.residencyd.snapshots import Snapshot

from tests.residencyd.published import MAPPED, PAGEABLE, component, message, sealed, storage

CAPTURES = Path(__file__).parent / "captures"
PROC, CGROUP = CAPTURES / "proc", CAPTURES / "cgroup"

# No reader may take longer for one input, however odd. Generous: it is there to catch what does not end.
LIMIT_SECONDS = 2.0

# Pieces that have broken parsers of such files.
ODD = [b"", b"\n", b"\n\n", b" ", b"\t", b"\0", b":", b"-", b")", b"(", b" (deleted)", b"\\012", b"kB", b"max", b"-1"]
ODD += [b"9" * 30, b"ffffffffffffffff", b"\xff\xfe", b"some ", b"total=", b" - ", b"0::", "٣".encode(), b"1_0", b"+5"]

MAP_FILE = sealed(
    message(
        7,
        [component("dit", storage(4096, 100, MAPPED, inode=7)), component("vae", storage(1 << 40, 9, PAGEABLE))],
        start_ticks=5,
    )
)


def stat_text(text: bytes) -> Any:
    return cgroups.reclaimable(cgroups.parse_memory_stat(text))


# What is parsed, by whom, what it refuses by, and how many inputs it gets: 10 000 in all.
CASES: list[tuple[str, Callable[[bytes], Any], list[bytes], int]] = [
    ("maps", maps.parse_maps, [path.read_bytes() for path in sorted(PROC.glob("*/maps"))], 2500),
    ("pagemap", pages.count_entries, [(CAPTURES / "dit.pagemap").read_bytes()], 1000),
    ("stat", process.parse_stat, [path.read_bytes() for path in sorted(PROC.glob("*/stat"))], 1000),
    ("status", process.parse_status, [path.read_bytes() for path in sorted(PROC.glob("*/status"))], 1500),
    ("memory.stat", stat_text, [path.read_bytes() for path in sorted(CGROUP.rglob("memory.stat"))], 1000),
    ("limits", cgroups.parse_limit, [path.read_bytes() for path in sorted(CGROUP.rglob("memory.*max"))], 500),
    ("cgroup", cgroups.parse_membership, [path.read_bytes() for path in sorted(PROC.glob("*/cgroup"))], 500),
    ("mountinfo", mounts.parse_mountinfo, [path.read_bytes() for path in sorted(PROC.glob("*/mountinfo"))], 500),
    ("meminfo", meminfo.parse_meminfo, [(PROC / "meminfo").read_bytes()], 500),
    ("pressure", pressure.parse_pressure, [path.read_bytes() for path in sorted(PROC.glob("pressure/*"))], 250),
    ("io", process_io.parse_io, [path.read_bytes() for path in sorted(PROC.glob("471*/io"))], 250),
    ("map", lambda content: claims.parse_file(Path("model.pb"), content), [MAP_FILE], 500),
]


def mutations(originals: list[bytes]) -> st.SearchStrategy[bytes]:
    """Originals with some places overwritten, cut out, doubled or filled with odd pieces."""

    def mutate(original: bytes, changes: list[tuple[int, int, str, bytes]]) -> bytes:
        text = bytearray(original)
        for place, length, how, piece in changes:
            at = place % (len(text) + 1)
            end = min(len(text), at + length)
            if how == "cut":
                del text[at:end]
            elif how == "cut off":
                del text[at:]
            elif how == "double":
                text[at:at] = text[at:end]
            else:
                text[at:end] = piece
        return bytes(text)

    change = st.tuples(
        st.integers(0, 1 << 20),
        st.integers(0, 60),
        st.sampled_from(["cut", "cut off", "double", "replace", "replace"]),
        st.one_of(st.sampled_from(ODD), st.binary(max_size=8)),
    )
    return st.builds(mutate, st.sampled_from(originals), st.lists(change, min_size=1, max_size=4))


@pytest.mark.parametrize(("name", "parse", "originals", "count"), CASES, ids=[case[0] for case in CASES])
def test_mutated_inputs_are_understood_or_refused(
    name: str, parse: Callable[[bytes], Any], originals: list[bytes], count: int
) -> None:
    assert originals
    tried = 0

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        print_blob=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(content=mutations(originals))
    def check(content: bytes) -> None:
        nonlocal tried
        tried += 1
        begun = time.perf_counter()
        with contextlib.suppress(ParseFailed, MapError):
            parse(content)
        assert time.perf_counter() - begun < LIMIT_SECONDS

    check()
    assert tried >= count


def test_a_mutated_tree_leaves_the_other_sources_alone(tmp_path: Path) -> None:
    """One file of a whole /proc and cgroup tree at a time; each look ends with an answer, and counts what failed."""
    proc, group = tmp_path / "proc", tmp_path / "cgroup"
    shutil.copytree(PROC, proc)
    shutil.copytree(CGROUP / "v1", group)
    weights = storage(0x7FBC49EB1000, 1 << 20, MAPPED, device_major=254, inode=16187395)
    (tmp_path / "model.pb").write_bytes(sealed(message(4711, [component("dit", weights)], start_ticks=123718)))
    with (proc / "4711" / "pagemap").open("wb") as file:
        file.seek(0x7FBC49EB1000 // 4096 * 8)
        file.write((CAPTURES / "dit.pagemap").read_bytes())
    names = ["4711/maps", "4711/stat", "4711/status", "4711/cgroup", "4711/mountinfo", "meminfo", "pressure/io"]
    files = [*(proc / name for name in names), group / "memory/kubepods/pod11/memory.stat", tmp_path / "model.pb"]
    originals = {path: path.read_bytes() for path in files}

    @settings(max_examples=300, deadline=None, database=None, print_blob=True, suppress_health_check=list(HealthCheck))
    @given(data=st.data(), path=st.sampled_from(files))
    def check(data: st.DataObject, path: Path) -> None:
        path.write_bytes(data.draw(mutations([originals[path]])))
        try:
            scanner = Scanner(Settings(str(tmp_path / "model.pb"), proc, group, floor_seconds=0))
            snapshot = scanner.snapshot(1.0)
            assert scanner.errors == {name: int(name in snapshot_errors(snapshot)) for name in scanner.errors}
            if path.name != "meminfo":
                assert snapshot.memory
            if path.name in ("meminfo", "memory.stat", "io", "cgroup", "mountinfo"):
                assert snapshot.seen
        finally:
            path.write_bytes(originals[path])

    check()


def snapshot_errors(snapshot: Snapshot) -> set[str]:
    """Sources that failed; what is merely not there is no error."""
    return {name for name, why in snapshot.sources.items() if why and "does not exist" not in why}


def test_the_inputs_are_ten_thousand() -> None:
    assert sum(case[3] for case in CASES) == 10_000


def test_what_is_not_mutated_is_understood() -> None:
    for _, parse, originals, _ in CASES:
        for content in originals:
            parse(content)
