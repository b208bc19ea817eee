"""Page-out does what it is said to do, in every trap that the kernel sets, and what stays has its reason."""

import ctypes
import mmap
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn.inference.offload.advice import page_out_verified, plan_cold
from sojourn.inference.offload.observer import Stuck
from sojourn.inference.offload.spans import Span, size_of
from sojourn.residencyd.kernel.process_io import read_io

from tests.inference.offload.capped import MIB, Child

PAGE = os.sysconf("SC_PAGESIZE")
NOBODY = 65534
# The largest folio of a page cache on x86-64.
FOLIO = 2 * MIB


@given(pages=st.lists(st.integers(1, 30), max_size=10), room=st.one_of(st.none(), st.integers(0, 400 * PAGE)))
def test_what_stays_fits_the_room_and_no_page_more_goes(pages, room):
    spans, at = [], PAGE
    for count in pages:
        spans.append(Span(at, at + count * PAGE))
        at += (count + 1) * PAGE
    plan = plan_cold(spans, room_bytes=room)
    assert size_of(plan.page_out) + size_of(plan.cold) == size_of(spans)
    if room is None:
        assert plan.page_out == ()
    else:
        assert size_of(plan.cold) <= room
        assert not plan.page_out or size_of(plan.cold) + PAGE > room


def test_no_room_pages_everything_out_and_none_pressing_nothing():
    spans = [Span(PAGE, 9 * PAGE)]
    assert plan_cold(spans, room_bytes=0).page_out == tuple(spans)
    assert plan_cold(spans, room_bytes=None).cold == tuple(spans)


