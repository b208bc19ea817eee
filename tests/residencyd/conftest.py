import os
import tempfile
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
def open_path(tmp_path: Path) -> Path:
    """A temporary folder that every user may enter."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(folder.stat().st_mode | 0o055)
    return tmp_path
