"""What the weights are: SHA-256 over the checkpoint's tensors, by content.

Over names, dtypes, shapes and bytes, and not over the layout: how a checkpoint is cut into shards changes nothing, a
single bit of a weight does. Sizes and times would not do: a fine-tune has equal sizes, image layers normalise times.

Reading 60 GB takes a minute, so hashing runs in a thread of its own beside the work that the service was started for,
and the digests of a file are kept under its identity (device, inode, size, mtime, ctime) when a folder to keep them in
is given.
"""

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sojourn.inference.loading.mapping import MappedFile
from sojourn.inference.loading.safetensors_file import FileIdentity

# Per tensor: dtype, shape as text, SHA-256 of the bytes.
Digests = Mapping[str, Sequence[str]]
# hashlib lets other threads run during an update of more than 2 KiB; pieces keep the reader interruptible.
_PIECE_BYTES = 64 * 2**20
_NICENESS = 19


def checkpoint_fingerprint(files: Mapping[str, Sequence[MappedFile]], *, cache: Path | None = None) -> str:
    """Hashes a checkpoint.

    Args:
        files: The mapped files of each component, by the component's name.
        cache: Where digests of files are kept between starts; None keeps none.

    Returns:
        Lower-case hexadecimal SHA-256.
    """
    lines = []
    for component, mapped in files.items():
        for file in mapped:
            for name, (dtype, shape, digest) in _file_digests(file, cache).items():
                lines.append(json.dumps([component, name, dtype, shape, digest], ensure_ascii=True))
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _file_digests(file: MappedFile, cache: Path | None) -> Digests:
    if cache is None:
        return _hash_tensors(file)
    path = cache / f"{_cache_key(file.file.identity)}.json"
    kept = _read_kept(path, file)
    if kept is not None:
        return kept
    digests = _hash_tensors(file)
    _keep(path, digests)
    return digests


def _cache_key(identity: FileIdentity) -> str:
    fields = (identity.device, identity.inode, identity.size, identity.mtime_ns, identity.ctime_ns)
    return hashlib.sha256("/".join(map(str, fields)).encode()).hexdigest()[:32]


def _hash_tensors(file: MappedFile) -> Digests:
    return {
        name: (info.dtype, "x".join(map(str, info.shape)), _hash_bytes(file.bytes_of(name)))
        for name, info in file.file.tensors.items()
    }


def _hash_bytes(view: memoryview) -> str:
    digest = hashlib.sha256()
    for begin in range(0, len(view), _PIECE_BYTES):
        digest.update(view[begin : begin + _PIECE_BYTES])
    return digest.hexdigest()


def _read_kept(path: Path, file: MappedFile) -> Digests | None:
    """Reads kept digests; None where there are none or they are not those of this file's tensors."""
    try:
        kept = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(kept, dict) or set(kept) != set(file.file.tensors):
        return None
    well_formed = all(
        isinstance(value, list) and [type(part) for part in value] == [str] * 3 for value in kept.values()
    )
    return kept if well_formed else None


def _keep(path: Path, digests: Digests) -> None:
    """Keeps digests; a folder that cannot be written costs only the next start's time."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(digests), "utf-8")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()


class BackgroundFingerprint:
    """A fingerprint that is computed in a thread of its own, once, from the first `start` or `result` on."""

    def __init__(self, compute: Callable[[], str]) -> None:
        self._compute = compute
        self._value: str | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="fingerprint", daemon=True)
        self._lock = threading.Lock()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # Linux: of this thread alone
        try:
            self._value = self._compute()
        except Exception as error:
            self._error = error

    def start(self) -> None:
        """Begins computing. May be called any number of times."""
        with self._lock:
            if self._thread.ident is None:
                self._thread.start()

    @property
    def known(self) -> str | None:
        """The fingerprint, or None while it is not known yet."""
        return self._value

    def result(self) -> str:
        """Returns the fingerprint, waiting for it where needed."""
        self.start()
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value
