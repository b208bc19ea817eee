import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sojourn.residencyd import reading
from sojourn.residencyd.kernel import maps, pages, process
from sojourn.residencyd.kernel.errors import NotSupported
from sojourn.residencyd.scanner import Scanner
from sojourn.residencyd.settings import Settings
from sojourn.residencyd.snapshots import ProcessReading, Snapshot

from tests.residencyd.children import GIB, MIB, NOBODY, SOMEBODY, Child, child, filled, run_as
from tests.residencyd.published import MAPPED, PAGEABLE, component, message, publish, sealed, storage

MEMORY = "a = map_(4 << 20); write(a, 1 << 20); say(address=a)"


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Child]:
    """A process that has published its map."""
    with child(MEMORY) as made:
        publish(tmp_path, made.pid, dit(made))
        yield made


def dit(it: Child, **more: object) -> object:
    return component("dit", storage(it["address"], 4 * MIB, PAGEABLE), **more)


def scanner(folder: Path, **more: object) -> Scanner:
    return Scanner(Settings(map_pattern=str(folder), **({"floor_seconds": 0.0, "deep_share": 1e9} | more)))


def look(folder: Path, **more: object) -> Snapshot:
    return scanner(folder, **more).snapshot(1.0)


def blind(snapshot: Snapshot) -> ProcessReading:
    """The one process, which must be blind, and without a single byte."""
    (found,) = snapshot.processes
    assert found.blind_reason
    assert found.components == ()
    assert found.unattributed is None
    assert snapshot.headroom is None
    return found


def test_a_place_without_a_map_is_blind_and_says_where(tmp_path: Path) -> None:
    for pattern in (tmp_path, tmp_path / "model.pb", tmp_path / "*.pb", tmp_path / "nowhere"):
        found = blind(look(pattern))
        assert found.blind_reason == "no_map"
        assert str(tmp_path) in found.blind_message


