import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from sojourn.residencyd import cli, serving
from sojourn.residencyd.settings import Settings

from tests.residencyd.children import MIB, NOBODY, Child, child, run_as
from tests.residencyd.published import PAGEABLE, component, publish, storage


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Child]:
    with child("a = map_(4 << 20); write(a, 1 << 20); say(address=a)") as made:
        publish(tmp_path, made.pid, component("dit", storage(made["address"], 4 * MIB, PAGEABLE)))
        yield made


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The command line in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["residencyd", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def environment() -> dict[str, str]:
    """For a command line in a process of its own."""
    roots = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "PYTHONPATH": roots, "PYTHONDONTWRITEBYTECODE": "1"}


def test_scan_of_any_process_by_mapped_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "scan", "--pid", os.getpid(), "--rows", 2) == 0
    text = capsys.readouterr().out
    assert f"process {os.getpid()}" in text
    assert " more" in text


def test_scan_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], it: Child) -> None:
    assert run(monkeypatch, "scan", "--pid", it.pid, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["pid"] == it.pid
    assert sum(group["resident_bytes"] for group in found["groups"]) == found["rss_bytes"]
    assert {group["tier"] for group in found["groups"]} == {"host_mapped", "host_pageable"}


def test_scan_with_children(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, it: Child
) -> None:
    it.do("child = os.fork()\nif not child: os.read(os.pipe()[0], 1)")
    assert run(monkeypatch, "scan", "--pid", it.pid, "--children", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert run(monkeypatch, "scan", "--map", tmp_path, "--children") == 0
    assert "\nchild " in capsys.readouterr().out
    assert run(monkeypatch, "scan", "--map", tmp_path) == 0
    assert "\nchild " not in capsys.readouterr().out
    it.do("os.kill(child, 9)")


def test_scan_of_maps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, it: Child
) -> None:
    assert run(monkeypatch, "scan", "--map", tmp_path) == 0
    assert "dit" in capsys.readouterr().out
    assert run(monkeypatch, "scan", "--map", tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    (part,) = found["processes"][0]["components"]
    assert part["tiers"] == [
        {
            "tier": "TIER_HOST_PAGEABLE",
            "mapped_bytes": str(4 * MIB),
            "resident_bytes": str(MIB),
            "claimed_bytes": str(4 * MIB),
        }
    ]
    assert "children" not in found["processes"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("scan", "--pid", 2**30), f"residencyd: process {2**30} is gone\n"),
        (("scan", "--map", "/nowhere"), "residencyd: /nowhere: no component map"),
        (("top", "--pid", 2**30), "residencyd: process"),
        (("serve", "--log-level", "loud"), "residencyd: --log-level is 'loud': give one of debug"),
        (("serve", "--deep-share", "0"), "residencyd: --deep-share is 0.0: give a share above 0"),
        (("serve", "--deep-share", "nan"), "residencyd: --deep-share is nan"),
    ],
)
def test_what_goes_wrong_is_one_line_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: tuple[object, ...], message: str
) -> None:
    assert run(monkeypatch, *arguments) == 1
    own = [line for line in capfd.readouterr().err.splitlines(keepends=True) if line.startswith("residencyd")]
    assert len(own) == 1
    assert own[0].startswith(message)


def test_wrong_usage_is_another_status(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "scan", "--pid", 0) == 2
    assert run(monkeypatch, "fly") == 2


def test_top_counts_its_looks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, it: Child
) -> None:
    assert run(monkeypatch, "top", "--pid", it.pid, "--count", 3, "--interval-seconds", 0.1) == 0
    assert "resident  " in capsys.readouterr().out
    assert run(monkeypatch, "top", "--map", tmp_path, "--count", 2, "--interval-seconds", 0.1) == 0
    assert "dit" in capsys.readouterr().out


SCAN_ANOTHER = """
import contextlib, io, json, os, sys
from sojourn.residencyd import cli
def scan(pid):
    sys.argv = ["residencyd", "scan", "--pid", str(pid)]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.main()
        except SystemExit as ended:
            return ended.code or 0, said.getvalue()
pid = sys.argv[1]
assert scan(os.getpid())[0] == 0  # and so everything is imported
become()
print(json.dumps(scan(pid)))
"""


@pytest.mark.usefixtures("as_root")
def test_a_process_of_another_user_is_refused_in_one_line() -> None:
    with child("say()") as it:
        code, said = run_as(NOBODY, SCAN_ANOTHER, str(it.pid))
    assert code == 1
    assert said.startswith(f"residencyd: process {it.pid} runs as uid 0")
    assert said.count("\n") == 1


