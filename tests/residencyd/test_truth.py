"""What is said equals what the kernel's own account says, to the page, for every kind of mapping.

smaps is the oracle of these tests. The product never opens it.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from sojourn.residencyd.attribution import ComponentBytes
from sojourn.residencyd.claims import Tier
from sojourn.residencyd.scanner import Scanner
from sojourn.residencyd.settings import Settings
from sojourn.residencyd.snapshots import ProcessReading

from tests.residencyd.children import GIB, MIB, NOBODY, Child, child, filled, fincore, run_as, smaps, sparse
from tests.residencyd.published import MAPPED, PAGEABLE, PINNED, component, publish, storage

NOW = 1000.0


def scan(folder: Path) -> ProcessReading:
    reading = Scanner(Settings(map_pattern=str(folder), floor_seconds=0)).snapshot(NOW).processes[0]
    assert reading.seen, reading.blind_message
    return reading


def only(reading: ProcessReading) -> ComponentBytes:
    assert len(reading.components) == 1
    return reading.components[0]


def resident(part: ComponentBytes) -> dict[Tier, int]:
    return {tier: held.resident_bytes for tier, held in part.tiers.items() if held.resident_bytes}


def check(it: Child, folder: Path, length: int) -> ProcessReading:
    """Scans, and holds the component's sums against smaps."""
    reading = scan(folder)
    told = smaps(it.pid, it["address"], it["address"] + length)
    huge = told.get("Shared_Hugetlb", 0) + told.get("Private_Hugetlb", 0)  # Rss leaves them out
    part = only(reading)
    assert part.resident_bytes == told["Rss"] + huge
    assert part.swapped_bytes == told["Swap"]
    assert sum(held.mapped_bytes for held in part.tiers.values()) == told["Size"]
    return reading


MAP_FILE = "f = os.open(path, os.O_RDONLY); a = map_(length, prot, flags, f)"


@contextlib.contextmanager
def mapping(tmp_path: Path, path: Path, length: int, source: str = "pass", **more: object) -> Iterator[Child]:
    """A child that has a file mapped, and published that."""
    values = {"path": str(path), "length": length, "prot": 1, "flags": 2} | more
    uid = values.pop("uid", None)
    with child(f"{MAP_FILE}; {source}; say(address=a)", uid=uid, **values) as it:
        publish(tmp_path, it.pid, component("dit", storage(it["address"], length, MAPPED, file=path)))
        yield it


def test_a_regular_file(tmp_path: Path) -> None:
    path = filled(tmp_path / "weights", 8 * MIB)
    with mapping(tmp_path, path, 8 * MIB, "read(a, 3 << 20)") as it:
        reading = check(it, tmp_path, 8 * MIB)
        assert set(resident(only(reading))) == {Tier.HOST_MAPPED}
        assert set(only(reading).disagreements.values()) == {0}
        assert reading.cached["dit"].size_bytes == fincore(path)
        assert not reading.cached["dit"].estimate


def test_a_private_file_with_written_pages(tmp_path: Path) -> None:
    path = filled(tmp_path / "weights", 4 * MIB)
    with mapping(tmp_path, path, 4 * MIB, "read(a, 4 << 20); write(a, 1 << 20)", prot=3) as it:
        part = only(check(it, tmp_path, 4 * MIB))
        assert resident(part) == {Tier.HOST_MAPPED: 3 * MIB, Tier.HOST_PAGEABLE: MIB}
        assert part.disagreements["other_tier"] == MIB


def test_a_deleted_file_still_counts_for_its_component(tmp_path: Path) -> None:
    path = filled(tmp_path / "weights", 4 * MIB)
    with mapping(tmp_path, path, 4 * MIB, "read(a, 4 << 20)") as it:
        path.unlink()
        reading = check(it, tmp_path, 4 * MIB)
        assert resident(only(reading)) == {Tier.HOST_MAPPED: 4 * MIB}
        assert only(reading).disagreements["other_file"] == 0
        assert "dit" not in reading.cached


