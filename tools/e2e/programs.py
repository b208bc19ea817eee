"""Other programs, run so that their words are seen when they fail."""

import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Missing(Exception):
    """Something that this machine would have to have; the message says how it gets it."""


class Failed(Exception):
    """A program that ended with another code than 0."""


def have(program: str) -> bool:
    """Whether a program is on the PATH."""
    return shutil.which(program, path=None) is not None or shutil.which(program, path="/usr/sbin:/sbin") is not None


def run(command: Sequence[object], *, env: dict[str, str] | None = None) -> None:
    """Runs a program; what it says is shown only if it fails.

    Raises:
        Failed: with the end of what it said.
    """
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    if done.returncode:
        raise Failed(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout[-6000:]}")


def succeeds(command: Sequence[object]) -> bool:
    """Whether a program ends with code 0."""
    return subprocess.run([str(word) for word in command], capture_output=True).returncode == 0


@contextmanager
def step(what: str) -> Iterator[None]:
    """Says what is done, and how long it took."""
    print(f"e2e: {what} …", flush=True)
    started = time.monotonic()
    yield
    print(f"e2e: {what}: {time.monotonic() - started:.0f} s", flush=True)
