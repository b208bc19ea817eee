"""A small file that a reader in another container sees whole or not at all."""

import contextlib
import os
import tempfile
from pathlib import Path


def replace(path: Path, content: bytes, *, mode: int = 0o640) -> None:
    """Puts a new file in the place of `path`, by a rename within its folder.

    It is not flushed to disk: it serves readers of this boot, and a rename orders itself before them.

    Args:
        path: Where readers look. Its folder must exist.
        content: All of it.
        mode: Permissions of the new file.

    Raises:
        OSError: The folder is missing, full or not writable; the old file is untouched then.
    """
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(descriptor, mode)
        Path(draft).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(draft).unlink()
        raise
