import os
from pathlib import Path

import pytest
from sojourn.residencyd.kernel.errors import NotDumpable, OtherUser, ParseFailed, PidReused, ProcessGone
from sojourn.residencyd.kernel.maps import read_maps
from sojourn.residencyd.kernel.process import (
    asked,
    children,
    parse_stat,
    parse_status,
    read_stat,
    read_status,
    require_same_process,
)

from tests.residencyd.children import NOBODY, SOMEBODY, child, run_as, wait_for


def test_identity_and_counters(captures: Path) -> None:
    stat = read_stat(4711, proc=captures / "proc")
    assert (stat.pid, stat.name, stat.state, stat.parent) == (4711, "python3", "R", 12694)
    assert (stat.minor_faults, stat.major_faults, stat.start_ticks) == (951, 5, 123718)
    assert not stat.ended


def test_a_command_may_be_called_anything(captures: Path) -> None:
    stat = read_stat(4714, proc=captures / "proc")
    assert (stat.name, stat.state, stat.start_ticks) == (") Z (1", "S", 123718)


@pytest.mark.parametrize("text", [b"", b"1 (x", b"1 (x) R", b"1 (x) R 1 2 3", b"x (x) R " + b"1 " * 40])
def test_a_cut_stat_is_refused(text: bytes) -> None:
    with pytest.raises(ParseFailed):
        parse_stat(text)


def test_totals(captures: Path) -> None:
    status = read_status(4711, proc=captures / "proc")
    assert status.uids == (0, 0, 0, 0)
    assert status.groups == ()
    assert status.rss_anonymous_bytes == 3200 * 1024
    assert status.rss_file_bytes == 6420 * 1024
    assert status.rss_shared_bytes == 20 * 1024
    assert status.rss_bytes == 9640 * 1024


def test_fields_without_a_value_or_missing_are_absent_and_harm_no_other(captures: Path) -> None:
    status = read_status(4714, proc=captures / "proc")
    assert status.locked_bytes == status.rss_anonymous_bytes == status.effective_capabilities == 0
    assert status.rss_file_bytes == 6420 * 1024
    assert status.uids == (1000, 1000, 1000, 1000)


def test_a_field_that_is_no_number_is_refused() -> None:
    with pytest.raises(ParseFailed):
        parse_status(b"RssFile:\tmany kB\n")


def test_a_reused_id_is_another_process(captures: Path) -> None:
    proc = captures / "proc"
    assert require_same_process(4711, 123718, proc=proc).pid == 4711
    with pytest.raises(PidReused, match="123718"):
        require_same_process(4711, 99, proc=proc)
    with pytest.raises(ProcessGone):
        require_same_process(1, 99, proc=proc)


def test_a_zombie_is_gone() -> None:
    with child("say()") as it:
        start = read_stat(it.pid).start_ticks
        assert require_same_process(it.pid, start)
        it.process.kill()
        os.waitid(os.P_PID, it.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessGone):
            require_same_process(it.pid, start)


def test_children_are_found_to_the_last_generation() -> None:
    tree = """
first = os.fork()
second = first or os.fork()
if not second: os.read(os.pipe()[0], 1)
if not first: os.wait()
"""
    with child("say()") as it:
        it.do(tree)
        found = wait_for(lambda: children(it.pid), lambda pids: len(pids) == 2)
        assert it.pid in children(os.getpid())
        for pid in found:
            os.kill(pid, 9)


READ_MAPS = """
import json, sys
from sojourn.residencyd.kernel.errors import KernelError
from sojourn.residencyd.kernel.maps import read_maps
become()
try:
    print(json.dumps(len(read_maps(int(sys.argv[1])))))
except KernelError as error:
    print(json.dumps([error.reason, str(error)]))
"""


@pytest.mark.usefixtures("as_root")
def test_another_user_is_told_so_and_what_to_change() -> None:
    with child("say()", uid=NOBODY) as it:
        reason, message = run_as(SOMEBODY, READ_MAPS, str(it.pid))
        assert reason == "other_uid"
        assert "65534" in message
        assert "runAsUser" in message
        assert run_as(NOBODY, READ_MAPS, str(it.pid)) > 10


@pytest.mark.usefixtures("as_root")
def test_a_process_that_switched_user_without_an_exec_is_told_apart() -> None:
    with child("say()", uid=NOBODY, dumpable=False) as it:
        reason, message = run_as(NOBODY, READ_MAPS, str(it.pid))
        assert reason == "not_dumpable"
        assert "start it as this user" in message


def test_a_refusal_without_a_status_means_gone(tmp_path: Path) -> None:
    def refuse() -> None:
        raise PermissionError

    with pytest.raises(ProcessGone):
        asked(1, refuse, proc=tmp_path)


def test_an_unreadable_tree_names_the_user_at_fault(captures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "no", str(path))

    monkeypatch.setattr("sojourn.residencyd.kernel.maps.read_bytes", refuse)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(OtherUser):
        read_maps(4711, proc=captures / "proc")
    with pytest.raises(NotDumpable):
        read_maps(4714, proc=captures / "proc")
