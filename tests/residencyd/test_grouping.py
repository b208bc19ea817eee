import os
from pathlib import Path

import pytest
from sojourn.residencyd.claims import Tier
from sojourn.residencyd.errors import Sandboxed
from sojourn.residencyd.grouping import ProcessGroups, group, read_groups
from sojourn.residencyd.kernel.errors import ProcessGone
from sojourn.residencyd.kernel.maps import read_maps
from sojourn.residencyd.kernel.mounts import read_mounts
from sojourn.residencyd.kernel.pages import PageCounts

from tests.residencyd.children import MIB, child, filled, smaps


def by_name(found: ProcessGroups) -> dict[str, object]:
    return {made.name: made for made in found.groups}


def at_rest(pid: int) -> tuple[ProcessGroups, dict[str, int]]:
    """Groups and smaps of a process that touched no page in between: the child goes on to wait for its next word."""
    for _ in range(20):
        before, found, after = smaps(pid, 0, 1 << 64), read_groups(pid), smaps(pid, 0, 1 << 64)
        if before == after:
            return found, after
    raise AssertionError("the child does not come to rest")


def test_any_process_by_mapped_file_adds_up_to_its_rss(tmp_path: Path) -> None:
    path = filled(tmp_path / "weights", 4 * MIB)
    source = "f = os.open(path, os.O_RDONLY); a = map_(2 << 20, R | W, PRIVATE, f); b = map_(2 << 20, R, SHARED, f); "
    source += "read(a, 2 << 20); write(a, 8192); read(b, 1 << 20); say()"
    with child(source, path=str(path)) as it:
        found, whole = at_rest(it.pid)
        weights = by_name(found)[str(path)]
        assert (weights.mappings, weights.mapped_bytes, weights.resident_bytes) == (2, 4 * MIB, 3 * MIB)
        assert (weights.tier, weights.written_bytes, weights.deleted) == (Tier.HOST_MAPPED, 8192, False)
        assert sum(made.resident_bytes for made in found.groups) == whole["Rss"] == found.rss_bytes
        assert found.groups[0].resident_bytes == max(made.resident_bytes for made in found.groups)


def test_deleted_is_told_by_inode_not_by_name(tmp_path: Path) -> None:
    gone, live = filled(tmp_path / "gone", MIB), filled(tmp_path / "live (deleted)", MIB)
    source = "for path in paths: map_(1 << 20, R, PRIVATE, os.open(path, os.O_RDONLY))\nos.unlink(paths[0]); say()"
    with child(source, paths=[str(gone), str(live)]) as it:
        found = by_name(read_groups(it.pid))
        assert found[f"{gone} (deleted)"].deleted
        assert not found[str(live)].deleted


def test_a_process_with_a_driver_has_its_shared_anonymous_memory_pinned(captures: Path) -> None:
    proc = captures / "proc"
    counted = [(m, PageCounts()) for m in read_maps(4712, proc=proc)]
    tiers = {made.name: made.tier for made in group(counted, read_mounts(4712, proc=proc))}
    assert tiers["/dev/zero (deleted)"] is Tier.HOST_PINNED
    assert tiers["/dev/nvidia-uvm"] is tiers["/dev/nvidiactl"] is Tier.HOST_PINNED
    assert tiers["[anon:cuda]"] is Tier.HOST_PINNED
    assert tiers["/memfd:sojourn-pinned (deleted)"] is Tier.HOST_PINNED
    assert tiers["/dev/shm/x"] is Tier.HOST_PAGEABLE
    assert tiers["/models/dit.safetensors"] is Tier.HOST_MAPPED
    assert tiers["[stack]"] is tiers["[anonymous]"] is Tier.HOST_PAGEABLE


def test_shared_anonymous_memory_of_any_other_process_is_pageable(captures: Path) -> None:
    proc = captures / "proc"
    counted = [(m, PageCounts()) for m in read_maps(4711, proc=proc)]
    tiers = {made.name: made.tier for made in group(counted, read_mounts(4711, proc=proc))}
    assert tiers["/dev/zero (deleted)"] is Tier.HOST_PAGEABLE


def test_a_sandbox_and_a_missing_process_are_told_so(captures: Path) -> None:
    with pytest.raises(Sandboxed):
        read_groups(4713, proc=captures / "proc")
    with pytest.raises(ProcessGone):
        read_groups(1, proc=captures / "proc")


def test_this_process() -> None:
    assert read_groups(os.getpid()).rss_bytes > MIB
