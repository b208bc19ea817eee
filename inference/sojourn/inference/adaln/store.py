"""Rows of whole schedules in files that the processes of a node share.

One safetensors file per (fingerprint, schedule), written under a temporary name and renamed: a reader sees a whole file
or none. Whoever builds a schedule first publishes it, everyone else maps it read-only. A file that is corrupt, foreign
or unreadable is never trusted: it counts, and the rows are built as if it were not there.
"""

import fcntl
import hashlib
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from sojourn.inference.adaln.counters import RejectReason
from sojourn.inference.adaln.plans import Plan, PlanKey
from sojourn.inference.adaln.refusals import SettingRefused
from sojourn.inference.adaln.settings import STORE_BYTES_SETTING, STORE_SETTING
from sojourn.inference.adaln.table import Table

_log = logging.getLogger(__name__)

FORMAT = "sojourn-plans-1"
_POLL_SECONDS = 0.05

Rows = dict[torch.dtype, torch.Tensor]


class RejectedFile(Exception):
    """A file of the store that is not used."""

    def __init__(self, reason: RejectReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def schedule_digest(keys: Sequence[PlanKey]) -> str:
    """The schedule by all that fixes it: the exact keys of its distinct plans, in order."""
    digest = hashlib.sha256()
    for key in keys:
        digest.update(len(key).to_bytes(4, "little") + key)
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class StoredSchedule:
    """The rows of a schedule, mapped.

    Attributes:
        rows: By dtype, [sum of lengths, R].
        starts: First row of each plan.
        lengths: Distinct rows of each plan.
        checksums: CRC-32 of each plan's rows.
    """

    rows: Rows
    starts: dict[PlanKey, int]
    lengths: dict[PlanKey, int]
    checksums: dict[PlanKey, int]

    def plan_rows(self, key: PlanKey) -> Rows:
        """The rows of one plan, checked.

        Raises:
            RejectedFile: They are not what was written.
        """
        start, length = self.starts[key], self.lengths[key]
        rows = {dtype: rows[start : start + length] for dtype, rows in self.rows.items()}
        if _checksum(rows) != self.checksums[key]:
            raise RejectedFile(RejectReason.CORRUPT, f"rows {start} to {start + length} fail their checksum")
        return rows


@dataclass(frozen=True)
class PlanStore:
    """The directory.

    Attributes:
        directory: Made when the first file is written.
        max_bytes: Size cap; the oldest files go first.
        fingerprint: Of the rows of this process, see `fingerprint.rows_fingerprint`.
        table: Layout of a row.
        rejected: Hears of every file that is not used or not written.
        wait_seconds: How long to wait for another process that builds the same schedule.
    """

    directory: Path
    max_bytes: int
    fingerprint: str
    table: Table
    rejected: Callable[[RejectReason], None]
    wait_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.max_bytes < 1:
            raise SettingRefused(STORE_BYTES_SETTING, self.max_bytes, "must be at least 1")
        if self.directory.exists() and not self.directory.is_dir():
            raise SettingRefused(STORE_SETTING, str(self.directory), "is a file; name a directory")

    def path(self, keys: Sequence[PlanKey]) -> Path:
        """The file of a schedule."""
        return self.directory / f"{self.fingerprint[:32]}-{schedule_digest(keys)[:32]}.safetensors"

    @property
    def nbytes(self) -> int:
        """Size of all files of the directory that are the store's."""
        return sum(size for _, size, _ in self._files())

    def find(self, plans: Sequence[Plan]) -> StoredSchedule | None:
        """The stored rows of a schedule, mapped; None where there are none to be trusted."""
        path = self.path([plan.key for plan in plans])
        try:
            return self._map(path, plans)
        except RejectedFile as error:
            self.reject(error, path)
            return None

    def version(self, keys: Sequence[PlanKey]) -> tuple[int, int] | None:
        """What tells a schedule's file from one that replaces it; None where there is no file."""
        try:
            stat = self.path(keys).stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns

    def reject(self, error: RejectedFile, path: Path) -> None:
        """Counts a file that is not used."""
        _log.debug("plan store: %s is not used: %s", path.name, error)
        self.rejected(error.reason)

    @contextmanager
    def building(self, keys: Sequence[PlanKey]) -> Iterator[None]:
        """Held by the one process of the node that builds a schedule; others wait for it, for a time.

        Whoever cannot wait or cannot lock builds for itself: a schedule that is written twice is valid both times.
        """
        lock = self._lock(keys)
        try:
            yield
        finally:
            if lock is not None:
                os.close(lock)

    def _lock(self, keys: Sequence[PlanKey]) -> int | None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path(keys).with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            return None
        deadline = time.monotonic() + self.wait_seconds
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return handle
            except OSError:
                if time.monotonic() > deadline:
                    return handle
                time.sleep(_POLL_SECONDS)

    def publish(self, plans: Sequence[Plan], rows: Sequence[Rows]) -> bool:
        """Writes the rows of a schedule. False where that is not possible: it costs another process a build, no more.

        Args:
            plans: The distinct plans in order.
            rows: Of each plan, by dtype [length, R].
        """
        path = self.path([plan.key for plan in plans])
        temporary = path.with_suffix(f".{os.getpid()}-{time.monotonic_ns()}.tmp")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if sum(tensor.nbytes for plan_rows in rows for tensor in plan_rows.values()) > self.max_bytes:
                raise OSError(f"the schedule alone is larger than {STORE_BYTES_SETTING} {self.max_bytes}")
            self._write(temporary, plans, rows)
            temporary.chmod(0o644)
            temporary.replace(path)
            self._trim(keep=path)
        except (OSError, SafetensorError) as error:
            self.reject(RejectedFile(RejectReason.UNWRITABLE, str(error)), path)
            temporary.unlink(missing_ok=True)
            return False
        return True

    def _write(self, path: Path, plans: Sequence[Plan], rows: Sequence[Rows]) -> None:
        on_host = [{dtype: tensor.cpu() for dtype, tensor in plan_rows.items()} for plan_rows in rows]
        tensors = {
            f"rows.{_name(dtype)}": torch.cat([plan_rows[dtype] for plan_rows in on_host])
            for dtype in self.table.row_elements
        }
        metadata = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "schedule": schedule_digest([plan.key for plan in plans]),
            "lengths": " ".join(str(plan.length) for plan in plans),
            "checksums": " ".join(str(_checksum(plan_rows)) for plan_rows in on_host),
        }
        save_file(tensors, str(path), metadata)

    def _map(self, path: Path, plans: Sequence[Plan]) -> StoredSchedule | None:
        keys = [plan.key for plan in plans]
        try:
            with safe_open(str(path), "pt") as file:
                metadata = file.metadata() or {}
                if (metadata.get("format"), metadata.get("fingerprint"), metadata.get("schedule")) != (
                    FORMAT,
                    self.fingerprint,
                    schedule_digest(keys),
                ):
                    raise RejectedFile(RejectReason.FOREIGN, "it was made by other weights, arithmetic or versions")
                rows = {dtype: file.get_tensor(f"rows.{_name(dtype)}") for dtype in self.table.row_elements}
        except FileNotFoundError:
            return None
        except SafetensorError as error:
            raise RejectedFile(RejectReason.CORRUPT, str(error)) from error
        except OSError as error:
            raise RejectedFile(RejectReason.UNREADABLE, str(error)) from error
        return self._described(rows, keys, plans, metadata)

    def _described(
        self, rows: Rows, keys: Sequence[PlanKey], plans: Sequence[Plan], metadata: dict[str, str]
    ) -> StoredSchedule:
        lengths = [plan.length for plan in plans]
        shapes = {dtype: (sum(lengths), elements) for dtype, elements in self.table.row_elements.items()}
        try:
            checksums = [int(word) for word in metadata["checksums"].split()]
            is_whole = len(checksums) == len(keys) and metadata["lengths"] == " ".join(map(str, lengths))
        except (KeyError, ValueError) as error:
            raise RejectedFile(RejectReason.CORRUPT, f"its metadata is broken: {error}") from error
        if not is_whole or any(tuple(rows[dtype].shape) != shape for dtype, shape in shapes.items()):
            raise RejectedFile(RejectReason.CORRUPT, "its rows are not those of the schedule")
        if any(tensor.dtype != dtype for dtype, tensor in rows.items()):
            raise RejectedFile(RejectReason.CORRUPT, "its rows have another dtype")
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        return StoredSchedule(
            rows=rows,
            starts=dict(zip(keys, starts, strict=True)),
            lengths=dict(zip(keys, lengths, strict=True)),
            checksums=dict(zip(keys, checksums, strict=True)),
        )

    def _files(self) -> list[tuple[int, int, Path]]:
        """(mtime, size, path) of the store's files, oldest first."""
        found = []
        for path in self.directory.glob("*-*.safetensors") if self.directory.is_dir() else ():
            try:
                stat = path.stat()
            except OSError:
                continue
            found.append((stat.st_mtime_ns, stat.st_size, path))
        return sorted(found)

    def _trim(self, *, keep: Path) -> None:
        """Deletes the oldest files until the rest is within the cap. Maps of deleted files stay valid."""
        files = self._files()
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self.max_bytes:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                path.with_suffix(".lock").unlink(missing_ok=True)
                total -= size


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _checksum(rows: Rows) -> int:
    checksum = 0
    for dtype in sorted(rows, key=str):
        checksum = zlib.crc32(rows[dtype].contiguous().view(torch.uint8).numpy().reshape(-1).data, checksum)
    return checksum
