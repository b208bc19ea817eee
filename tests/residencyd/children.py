"""Real child processes whose memory the tests look at, and smaps as the oracle (here and nowhere else)."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

NOBODY = 65534
SOMEBODY = 65533
PAGE = os.sysconf("SC_PAGESIZE")
MIB = 1 << 20
GIB = 1 << 30

Seen = TypeVar("Seen")

# What every child starts with: answers are lines of JSON, orders are lines of Python.
PREAMBLE = """
import ctypes, json, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
R, W = mmap.PROT_READ, mmap.PROT_WRITE
SHARED, PRIVATE, ANON = mmap.MAP_SHARED, mmap.MAP_PRIVATE, mmap.MAP_ANONYMOUS
def map_(length, prot=R | W, flags=PRIVATE | ANON, fd=-1, offset=0):
    address = libc.mmap(None, length, prot, flags, fd, offset)
    if address in (None, 2**64 - 1):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address
def read(address, length, step=4096):
    for at in range(address, address + length, step):
        ctypes.c_char.from_address(at).value
def write(address, length, step=4096):
    for at in range(address, address + length, step):
        ctypes.c_char.from_address(at).value = b"x"
def say(**what):
    print(json.dumps(what), flush=True)
def serve():
    for line in sys.stdin:
        exec(json.loads(line))
        say(done=True)
"""


@dataclass
class Child:
    """A process that waits for orders."""

    process: "subprocess.Popen[str]"
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.process.pid

    def __getitem__(self, key: str) -> Any:
        return self.info[key]

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"the child ended with status {self.process.wait()}"
        return json.loads(line)

    def do(self, source: str) -> None:
        """Runs Python in the child and waits for it."""
        assert self.process.stdin
        print(json.dumps(source), file=self.process.stdin, flush=True)
        assert self.hear() == {"done": True}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()


# Becoming another user makes a process unreadable even for that user, until it says otherwise (PR_SET_DUMPABLE): as
# readable then as one that was started by that user. No exec, for the interpreter may lie where only root may go.
BECOME = """
import ctypes, os
def become(uid=%d, dumpable=%d):
    os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
    ctypes.CDLL(None).prctl(4, int(dumpable), 0, 0, 0)
"""


@contextlib.contextmanager
def child(source: str, *, uid: int | None = None, dumpable: bool = True, **values: Any) -> Iterator[Child]:
    """A child that ran `source` (which must `say(...)` once) and then waits for orders.

    Args:
        source: Python; `values` are its globals.
        uid: User to run as.
        dumpable: False for a child that switched user and left it at that.
    """
    lines = [PREAMBLE, *(f"{name} = {value!r}" for name, value in values.items())]
    if uid is not None:
        lines += [BECOME % (uid, dumpable), "become()"]
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "\n".join([*lines, source, "serve()"])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    started = Child(process)
    try:
        started.info = started.hear()
        yield started
    finally:
        started.end()


def run_as(uid: int, source: str, *arguments: str, timeout: float = 60) -> Any:
    """Runs Python that calls `become()` after its imports; what it prints as JSON."""
    roots = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", BECOME % (uid, True) + source, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd="/",
        env={"PYTHONPATH": roots, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def wait_for(look: Callable[[], Seen], good: Callable[[Seen], bool], *, seconds: float = 10) -> Seen:
    """Looks until what is seen is good."""
    end = time.monotonic() + seconds
    while not good(seen := look()):
        assert time.monotonic() < end, f"still {seen!r}"
        time.sleep(0.01)
    return seen


def smaps(pid: int, start: int, end: int) -> dict[str, int]:
    """Sums of smaps' fields, in bytes, over the mappings that lie within [start, end)."""
    sums: dict[str, int] = {}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            low, high = (int(text, 16) for text in first.split("-"))
            inside = start <= low and high <= end
        elif inside and rest.strip().endswith("kB"):
            key = first[:-1]
            sums[key] = sums.get(key, 0) + int(rest.split()[0]) * 1024
    return sums


def fincore(path: Path) -> int:
    """The oracle for files: bytes in the page cache."""
    done = subprocess.run(["fincore", "-bnro", "RES", path], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("fincore is not installed")
    return int(done.stdout)


def sparse(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def filled(path: Path, size: int) -> Path:
    """A file of random bytes, written back so that its pages are clean."""
    with path.open("wb") as file:
        for _ in range(0, size, MIB):
            file.write(os.urandom(min(MIB, size)))
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())
    return path