def test_another_file_in_a_deleted_ones_place_is_not_taken_for_it(tmp_path: Path) -> None:
    path = filled(tmp_path / "weights", 4 * MIB)
    with mapping(tmp_path, path, 4 * MIB, "read(a, 4 << 20)") as it:
        path.unlink()
        filled(tmp_path / "weights (deleted)", 4 * MIB)
        reading = check(it, tmp_path, 4 * MIB)
        assert "dit" not in reading.cached


def test_a_file_that_is_called_deleted_is_found(tmp_path: Path) -> None:
    path = filled(tmp_path / "weights (deleted)", 4 * MIB)
    with mapping(tmp_path, path, 4 * MIB, "read(a, 4 << 20)") as it:
        assert check(it, tmp_path, 4 * MIB).cached["dit"].size_bytes == fincore(path)


@pytest.mark.parametrize("name", ["dit 01.safetensors", "two  blanks", "new\nline", "back\\slash", "ü"])
def test_any_name(tmp_path: Path, name: str) -> None:
    path = filled(tmp_path / name, MIB)
    with mapping(tmp_path, path, MIB, "read(a, 1 << 20)") as it:
        assert check(it, tmp_path, MIB).cached["dit"].size_bytes == fincore(path)


def test_a_file_truncated_under_us(tmp_path: Path) -> None:
    path = filled(tmp_path / "weights", 4 * MIB)
    with mapping(tmp_path, path, 4 * MIB, "read(a, 4 << 20)") as it:
        os.truncate(path, MIB)
        reading = check(it, tmp_path, 4 * MIB)
        assert resident(only(reading)) == {Tier.HOST_MAPPED: MIB}
        assert reading.cached["dit"].size_bytes == fincore(path) == MIB


def test_a_sparse_file_of_4_gib_never_touched_and_then_half_touched(tmp_path: Path) -> None:
    path = sparse(tmp_path / "weights", 4 * GIB)
    with mapping(tmp_path, path, 4 * GIB) as it:
        part = only(check(it, tmp_path, 4 * GIB))
        assert part.tiers[Tier.HOST_MAPPED].mapped_bytes == 4 * GIB
        assert part.tiers[Tier.HOST_MAPPED].resident_bytes == 0
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")
        half = 2 * GIB if available > 6 * GIB else 64 * MIB
        it.do(f"libc.madvise({it['address']}, {half}, 22)")
        part = only(check(it, tmp_path, 4 * GIB))
        assert part.tiers[Tier.HOST_MAPPED].mapped_bytes == 4 * GIB
        assert part.tiers[Tier.HOST_MAPPED].resident_bytes == half
        it.do(f"libc.madvise({it['address']}, {half}, 21)")


ANONYMOUS = "a = map_(length)"
MEMFD = "f = os.memfd_create(name); os.ftruncate(f, length); a = map_(length, flags=SHARED, fd=f)"
SYSV = """
libc.shmat.restype = ctypes.c_void_p
i = libc.shmget(0, length, 0o1600); a = libc.shmat(i, None, 0); libc.shmctl(i, 0, None)
"""
SHM = "f = os.open('/dev/shm/sojourn-test', os.O_RDWR | os.O_CREAT, 0o600); os.unlink('/dev/shm/sojourn-test'); "
SHM += "os.ftruncate(f, length); a = map_(length, flags=SHARED, fd=f)"


