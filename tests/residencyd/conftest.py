import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

CAPTURES = Path(__file__).parent / "captures"


@pytest.fixture
def captures() -> Path:
    """Checked-in fake /proc and cgroup trees."""
    return CAPTURES


@pytest.fixture
def as_root() -> None:
    """For tests that become other users."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become two other users")


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A temporary folder that every user may enter; pytest's own are closed to others, anew with each run."""
    with tempfile.TemporaryDirectory(prefix="sojourn-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