def test_a_torn_map_an_older_schema_and_recovery(tmp_path: Path, it: Child) -> None:
    watcher = scanner(tmp_path)
    path = tmp_path / "model.pb"
    whole = path.read_bytes()
    assert watcher.snapshot(1).seen
    path.write_bytes(whole[: len(whole) // 2])
    assert blind(watcher.snapshot(2)).blind_reason == "map_torn"
    path.write_bytes(sealed(message(it.pid, [dit(it)], schema_version=0)))
    assert blind(watcher.snapshot(3)).blind_reason == "map_schema"
    path.unlink()
    assert blind(watcher.snapshot(4)).blind_reason == "no_map"
    path.write_bytes(whole)
    assert watcher.snapshot(5).seen
    assert watcher.errors["map"] == 3


def test_a_process_that_ended_and_the_next_one(tmp_path: Path) -> None:
    watcher = scanner(tmp_path)
    with child(MEMORY) as first:
        publish(tmp_path, first.pid, dit(first))
        assert watcher.snapshot(1).seen
        first.process.kill()
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
        assert blind(watcher.snapshot(2)).blind_reason == "gone"  # a zombie yet
    assert blind(watcher.snapshot(3)).blind_reason == "gone"
    with child(MEMORY) as second:
        publish(tmp_path, second.pid, dit(second), generation=2)
        assert watcher.snapshot(4).seen


def test_a_reused_pid_is_another_process(tmp_path: Path, it: Child) -> None:
    publish(tmp_path, it.pid, dit(it), start_ticks=7)
    assert blind(look(tmp_path)).blind_reason == "pid_reused"


@pytest.mark.parametrize(
    ("module", "name"), [(reading, "look_up"), (reading, "look_deep"), (reading, "read_target_groups")]
)
def test_a_target_killed_in_the_middle_of_a_scan(
    tmp_path: Path, it: Child, monkeypatch: pytest.MonkeyPatch, module: object, name: str
) -> None:
    original: Callable[..., object] = getattr(module, name)

    def kill_first(*arguments: object, **more: object) -> object:
        it.process.kill()
        it.process.wait()
        return original(*arguments, **more)

    monkeypatch.setattr(module, name, kill_first)
    assert blind(look(tmp_path)).blind_reason == "gone"


def test_a_target_killed_between_opening_its_pages_and_counting_them(
    tmp_path: Path, it: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = pages.PageTable.count_all

    def kill_first(self: pages.PageTable, *arguments: object) -> list[pages.PageCounts]:
        it.process.kill()
        it.process.wait()
        return original(self, *arguments)

    monkeypatch.setattr(pages.PageTable, "count_all", kill_first)
    assert blind(look(tmp_path)).blind_reason == "gone"


def test_a_pid_reused_in_the_middle_of_a_scan(tmp_path: Path, it: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    original, answers = process.read_stat, []

    def another_at_last(pid: int, *, proc: Path) -> process.Stat:
        stat = original(pid, proc=proc)
        answers.append(stat)
        ticks = stat.start_ticks + (len(answers) > 1)
        return process.Stat(**{**stat.__dict__, "start_ticks": ticks})

    monkeypatch.setattr(process, "read_stat", another_at_last)
    assert blind(look(tmp_path)).blind_reason == "pid_reused"
    assert len(answers) == 2


SCAN = """
import json, sys
from sojourn.residencyd.scanner import Scanner
from sojourn.residencyd.settings import Settings
from sojourn.residencyd import server, collector, cli
become()
snapshot = Scanner(Settings(map_pattern=sys.argv[1], floor_seconds=0)).snapshot(1.0)
print(json.dumps([[r.pid, r.blind_reason, r.blind_message, sum(p.resident_bytes for p in r.components)]
                  for r in snapshot.processes]))
"""


@pytest.mark.usefixtures("as_root")
def test_one_that_cannot_be_read_hides_no_other(open_path: Path) -> None:
    with (
        child(MEMORY, uid=NOBODY) as good,
        child(MEMORY, uid=SOMEBODY) as foreign,
        child(MEMORY, uid=NOBODY, dumpable=False) as dropped,
    ):
        for name, each in (("1.pb", good), ("2.pb", foreign), ("3.pb", dropped)):
            publish(open_path, each.pid, dit(each), name=name)
            (open_path / name).chmod(0o644)
        readings = run_as(NOBODY, SCAN, str(open_path))
        assert [(pid, reason, size) for pid, reason, _, size in readings] == [
            (good.pid, "", MIB),
            (foreign.pid, "other_uid", 0),
            (dropped.pid, "not_dumpable", 0),
        ]
        assert "runAsUser" in readings[1][2]


def test_the_interval_floor_answers_from_the_last_look(tmp_path: Path, it: Child) -> None:
    seen: list[Snapshot] = []
    watcher = scanner(tmp_path, floor_seconds=5.0)
    watcher.on_scan = seen.append
    first = watcher.snapshot(100.0)
    assert watcher.snapshot(104.9) is first
    assert watcher.snapshot(105.0) is not first
    assert watcher.snapshot(50.0) is not first, "a clock set back must not silence it"
    assert len(seen) == 3


def test_counting_pages_keeps_to_its_share_of_time(tmp_path: Path, it: Child) -> None:
    ticks = iter(range(1000))
    # Every reading of the clock is a second later, so each deep look takes a second; a tenth of the time may go.
    watcher = Scanner(
        Settings(map_pattern=str(tmp_path), floor_seconds=0, deep_share=0.1), cpu_timer=lambda: float(next(ticks))
    )

    def resident_at(now: float) -> tuple[int, float]:
        (found,) = watcher.snapshot(now).processes
        return found.components[0].resident_bytes, found.deep_seconds

    assert resident_at(100) == (MIB, 100)
    it.do(f"write({it['address']}, 2 << 20)")
    assert resident_at(109) == (MIB, 100), "carried over"
    assert resident_at(110) == (2 * MIB, 110)
    publish(
        tmp_path,
        it.pid,
        component("dit", storage(it["address"], 2 * MIB, PAGEABLE)),
        component("vae", storage(it["address"] + 2 * MIB, 2 * MIB, PAGEABLE)),
        generation=2,
    )
    assert resident_at(111) == (2 * MIB, 111), "new ranges do not wait"


def test_a_page_written_behind_the_kernels_back_is_found_within_ten_looks(tmp_path: Path) -> None:
    path = filled(tmp_path / "weights", 4 * MIB)
    source = "f = os.open(path, os.O_RDONLY); a = map_(4 << 20, R, PRIVATE, f); read(a, 4 << 20); say(address=a)"
    with child(source, path=str(path)) as it:
        publish(tmp_path, it.pid, component("dit", storage(it["address"], 4 * MIB, MAPPED, file=path)))
        watcher = scanner(tmp_path)

        def written(now: int) -> tuple[int, int]:
            part = watcher.snapshot(now).processes[0].components[0]
            return part.resident_bytes, part.disagreements["other_tier"]

        assert written(0) == (4 * MIB, 0)
        rights = "libc.mprotect(ctypes.c_void_p({a}), ctypes.c_size_t(4 << 20), {rights})"
        it.do(rights.format(a=it["address"], rights=3) + f"; write({it['address']}, 8192)")
        assert written(1) == (4 * MIB, 8192), "a mapping that may be written to is always asked"
        publish(tmp_path, it.pid, component("vae", storage(it["address"] + MIB, MIB, MAPPED)), generation=2)
        assert written(2) == (MIB, 0)
        it.do(rights.format(a=it["address"], rights=3) + f"; write({it['address']} + (1 << 20), 8192)")
        it.do(rights.format(a=it["address"], rights=1))
        seen = [written(now) for now in range(3, 13)]
        assert {size for size, _ in seen} == {MIB}, "what is in memory is always right"
        assert seen[-1] == (MIB, 8192)


def test_another_mapping_at_the_same_address_is_counted_anew(tmp_path: Path, it: Child) -> None:
    watcher = scanner(tmp_path, deep_share=1e-9)
    assert watcher.snapshot(1).processes[0].components[0].resident_bytes == MIB
    it.do(f"libc.mprotect(ctypes.c_void_p({it['address']}), ctypes.c_size_t(4 << 20), 1)")
    it.do(f"libc.madvise({it['address']}, 4 << 20, 4)")
    assert watcher.snapshot(2).processes[0].components[0].resident_bytes == 0


def test_a_map_is_parsed_once(tmp_path: Path, it: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[Path] = []
    original = __import__("sojourn.residencyd.map_shelf", fromlist=["x"])

    def count(path: Path) -> object:
        parsed.append(path)
        return real(path)

    real = original.read_map
    monkeypatch.setattr(original, "read_map", count)
    watcher = scanner(tmp_path)
    for now in range(3):
        assert watcher.snapshot(now).seen
    assert len(parsed) == 1
    publish(tmp_path, it.pid, dit(it), generation=2)
    assert watcher.snapshot(9).processes[0].claim.generation == 2
    assert len(parsed) == 2


@pytest.mark.parametrize("older", ["queries", "scan", "both"])
def test_an_older_kernel_says_the_same(tmp_path: Path, it: Child, monkeypatch: pytest.MonkeyPatch, older: str) -> None:
    whole = look(tmp_path).processes[0]

    def refuse(*_: object, **__: object) -> None:
        raise NotSupported("x", why="older")

    if older in ("queries", "both"):
        monkeypatch.setattr(maps.MapsQuery, "__init__", refuse)
    if older in ("scan", "both"):
        monkeypatch.setattr(pages.PageTable, "_scan", refuse)
    again = look(tmp_path).processes[0]
    assert again.components == whole.components
    assert again.mappings == whole.mappings


def test_many_ranges_are_looked_up_in_the_text(tmp_path: Path, it: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = look(tmp_path).processes[0]
    monkeypatch.setattr(reading, "QUERY_RANGES_LIMIT", 0)
    assert look(tmp_path).processes[0].components == whole.components


def test_what_is_forgotten_with_a_process(tmp_path: Path) -> None:
    watcher = scanner(tmp_path)
    with child(MEMORY) as it:
        publish(tmp_path, it.pid, dit(it))
        watcher.snapshot(1)
        assert len(watcher._memories) == 1
    watcher.snapshot(2)
    assert watcher._memories == {}


def test_need_and_cold_come_from_the_map(tmp_path: Path) -> None:
    path = filled(tmp_path / "weights", 4 * MIB)
    source = "f = os.open(path, os.O_RDONLY); a = map_(4 << 20, R, PRIVATE, f); read(a, 4 << 20); say(address=a)"
    with child(source, path=str(path)) as it:

        def headroom(**use: bool) -> tuple[int, int]:
            made = component("dit", storage(it["address"], 4 * MIB, MAPPED, file=path), **use)
            publish(tmp_path, it.pid, made, next_stage_need_bytes=3 * GIB)
            found = look(tmp_path).headroom
            assert found
            assert found.room_bytes > 0
            return found.cold_bytes, found.need_bytes

        assert headroom() == (4 * MIB, 3 * GIB)
        assert headroom(needed_now=True) == (0, 3 * GIB)
        assert headroom(needed_next=True) == (0, 3 * GIB)


def test_the_room_is_that_of_the_groups_that_the_process_sees(
    tmp_path: Path, captures: Path, it: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = captures / "cgroup" / "v2-container"
    found = look(tmp_path, cgroup_root=mount).tightest
    assert found
    assert found.limit_bytes == 16 * GIB
    monkeypatch.setattr(reading, "CGROUP_ROOT", Path("/") / mount.absolute().relative_to("/"))
    own = look(tmp_path).tightest
    assert own
    assert own.limit_bytes == 16 * GIB
    assert str(own.path).startswith(f"/proc/{it.pid}/root/")


def test_missing_cgroup_files_hide_nothing_else(tmp_path: Path, it: Child) -> None:
    snapshot = look(tmp_path, cgroup_root=tmp_path / "nowhere")
    assert snapshot.seen
    assert snapshot.tightest is None
    assert snapshot.headroom
    assert snapshot.headroom.room_bytes > 0


def fake_proc(tmp_path: Path, captures: Path, pid: int = 4711) -> Path:
    proc = tmp_path / "proc"
    shutil.copytree(captures / "proc", proc)
    return proc


def test_a_captured_process_in_an_injected_root(tmp_path: Path, captures: Path) -> None:
    proc = fake_proc(tmp_path, captures)
    with (proc / "4711" / "pagemap").open("wb") as file:
        file.seek(0x7FBC49EB1000 // 4096 * 8)
        file.write((captures / "dit.pagemap").read_bytes())
    weights = storage(0x7FBC49EB1000, MIB, MAPPED, device_major=254, inode=16187395)
    claim = message(4711, [component("dit", weights)], start_ticks=123718)
    (tmp_path / "model.pb").write_bytes(sealed(claim))
    snapshot = look(tmp_path, proc=proc, cgroup_root=captures / "cgroup" / "v1")
    (found,) = snapshot.seen
    assert found.components[0].disagreements == {"not_mapped": 0, "other_tier": 4096, "other_file": 0}
    assert found.components[0].resident_bytes > 4096
    assert snapshot.tightest
    assert (snapshot.tightest.path.name, snapshot.tightest.room_bytes) == ("pod11", 6 * GIB)
    assert snapshot.memory
    assert set(snapshot.pressure) == {"cpu", "io", "memory"}
    assert snapshot.sources["files"], "the checkpoint is not there"
    assert not snapshot.sources["process"]


def test_a_sandbox_cannot_be_told_apart(tmp_path: Path, captures: Path) -> None:
    proc = fake_proc(tmp_path, captures)
    ranges = storage(0x7E0000000000, MIB, MAPPED)
    (tmp_path / "model.pb").write_bytes(sealed(message(4713, [component("dit", ranges)], start_ticks=123718)))
    found = blind(look(tmp_path, proc=proc))
    assert found.blind_reason == "sandboxed"
    assert "sandbox" in found.blind_message


def test_within_a_sandbox_nothing_can_be_told_either(tmp_path: Path, captures: Path) -> None:
    proc = fake_proc(tmp_path, captures)
    (proc / "version").write_text("Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016\n")
    (tmp_path / "model.pb").write_bytes(sealed(message(4711, [], start_ticks=123718)))
    assert blind(look(tmp_path, proc=proc)).blind_reason == "sandboxed"


def test_each_broken_source_is_named_and_hides_no_other(tmp_path: Path, captures: Path) -> None:
    proc = fake_proc(tmp_path, captures)
    (tmp_path / "model.pb").write_bytes(sealed(message(4711, [], start_ticks=123718)))
    (proc / "4711" / "pagemap").touch()
    for name in ("meminfo", "4711/cgroup", "4711/mountinfo", "pressure/io"):
        (proc / name).write_text("nonsense\n")
    watcher = scanner(tmp_path, proc=proc, cgroup_root=captures / "cgroup" / "v2")
    snapshot = watcher.snapshot(1)
    assert snapshot.seen
    assert snapshot.memory is None
    assert snapshot.headroom is None
    assert {name for name, why in snapshot.sources.items() if why} == {"meminfo", "process", "pressure"}
    assert watcher.errors == dict.fromkeys(watcher.errors, 0) | {"meminfo": 1, "process": 1, "pressure": 1}


def test_a_machine_without_psi_has_no_error(tmp_path: Path, captures: Path) -> None:
    proc = fake_proc(tmp_path, captures)
    shutil.rmtree(proc / "pressure")
    watcher = scanner(tmp_path, proc=proc)
    assert watcher.snapshot(1).sources["pressure"]
    assert watcher.errors["pressure"] == 0


def test_a_malformed_process_is_blind(tmp_path: Path, captures: Path) -> None:
    proc = fake_proc(tmp_path, captures)
    (proc / "4711" / "maps").write_text("nonsense\n")
    ranges = storage(0x7FBC49EB1000, MIB, MAPPED)
    (tmp_path / "model.pb").write_bytes(sealed(message(4711, [component("dit", ranges)], start_ticks=123718)))
    assert blind(look(tmp_path, proc=proc)).blind_reason == "unreadable"


def test_a_daemon_finds_a_containers_process_by_start_and_inner_pid(tmp_path: Path, captures: Path) -> None:
    proc = fake_proc(tmp_path, captures)
    status = proc / "4711" / "status"
    status.write_text(status.read_text().replace("NSpid:\t4711", "NSpid:\t4711\t1"))
    (proc / "4711" / "pagemap").touch()
    (tmp_path / "model.pb").write_bytes(sealed(message(1, [], start_ticks=123718)))
    assert blind(look(tmp_path, proc=proc)).blind_reason == "gone"
    (found,) = look(tmp_path, proc=proc, host_pids=True).seen
    assert found.pid == 4711
    (tmp_path / "model.pb").write_bytes(sealed(message(2, [], start_ticks=123718)))
    assert blind(look(tmp_path, proc=proc, host_pids=True)).blind_reason == "gone"


@pytest.mark.parametrize("pattern", ["", "/map.pb", "/*.pb", "/below/map.pb"])
def test_a_map_in_a_folder_that_may_not_be_entered_is_told_and_fails_no_look(pattern: str) -> None:
    """As another user than the model's, whose volume is closed to it."""
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    source = """
import json, sys
from sojourn.residencyd.scanner import Scanner
from sojourn.residencyd.settings import Settings
become()
print(json.dumps(Scanner(Settings(map_pattern=sys.argv[1])).snapshot(1.0).processes[0].blind_reason))
"""
    with tempfile.TemporaryDirectory() as closed:
        assert run_as(NOBODY, source, closed + pattern) == "other_uid"