@pytest.mark.parametrize(
    ("source", "claimed", "tier"),
    [
        pytest.param(ANONYMOUS, PAGEABLE, Tier.HOST_PAGEABLE, id="anonymous"),
        pytest.param(f"name = 'sojourn-pinned'; {MEMFD}", PINNED, Tier.HOST_PINNED, id="pinned store"),
        pytest.param(f"name = 'other'; {MEMFD}", PAGEABLE, Tier.HOST_PAGEABLE, id="memfd"),
        pytest.param(SYSV, PAGEABLE, Tier.HOST_PAGEABLE, id="System V"),
        pytest.param(SHM, PAGEABLE, Tier.HOST_PAGEABLE, id="/dev/shm"),
        pytest.param("a = map_(length, flags=SHARED | ANON)", PAGEABLE, Tier.HOST_PAGEABLE, id="shared anonymous"),
        pytest.param("a = map_(length, flags=SHARED | ANON)", PINNED, Tier.HOST_PINNED, id="shared anonymous of CUDA"),
    ],
)
@pytest.mark.parametrize("touched", [0, MIB, 4 * MIB])
def test_memory_without_a_file(tmp_path: Path, source: str, claimed: int, tier: Tier, touched: int) -> None:
    with child(f"{source}\nwrite(a, {touched}); say(address=a)", length=4 * MIB) as it:
        publish(tmp_path, it.pid, component("dit", storage(it["address"], 4 * MIB, claimed)))
        part = only(check(it, tmp_path, 4 * MIB))
        assert set(part.tiers) == {tier}
        assert part.tiers[tier].resident_bytes == touched
        assert set(part.disagreements.values()) == {0}


def test_huge_folios(tmp_path: Path) -> None:
    source = "a = map_(16 << 20); b = -(-a // (2 << 20)) * (2 << 20); libc.madvise(b, 8 << 20, 14); write(b, 5 << 20)"
    with child(f"{source}; say(address=a)") as it:
        publish(tmp_path, it.pid, component("dit", storage(it["address"], 16 * MIB, PAGEABLE)))
        check(it, tmp_path, 16 * MIB)


def test_hugetlb_pages_count_though_rss_leaves_them_out(tmp_path: Path) -> None:
    control = Path("/proc/sys/vm/nr_hugepages")
    if not int(control.read_text()):
        pytest.skip("no hugetlb pages are reserved")
    with child("a = map_(2 << 20, flags=PRIVATE | ANON | 0x40000); write(a, 1); say(address=a)") as it:
        publish(tmp_path, it.pid, component("dit", storage(it["address"], 2 * MIB, PAGEABLE)))
        assert only(check(it, tmp_path, 2 * MIB)).resident_bytes == 2 * MIB


def test_never_written_anonymous_memory_that_was_read_is_nobodys(tmp_path: Path) -> None:
    with child("a = map_(4 << 20); read(a, 4 << 20); say(address=a)") as it:
        publish(tmp_path, it.pid, component("dit", storage(it["address"], 4 * MIB, PAGEABLE)))
        assert check(it, tmp_path, 4 * MIB).components[0].resident_bytes == 0


@pytest.mark.usefixtures("as_root")
def test_overlayfs(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("lower", "upper", "work", "merged")}
    for folder in folders.values():
        folder.mkdir()
    below = filled(folders["lower"] / "weights", 4 * MIB)
    options = "lowerdir={lower},upperdir={upper},workdir={work}".format(**folders)
    if subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, folders["merged"]], check=False).returncode:
        pytest.skip("overlayfs cannot be mounted here")
    try:
        with mapping(tmp_path, folders["merged"] / "weights", 4 * MIB, "read(a, 3 << 20)") as it:
            reading = check(it, tmp_path, 4 * MIB)
            assert set(resident(only(reading))) == {Tier.HOST_MAPPED}
            assert reading.cached["dit"].size_bytes == fincore(below)
    finally:
        subprocess.run(["umount", folders["merged"]], check=True)


@pytest.mark.usefixtures("as_root")
def test_a_file_of_another_owner_is_stuck(open_path: Path) -> None:
    path = filled(open_path / "weights", 4 * MIB)
    path.chmod(0o644)
    with mapping(open_path, path, 4 * MIB, "read(a, 4 << 20)", uid=NOBODY) as it:
        reading = check(it, open_path, 4 * MIB)
        assert reading.cold["dit"].cold_bytes == 0
        assert reading.cold["dit"].stuck_bytes["not_owner"] == 4 * MIB
        os.chown(path, NOBODY, NOBODY)
        reading = check(it, open_path, 4 * MIB)
        assert reading.cold["dit"].cold_bytes == 4 * MIB


