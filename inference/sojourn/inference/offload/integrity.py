"""Whether the files behind mapped weights still hold what is mapped.

Reading a page of a mapping beyond the end of its file kills the process with SIGBUS, and what people then see is a
health check that failed. A file that was cut under us is noticed before its pages are touched, and named.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from sojourn.inference.errors import ModelError
from sojourn.inference.offload.spans import Span
from sojourn.residencyd.kernel.maps import DELETED, Lookup
from torch import nn

# The reason of the loader for a file that is short at the start; it is the same fault, found later.
TRUNCATED_REASON = "WeightsTruncated"


@dataclass(frozen=True)
class _Watched:
    """An open file and how much of it is mapped."""

    descriptor: int
    path: Path
    mapped_bytes: int


class MappedFiles:
    """The files behind some spans, held open so that neither a rename nor a deletion hides them.

    Args:
        spans: Addresses of weights.
        mappings: Of this process.
    """

    def __init__(self, spans: Iterable[Span], mappings: Lookup) -> None:
        ends: dict[tuple[tuple[int, int], int], tuple[str, int]] = {}
        for start, end in spans:
            for mapping in mappings.overlapping(start, end):
                key = (mapping.device, mapping.inode)
                last = min(end, mapping.end) - mapping.start + mapping.offset
                if mapping.inode:
                    ends[key] = (mapping.name, max(last, ends.get(key, ("", 0))[1]))
        self._watched = [
            watched for (_, inode), (name, size) in ends.items() if (watched := _opened(name, inode, size))
        ]

    def check(self) -> None:
        """Compares sizes; about 1 µs a file.

        Raises:
            ModelError: A file is shorter than what is mapped of it.
        """
        for file in self._watched:
            size = os.fstat(file.descriptor).st_size
            if size < file.mapped_bytes:
                raise ModelError(
                    TRUNCATED_REASON,
                    file.path,
                    f"it was cut to {size} bytes while {file.mapped_bytes} bytes of it are mapped as weights; "
                    f"put the whole file back and start again",
                )

    def close(self) -> None:
        """Closes the files. Further calls do nothing."""
        for file in self._watched:
            os.close(file.descriptor)
        self._watched = []


def hook_checks(layers: Iterable[nn.Module], check: Callable[[], None]) -> Callable[[], None]:
    """Has `check` called before each layer computes; returns what undoes it. About 3 µs a layer."""
    handles = [layer.register_forward_pre_hook(lambda *_: check(), prepend=True) for layer in layers]

    def undo() -> None:
        while handles:
            handles.pop().remove()

    return undo


def _opened(name: str, inode: int, size_bytes: int) -> _Watched | None:
    """The file, if its path still leads to it; a deleted one can no longer be cut by its path either."""
    path = Path(name.removesuffix(DELETED))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(descriptor).st_ino != inode:
        os.close(descriptor)
        return None
    return _Watched(descriptor, path, size_bytes)
