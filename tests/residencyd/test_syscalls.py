"""Proves what is never opened: smaps and smaps_rollup, and clear_refs; and that nothing in /proc is opened for writing.

Twice: by Python's audit events, which see every open() that Python code makes, and by strace where it is installed,
which sees those of the C libraries too.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.residencyd.children import MIB, child, filled
from tests.residencyd.published import MAPPED, PAGEABLE, component, publish, storage

# All that the product does with a process: metrics, a service call, a watch, and both command lines.
EVERYTHING = """
import contextlib, io, json, os, sys, time, urllib.request
opened = []
if sys.argv[3] == "audit":
    sys.addaudithook(lambda event, args: event == "open" and opened.append([str(args[0]), args[1], args[2]]))
import grpc
from sojourn.residencyd import cli, serving
from sojourn.residencyd.settings import Settings
from sojourn.v1 import residency_pb2 as pb, residency_pb2_grpc
settings = Settings(map_pattern=sys.argv[1], floor_seconds=0.0, deep_share=1e9)
with serving.running(settings, metrics_address="127.0.0.1:0", grpc_address="127.0.0.1:0") as ports:
    for _ in range(3):
        urllib.request.urlopen(f"http://127.0.0.1:{ports.metrics}/metrics").read()
    with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
        stub = residency_pb2_grpc.ResidencyServiceStub(channel)
        found = stub.GetResidency(pb.GetResidencyRequest()).residency
        next(stub.WatchResidency(pb.WatchResidencyRequest()))
assert not found.processes[0].blind_reason, found.processes[0].blind_message
for arguments in (["scan", "--pid", sys.argv[2]], ["scan", "--map", sys.argv[1], "--json"],
                  ["top", "--pid", sys.argv[2], "--count", "2", "--interval-seconds", "0.1"]):
    sys.argv[1:] = arguments + sys.argv[1:]
    kept, sys.argv = sys.argv[1 + len(arguments):], ["residencyd", *arguments]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.main()
        except SystemExit as ended:
            assert not ended.code
    sys.argv = ["x", *kept]
print(json.dumps(opened))
"""

FORBIDDEN = re.compile(r"/(smaps|smaps_rollup|clear_refs)$")


def run(tmp_path: Path, tracer: str, *before: str) -> str:
    path = filled(tmp_path / "weights", 2 * MIB)
    source = "f = os.open(path, os.O_RDONLY); a = map_(2 << 20, R, PRIVATE, f); read(a, 2 << 20); b = map_(1 << 20); "
    with child(f"{source} write(b, 1 << 20); say(a=a, b=b)", path=str(path)) as it:
        parts = (storage(it["a"], 2 * MIB, MAPPED, file=path), storage(it["b"], MIB, PAGEABLE))
        folder = tmp_path / "maps"
        folder.mkdir()
        publish(folder, it.pid, component("dit", *parts))
        roots = os.pathsep.join(path for path in sys.path if path)
        done = subprocess.run(
            [*before, sys.executable, "-c", EVERYTHING, str(folder), str(it.pid), tracer],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "PYTHONPATH": roots, "PYTHONDONTWRITEBYTECODE": "1"},
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def judge(opened: list[tuple[str, bool]]) -> None:
    """Each path that was opened, and whether for writing."""
    paths = {path for path, _ in opened}
    assert any(path.endswith("/pagemap") for path in paths), "the trace saw nothing"
    assert any(path.endswith("/maps") for path in paths)
    assert not [path for path in paths if FORBIDDEN.search(path)]
    assert not [path for path, writes in opened if writes and path.startswith("/proc/")]


def test_by_audit_events(tmp_path: Path) -> None:
    opened = json.loads(run(tmp_path, "audit"))
    write_flags = os.O_WRONLY | os.O_RDWR
    judge(
        [
            (path, bool((flags or 0) & write_flags) or any(c in (mode or "") for c in "wax+"))
            for path, mode, flags in opened
        ]
    )


def test_by_strace(tmp_path: Path) -> None:
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    trace = tmp_path / "trace"
    run(tmp_path, "none", "strace", "-f", "-qq", "-e", "trace=open,openat,openat2,creat", "-o", str(trace))
    calls = re.findall(r'open\w*\(.*?"(.*?)", (.*?)[,)}]', trace.read_text(errors="replace"))
    judge([(path, "O_WRONLY" in flags or "O_RDWR" in flags) for path, flags in calls])