def test_serve_answers_until_it_is_told_to_end(tmp_path: Path, it: Child) -> None:
    command = [sys.executable, "-m", "sojourn.residencyd.cli", "serve", "--map", str(tmp_path)]
    command += ["--metrics-address", "127.0.0.1:0", "--grpc-address", "127.0.0.1:0", "--floor-seconds", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as served:
        try:
            line = json.loads(served.stderr.readline())
            port = int(line["message"].split()[3].rstrip(","))
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                text = answer.read().decode()
            found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
            labels = 'component="dit",tier="host_pageable"'
            assert float(found[f"sojourn_residency_resident_bytes{{{labels}}}"]) == MIB
            assert 'sojourn_build_info{process="residencyd"' in text
            assert "process_resident_memory_bytes" in text
            assert 'sojourn_log_lines_total{level="info"}' in text
            assert "_created" not in text
            assert "python_gc" not in text
            served.send_signal(signal.SIGUSR1)
            said = (json.loads(line)["message"] for line in served.stderr)
            assert "printing from level debug on" in said
            served.send_signal(signal.SIGTERM)
            assert served.wait(20) == 0
        finally:
            served.kill()


@pytest.mark.parametrize(
    ("option", "address", "message"),
    [
        ("--metrics-address", "x", "residencyd: x is no address: give host:port"),
        ("--metrics-address", "256.0.0.1:1", "residencyd: cannot listen on 256.0.0.1:1"),
        ("--grpc-address", "256.0.0.1:1", "residencyd: cannot listen on 256.0.0.1:1"),
    ],
)
def test_an_address_that_cannot_be_served_is_one_line(option: str, address: str, message: str) -> None:
    others = ["--metrics-address", "127.0.0.1:0", "--grpc-address", "127.0.0.1:0"]
    done = subprocess.run(
        [sys.executable, "-m", "sojourn.residencyd.cli", "serve", *others, option, address],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.returncode == 1
    own = [line for line in done.stderr.splitlines() if line.startswith("residencyd")]
    assert len(own) == 1
    assert own[0].startswith(message)
    assert "Traceback" not in done.stderr


def test_every_option_of_serve_arrives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: became.append(arguments))
    chosen = {
        "map": "/maps/*.pb",
        "proc": str(tmp_path),
        "cgroup-root": "/groups",
        "floor-seconds": "7.5",
        "deep-share": "0.25",
        "metrics-address": "127.0.0.1:1",
        "grpc-address": "127.0.0.1:2",
        "log-level": "DEBUG",
        "grace-seconds": "3",
    }
    flags = [text for name, value in chosen.items() for text in (f"--{name}", value)]
    assert run(monkeypatch, "serve", *flags, "--host-pids", "--log-text") == 0
    options = serving.Options(**json.loads(became[0][-1]))
    assert options.settings == Settings("/maps/*.pb", tmp_path, Path("/groups"), 7.5, 0.25, host_pids=True)
    assert (options.metrics_address, options.grpc_address) == ("127.0.0.1:1", "127.0.0.1:2")
    assert (options.log_level, options.log_text, options.grace_seconds) == ("debug", True, 3.0)


def test_options_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: became.append(arguments))
    chosen = {
        "MAP": "/maps",
        "METRICS": "127.0.0.1:1",
        "GRPC": "127.0.0.1:2",
        "FLOOR_SECONDS": "9",
        "DEEP_SHARE": "0.5",
        "PROC": "/host/proc",
        "CGROUP_ROOT": "/host/cgroup",
        "HOST_PIDS": "true",
        "LOG_LEVEL": "warning",
        "LOG_TEXT": "true",
    }
    for name, value in chosen.items():
        monkeypatch.setenv(f"RESIDENCYD_{name}", value)
    assert run(monkeypatch, "serve") == 0
    options = serving.Options(**json.loads(became[0][-1]))
    assert options.settings == Settings("/maps", Path("/host/proc"), Path("/host/cgroup"), 9.0, 0.5, host_pids=True)
    assert (options.metrics_address, options.grpc_address) == ("127.0.0.1:1", "127.0.0.1:2")
    assert (options.log_level, options.log_text) == ("warning", True)


def test_a_reader_of_the_output_may_leave(it: Child) -> None:
    command = f"{sys.executable} -m sojourn.residencyd.cli scan --pid {it.pid} --json | head -c 1"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert (done.stdout, done.stderr) == ("[", "")