SCAN_A_STRANGERS_FILE = """
import json, sys
from sojourn.residencyd.scanner import Scanner
from sojourn.residencyd.settings import Settings
become()
(found,) = Scanner(Settings(map_pattern=sys.argv[1], floor_seconds=0)).snapshot(1.0).processes
print(json.dumps([found.blind_message, found.components[0].resident_bytes, found.cached["dit"].__dict__]))
"""


@pytest.mark.usefixtures("as_root")
def test_a_sidecar_that_does_not_own_the_file_says_that_it_estimates(open_path: Path) -> None:
    path = filled(open_path / "weights", 4 * MIB)
    path.chmod(0o644)
    with mapping(open_path, path, 4 * MIB, "read(a, 3 << 20)", uid=NOBODY) as it:
        (open_path / "model.pb").chmod(0o644)
        blind, resident_bytes, cached = run_as(NOBODY, SCAN_A_STRANGERS_FILE, str(open_path))
        assert blind == ""
        assert resident_bytes == smaps(it.pid, it["address"], it["address"] + 4 * MIB)["Rss"]
        assert cached["estimate"]
        assert abs(cached["size_bytes"] - fincore(path)) <= MIB


def test_pages_that_others_map_are_stuck(tmp_path: Path) -> None:
    path = filled(tmp_path / "weights", 4 * MIB)
    other = "f = os.open(path, os.O_RDONLY); a = map_(4 << 20, R, SHARED, f); read(a, 1 << 20); say()"
    with mapping(tmp_path, path, 4 * MIB, "read(a, 4 << 20)") as it, child(other, path=str(path)):
        cold = check(it, tmp_path, 4 * MIB).cold["dit"]
        assert cold.stuck_bytes["shared"] >= MIB
        assert cold.cold_bytes + cold.stuck_bytes["shared"] == 4 * MIB


def test_locked_pages_are_stuck(tmp_path: Path) -> None:
    path = filled(tmp_path / "weights", 4 * MIB)
    with mapping(tmp_path, path, 4 * MIB, "read(a, 4 << 20); assert not libc.mlock(a, 1 << 20)") as it:
        cold = check(it, tmp_path, 4 * MIB).cold["dit"]
        assert (cold.cold_bytes, cold.stuck_bytes["locked"]) == (3 * MIB, MIB)


def test_components_and_unattributed_make_up_all_that_is_resident(tmp_path: Path) -> None:
    path = filled(tmp_path / "weights", 8 * MIB)
    source = "read(a, 5 << 20); b = map_(4 << 20); write(b, 3 << 20); c = map_(1 << 20, flags=SHARED | ANON); "
    source += "write(c, 1 << 20)"
    with mapping(tmp_path, path, 8 * MIB, source) as it:
        reading = scan(tmp_path)
        rest = reading.unattributed
        assert rest
        whole = smaps(it.pid, 0, 1 << 64)
        parts = only(reading).resident_bytes + rest.file_bytes + rest.anonymous_bytes + rest.shared_bytes
        assert parts == whole["Rss"]
        assert rest.anonymous_bytes == whole["Anonymous"]
        assert rest.shared_bytes >= MIB


def test_a_lying_map_is_found_out(tmp_path: Path) -> None:
    path, other = filled(tmp_path / "weights", 4 * MIB), filled(tmp_path / "other", MIB)
    with mapping(tmp_path, path, 4 * MIB, "read(a, 4 << 20)") as it:
        a = it["address"]
        it.do("hole = map_(8 << 20); libc.munmap(ctypes.c_void_p(hole), ctypes.c_size_t(8 << 20))")
        liar = component(
            "dit",
            storage(a, MIB, PINNED),
            storage(a + MIB, MIB, MAPPED, file=other),
            storage(a + 2 * MIB, MIB, PAGEABLE),
            storage(a + 3 * MIB, MIB, MAPPED, file=path),
            storage(0x1000_0000_0000, 2 * MIB, MAPPED),
        )
        publish(tmp_path, it.pid, liar)
        part = only(scan(tmp_path))
        assert part.disagreements == {"not_mapped": 2 * MIB, "other_tier": 2 * MIB, "other_file": MIB}
        assert resident(part) == {Tier.HOST_MAPPED: 4 * MIB}
