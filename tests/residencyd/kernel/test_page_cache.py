import os
import subprocess
from pathlib import Path

import pytest
from sojourn.residencyd.kernel import page_cache, syscalls
from sojourn.residencyd.kernel.errors import NotOwner, NotSupported
from sojourn.residencyd.kernel.page_cache import CacheEstimate, cachestat, is_own, mincore, sample, sample_all

from tests.residencyd.children import MIB, NOBODY, PAGE, filled, fincore, run_as


@pytest.fixture
def half_cached(open_path: Path) -> Path:
    """A file of 16 MiB of which the first half is in the page cache."""
    path = filled(open_path / "weights", 16 * MIB)
    path.chmod(0o644)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), 8 * MIB, 0)
    return path


def test_cachestat_equals_fincore(half_cached: Path) -> None:
    with half_cached.open("rb") as file:
        counts = cachestat(file.fileno())
        assert counts.cached_bytes == fincore(half_cached)
        assert 8 * MIB <= counts.cached_bytes < 9 * MIB
        assert counts.dirty_bytes == 0
        assert cachestat(file.fileno(), offset=0, length=4 * MIB).cached_bytes == 4 * MIB
        assert cachestat(file.fileno(), offset=12 * MIB, length=4 * MIB).cached_bytes == 0


def test_sampling_comes_close_and_says_that_it_is_an_estimate(half_cached: Path) -> None:
    with half_cached.open("rb") as file:
        estimate = sample(file.fileno(), length=16 * MIB)
    assert estimate.probes == page_cache.SAMPLES
    assert abs(estimate.cached_bytes - 8 * MIB) <= MIB


def test_sampling_again_and_again_finds_what_it_found_at_first(half_cached: Path) -> None:
    """Each probe of an absent byte has its page read: the next call must not take that for what is cached."""
    with half_cached.open("rb") as file:
        before = cachestat(file.fileno()).cached_bytes
        estimates = [sample(file.fileno(), length=16 * MIB).cached_bytes for _ in range(20)]
        after = cachestat(file.fileno()).cached_bytes
    assert all(abs(estimate - 8 * MIB) <= MIB for estimate in estimates), estimates
    assert after - before <= 20 * page_cache.SAMPLES // 2 * PAGE // 4, "most of what was dragged in is still there"


def test_sampling_many_ranges_tells_of_each_and_waits_once(half_cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(page_cache.time, "sleep", waits.append)
    with half_cached.open("rb") as file:
        found = sample_all(file.fileno(), [(index * MIB, MIB) for index in range(16)])
    assert [estimate.cached_bytes for estimate in found[:8]] == [MIB] * 8
    assert all(estimate.cached_bytes < MIB // 2 for estimate in found[8:])
    assert len(waits) == 1


def test_sampling_of_little_and_of_nothing(half_cached: Path) -> None:
    with half_cached.open("rb") as file:
        assert sample(file.fileno(), length=0) == CacheEstimate(0, 0)
        assert sample(file.fileno(), length=2 * PAGE) == CacheEstimate(2 * PAGE, 2)
        assert sample(file.fileno(), length=100) == CacheEstimate(100, 1)


def test_mincore_of_an_own_file_equals_fincore(half_cached: Path) -> None:
    with half_cached.open("rb") as file:
        assert mincore(file.fileno(), length=16 * MIB) == fincore(half_cached)
        assert mincore(file.fileno(), offset=12 * MIB, length=4 * MIB) == 0
        assert mincore(file.fileno(), length=0) == 0


@pytest.mark.parametrize(
    ("mode", "owner", "gids", "own"),
    [
        (0o444, (7, 7), (9,), True),
        (0o644, (0, 0), (9,), False),
        (0o664, (0, 9), (9,), True),
        (0o646, (0, 9), (9,), False),
        (0o666, (0, 0), (9,), True),
    ],
)
def test_whose_a_file_is(mode: int, owner: tuple[int, int], gids: tuple[int, ...], own: bool) -> None:
    file = os.stat_result((mode, 1, 1, 1, *owner, 0, 0, 0, 0))
    assert is_own(file, uid=7, gids=gids) is own
    assert is_own(file, uid=7, gids=gids, privileged=True)


BY_A_STRANGER = """
import json, os, sys
from sojourn.residencyd.kernel.errors import NotOwner
from sojourn.residencyd.kernel.page_cache import cachestat, mincore, sample
become()
file = os.open(sys.argv[1], os.O_RDONLY)
try:
    cachestat(file)
    refused = ""
except NotOwner as error:
    refused = error.reason
try:
    mincore(file, length=1)
except NotOwner as error:
    refused += "," + error.reason
print(json.dumps([refused, sample(file, length=os.fstat(file).st_size).cached_bytes]))
"""


@pytest.mark.usefixtures("as_root")
def test_a_stranger_is_refused_and_may_sample(half_cached: Path) -> None:
    refused, estimate = run_as(NOBODY, BY_A_STRANGER, str(half_cached))
    assert refused == "not_owner,not_owner"
    assert abs(estimate - 8 * MIB) <= MIB


@pytest.mark.usefixtures("as_root")
def test_on_overlayfs_only_mincore_tells_the_truth(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("lower", "upper", "work", "merged")}
    for folder in folders.values():
        folder.mkdir()
    below = filled(folders["lower"] / "weights", 4 * MIB)
    options = "lowerdir={lower},upperdir={upper},workdir={work}".format(**folders)
    done = subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, folders["merged"]], check=False)
    if done.returncode:
        pytest.skip("overlayfs cannot be mounted here")
    try:
        with below.open("rb") as file:
            os.posix_fadvise(file.fileno(), MIB, 3 * MIB, os.POSIX_FADV_DONTNEED)
        with (folders["merged"] / "weights").open("rb") as file:
            with pytest.raises(NotSupported):
                cachestat(file.fileno(), file_system="overlay")
            assert mincore(file.fileno(), length=4 * MIB) == fincore(below) == MIB
    finally:
        subprocess.run(["umount", folders["merged"]], check=True)


def test_overlay_files_are_not_asked_about(half_cached: Path) -> None:
    with half_cached.open("rb") as file, pytest.raises(NotSupported, match="overlay"):
        cachestat(file.fileno(), file_system="overlay")


@pytest.mark.parametrize(("number", "error"), [(1, NotOwner), (38, NotSupported), (95, NotSupported)])
def test_refusals_are_typed(monkeypatch: pytest.MonkeyPatch, number: int, error: type) -> None:
    def refuse(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(syscalls, "cachestat", refuse)
    with pytest.raises(error) as caught:
        cachestat(0)
    assert caught.value.errno == number


def test_a_file_that_cannot_be_sampled_is_told_so() -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(NotSupported):
            sample(reader, length=PAGE)
    finally:
        os.close(reader)
        os.close(writer)
