"""Child processes in a control group of their own, v1 or v2, with a cap that can be moved while they run."""

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CGROUPS = Path("/sys/fs/cgroup")
MIB = 1 << 20


class Cap:
    """A memory control group."""

    def __init__(self, folder: Path, limit_file: str) -> None:
        self.folder = folder
        self.limit_file = limit_file

    def limit(self, limit_bytes: int) -> None:
        (self.folder / self.limit_file).write_text(str(limit_bytes))

    def oom_kills(self) -> int:
        for name in ("memory.oom_control", "memory.events"):
            path = self.folder / name
            if path.exists():
                counts = dict(line.split() for line in path.read_text().splitlines())
                return int(counts.get("oom_kill", 0))
        return 0


@contextlib.contextmanager
def capped(limit_bytes: int):
    """A new control group with a limit; skips the test where none can be made."""
    v1 = CGROUPS / "memory"
    mount, limit_file = (v1, "memory.limit_in_bytes") if v1.is_dir() else (CGROUPS, "memory.max")
    folder = mount / f"sojourn-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here ({error}); run as root, or with a delegated memory controller")
    try:
        cap = Cap(folder, limit_file)
        try:
            cap.limit(limit_bytes)
        except OSError as error:
            pytest.skip(f"no memory limit can be set in {folder} ({error}); delegate the memory controller")
        yield cap
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    for _ in range(100):
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.05)


class Child:
    """A Python process that prints one JSON object a line and goes on at each line that it is sent."""

    def __init__(self, source: str, cap: Cap | None = None, *arguments: str) -> None:
        join = f"open({str(cap.folder / 'cgroup.procs')!r}, 'w').write('0')\n" if cap else ""
        path = os.pathsep.join(str(ROOT / part) for part in ("proto", "inference", "residencyd", "."))
        self.process = subprocess.Popen(
            [sys.executable, "-c", join + source, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
            cwd="/",
        )

    def hear(self) -> dict:
        line = self.process.stdout.readline()
        assert line, f"the child ended with status {self.process.wait()}"
        return json.loads(line)

    def go_on(self, word: str = "") -> None:
        print(word, file=self.process.stdin, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