class MappedFile:
    """A file, mapped and touched."""

    def __init__(self, path: Path, size: int, *, write=True) -> None:
        if write:
            with path.open("wb") as file:
                file.write(os.urandom(size))
                file.flush()
                os.fsync(file.fileno())
        self.path = path
        self.size = size
        with path.open("rb") as file:
            self.map = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
        self.array = np.frombuffer(self.map, dtype=np.uint8)
        self.address = self.array.ctypes.data
        self.touch()

    @property
    def span(self):
        return Span(self.address, self.address + self.size)

    def touch(self):
        return int(self.array[:: PAGE // 2].sum())


@pytest.fixture
def mapped(tmp_path):
    return MappedFile(tmp_path / "weights", 16 * MIB)


def reasons(outcome):
    return {reason: size for reason, size in outcome.stuck.items() if size}


def test_ones_own_file_goes_and_is_verified(mapped):
    outcome = page_out_verified([mapped.span])
    assert (outcome.requested_bytes, outcome.verified_bytes) == (16 * MIB, 16 * MIB)
    assert reasons(outcome) == {}
    assert outcome.reason is None


def test_what_is_out_already_is_not_asked_for_again(mapped):
    page_out_verified([mapped.span])
    assert page_out_verified([mapped.span]).requested_bytes == 0


def test_only_what_is_given_goes(mapped):
    part = Span(mapped.address + 4 * MIB + 17, mapped.address + 8 * MIB + 17)
    outcome = page_out_verified([part])
    assert outcome.requested_bytes == outcome.verified_bytes == 4 * MIB - PAGE
    before = read_io().read_bytes
    mapped.touch()
    assert read_io().read_bytes - before <= 4 * MIB, "all around it is in memory still"


def test_what_a_component_in_use_needs_too_stays(mapped):
    held = Span(mapped.address + 4 * MIB, mapped.address + 8 * MIB)
    outcome = page_out_verified([mapped.span], in_use=[held])
    assert outcome.verified_bytes == 12 * MIB
    assert reasons(outcome) == {Stuck.IN_USE: 4 * MIB}


def test_pages_mapped_by_another_process_stay_and_are_said_to_be_shared(mapped):
    source = """
import mmap, sys
f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
sum(m[i] for i in range(0, len(m) // 2, 4096))
print('{}', flush=True); sys.stdin.readline()
"""
    with Child(source, None, str(mapped.path)) as child:
        child.hear()
        outcome = page_out_verified([mapped.span])
    shared = outcome.stuck[Stuck.SHARED]
    assert outcome.requested_bytes == 16 * MIB
    assert outcome.verified_bytes + shared == 16 * MIB
    # A page fault maps the neighbours that are in the cache, so a little more than the half that was touched.
    assert 8 * MIB <= shared <= 9 * MIB
    assert outcome.reason is Stuck.SHARED
    assert page_out_verified([mapped.span]).verified_bytes == shared, "it works once the other process has ended"


def test_a_deleted_file_goes_all_the_same(mapped):
    mapped.path.unlink()
    outcome = page_out_verified([mapped.span])
    assert outcome.verified_bytes == 16 * MIB


def test_a_locked_part_stays_and_is_said_to_be_locked(mapped):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mlock.argtypes = libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    if libc.mlock(mapped.address + 4 * MIB, MIB):
        pytest.skip("locked memory is limited to less than 1 MiB here: raise RLIMIT_MEMLOCK")
    outcome = page_out_verified([mapped.span])
    libc.munlock(mapped.address + 4 * MIB, MIB)
    assert reasons(outcome) == {Stuck.LOCKED: MIB}
    assert outcome.requested_bytes == outcome.verified_bytes + MIB
    # To take a part of a folio the kernel splits it, and unmaps the neighbours on the way: they are not counted.
    assert 15 * MIB - FOLIO <= outcome.verified_bytes <= 15 * MIB


def test_anonymous_memory_without_swap_stays_for_no_named_reason():
    with open("/proc/swaps") as file:
        if len(file.readlines()) > 1:
            pytest.skip("there is swap: anonymous memory can go")
    array = np.ones(4 * MIB, dtype=np.uint8)
    outcome = page_out_verified([Span(array.ctypes.data, array.ctypes.data + array.nbytes)])
    assert outcome.verified_bytes == 0
    assert outcome.reason is Stuck.OTHER


AS_ANOTHER_USER = """
import ctypes, json, mmap, os, sys
import numpy as np
from sojourn.inference.offload.advice import page_out_verified
from sojourn.inference.offload.spans import Span
# Another user may not read the interpreter's files, so everything is imported by now. Who changes user hides its
# memory even from itself until it says otherwise (PR_SET_DUMPABLE).
os.setgroups([]); os.setgid(65534); os.setuid(65534); ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
f = open(sys.argv[1], 'rb')
m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
a = np.frombuffer(m, dtype=np.uint8)
int(a[::4096].sum())
o = page_out_verified([Span(a.ctypes.data, a.ctypes.data + a.nbytes)])
print(json.dumps(dict(requested=o.requested_bytes, verified=o.verified_bytes, reason=o.reason and o.reason.value)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user: run the tests as root")
@pytest.mark.parametrize("owner", ["root", "nobody"])
def test_a_file_of_another_user_stays_and_is_said_to_be_not_ones_own(owner):
    # The folders of pytest are closed to other users.
    path = Path("/var/tmp") / f"sojourn-other-user-{os.getpid()}"
    try:
        with path.open("wb") as file:
            file.write(os.urandom(8 * MIB))
            file.flush()
            os.fsync(file.fileno())
        path.chmod(0o444)
        if owner == "nobody":
            os.chown(path, NOBODY, NOBODY)
        with Child(AS_ANOTHER_USER, None, str(path)) as child:
            answer = child.hear()
    finally:
        path.unlink()
    went = owner == "nobody"
    assert answer == {
        "requested": 8 * MIB, "verified": 8 * MIB if went else 0, "reason": None if went else "not_owner",
    }  # fmt: skip


def test_a_file_of_an_overlay_goes_and_is_verified(tmp_path):
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    (tmp_path / "lower" / "weights").write_bytes(os.urandom(8 * MIB))
    with (tmp_path / "lower" / "weights").open("rb") as file:
        os.fsync(file.fileno())
    options = ",".join(f"{key}dir={tmp_path / key}" for key in ("lower", "upper", "work"))
    mounted = subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", options, str(tmp_path / "merged")], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(
            f"no overlay can be mounted here ({mounted.stderr.strip()}): run as root with overlayfs in the kernel"
        )
    try:
        mapped = MappedFile(tmp_path / "merged" / "weights", 8 * MIB, write=False)
        outcome = page_out_verified([mapped.span])
        assert (outcome.requested_bytes, outcome.verified_bytes) == (8 * MIB, 8 * MIB)
        del mapped
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "merged")], check=True)


def test_a_part_of_a_huge_folio_goes_alone(tmp_path):
    """Read in by large read-ahead, a file lies in folios of many pages; a part of one must go without the rest."""
    mapped = MappedFile(tmp_path / "weights", 32 * MIB)
    page_out_verified([mapped.span])
    os.posix_fadvise(os.open(mapped.path, os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped.map.madvise(mmap.MADV_SEQUENTIAL)
    mapped.touch()
    part = Span(mapped.address + 5 * PAGE, mapped.address + 1001 * PAGE)
    outcome = page_out_verified([part])
    assert outcome.requested_bytes == outcome.verified_bytes == 996 * PAGE
    before = read_io().read_bytes
    mapped.touch()
    assert read_io().read_bytes - before <= 996 * PAGE + FOLIO, "the rest of the folios stayed in memory"
