"""Streamed weights read around the page cache, into a few buffers of our own.

Through the page cache a byte that streams is allocated, mapped, unmapped and dropped: 0.5 s of processor time for each
GiB where it was measured (populate 0.27, page-out 0.24), and the computation wants the same cores. O_DIRECT takes 0.06,
reads faster (two readers 1.5 GiB/s, populate 1.0), and leaves the cache, and so the weights that are kept, alone.

While a module computes, its parameters lie in a buffer; before and after, in the mapping. Whoever reads them at another
time, or when a read has failed, gets the same bytes from there.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from sojourn.inference.errors import ModelError
from sojourn.inference.offload.integrity import TRUNCATED_REASON
from sojourn.inference.offload.spans import Span, all_pages, without
from sojourn.residencyd.kernel.maps import DELETED, Lookup
from sojourn.residencyd.kernel.syscalls import PAGE_BYTES
from torch import nn

# Readers, and what each reads at a time: more of either is not faster where it was measured.
READERS = 2
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the weights of a piece go in a buffer. Addresses within a page stay what they are.

    Attributes:
        size_bytes: Of the buffer, in whole pages.
        offsets: Start of each weight in it; only weights that stream, as a whole or in part.
        reads: What is read from the file: (address in the mapping, offset in the buffer, bytes).
        copies: What is copied from the mapping, where it is kept: the same.
    """

    size_bytes: int
    offsets: Mapping[Span, int]
    reads: tuple[tuple[int, int, int], ...]
    copies: tuple[tuple[int, int, int], ...]


def place(weights: Sequence[Span], streamed: Sequence[Span], *, page_bytes: int = PAGE_BYTES) -> Placement:
    """Places the weights that stream.

    Args:
        weights: Of one piece, in bytes.
        streamed: Whole pages within them that are not kept.
        page_bytes: Of a page.
    """
    wanted = [weight for weight in weights if without([weight], streamed) != (weight,)]
    regions = all_pages(wanted, page_bytes=page_bytes)
    begins: dict[Span, int] = {}
    size_bytes = 0
    for region in regions:
        begins[region] = size_bytes
        size_bytes += region.size_bytes

    def offset(address: int) -> int:
        region = next(region for region in regions if region.start <= address < region.end)
        return begins[region] + address - region.start

    def moves(spans: Sequence[Span]) -> tuple[tuple[int, int, int], ...]:
        return tuple((span.start, offset(span.start), span.size_bytes) for span in spans)

    return Placement(
        size_bytes=size_bytes,
        offsets={weight: offset(weight.start) for weight in wanted},
        reads=moves(streamed),
        copies=moves(without(wanted, streamed)),
    )


@dataclass(frozen=True, kw_only=True)
class _File:
    """An open file, and the addresses that it is mapped at."""

    descriptor: int
    path: Path
    mapped: Span
    offset: int


class DirectFiles:
    """The files behind some weights, open for reading around the page cache.

    Args:
        spans: Whole pages of weights.
        mappings: Of this process.

    Raises:
        OSError: A file cannot be opened so, or is no longer the one that is mapped.
    """

    def __init__(self, spans: Sequence[Span], mappings: Lookup) -> None:
        self._files: list[_File] = []
        try:
            for mapping in {mapping for span in spans for mapping in mappings.overlapping(*span)}:
                path = Path(mapping.name.removesuffix(DELETED))
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                mapped = Span(mapping.start, mapping.end)
                self._files.append(_File(descriptor=descriptor, path=path, mapped=mapped, offset=mapping.offset))
                if os.fstat(descriptor).st_ino != mapping.inode:
                    raise OSError(f"{path} is no longer the file that is mapped")
        except OSError:
            self.close()
            raise

    def read(self, address: int, buffer: memoryview) -> None:
        """Reads what is mapped at an address.

        Raises:
            ModelError: The file ends before that.
            OSError: It cannot be read so.
        """
        file = self._at(address)
        at, done = file.offset + address - file.mapped.start, 0
        while done < len(buffer):
            got = os.preadv(file.descriptor, [buffer[done:]], at + done)
            done += got
            if got == 0 or done % PAGE_BYTES:
                _check_length(file, at + len(buffer))
                raise OSError(f"{file.path}: {got} bytes at {at + done - got} are no whole pages")

    def drop(self, address: int, length: int) -> None:
        """Has the page cache forget a range that nobody maps: what read-ahead has brought in of it."""
        file = self._at(address)
        os.posix_fadvise(file.descriptor, file.offset + address - file.mapped.start, length, os.POSIX_FADV_DONTNEED)

    def _at(self, address: int) -> _File:
        return next(file for file in self._files if file.mapped.start <= address < file.mapped.end)

    def close(self) -> None:
        """Closes the files. Further calls do nothing."""
        for file in self._files:
            os.close(file.descriptor)
        self._files = []


def _check_length(file: _File, wanted_bytes: int) -> None:
    size_bytes = os.fstat(file.descriptor).st_size
    if size_bytes < wanted_bytes:
        raise ModelError(
            TRUNCATED_REASON,
            file.path,
            f"it was cut to {size_bytes} bytes while weights are mapped up to byte {wanted_bytes} at least; "
            f"put the whole file back and start again",
        )


class Landing:
    """A piece on its way into a buffer, and then in it."""

    def __init__(self, slot: int, bindings: Sequence[tuple[nn.Parameter, torch.Tensor]], work: list[Future[None]]):
        self.slot = slot
        self._bindings = bindings
        self._work = work
        self._mapped: list[tuple[nn.Parameter, torch.Tensor]] = []

    def settle(self) -> None:
        """Returns when nothing writes into the buffer any more."""
        wait(self._work)

    def bind(self) -> None:
        """Waits for the bytes and has the parameters lie in them.

        Raises:
            ModelError: The file is too short.
            OSError: It could not be read; the parameters lie where they were.
        """
        self.settle()
        for part in self._work:
            part.result()
        for parameter, view in self._bindings:
            self._mapped.append((parameter, parameter.data))
            parameter.data = view

    def unbind(self) -> None:
        """Has the parameters lie in the mapping again. Further calls do nothing."""
        while self._mapped:
            parameter, data = self._mapped.pop()
            parameter.data = data


class DirectReader:
    """Brings pieces into buffers, a fixed number of them at a time. Called from the threads that compute.

    Args:
        files: Behind the weights.
        watch: Called at each read, from a reader's thread.
    """

    def __init__(self, files: DirectFiles, *, watch: Callable[[], None] = lambda: None) -> None:
        self._files = files
        self._watch = watch
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="direct-reader")
        self._buffers: list[mmap.mmap] = []
        self._idle: list[int] = []
        self._views: dict[tuple[int, int], list[tuple[nn.Parameter, torch.Tensor]]] = {}

    @property
    def size_bytes(self) -> int:
        """Of all buffers."""
        return sum(map(len, self._buffers))

    @property
    def free(self) -> int:
        """How many buffers are free."""
        return len(self._idle)

    def tensors(self) -> list[torch.Tensor]:
        """The buffers."""
        return [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in self._buffers]

    def open(self, count: int, size_bytes: int) -> None:
        """Makes so many buffers of such a size, in place of those there are. Nothing may be on its way."""
        self._views.clear()
        self._buffers = [mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE) for _ in range(count)]
        self._idle = list(range(count))

    def fetch(
        self,
        key: int,
        parameters: Mapping[Span, nn.Parameter],
        placement: Placement,
    ) -> Landing:
        """Sends for a piece; a buffer must be free.

        Args:
            key: Of the piece, the same each time while the buffers are.
            parameters: By where they lie in the mapping.
            placement: Of the piece.
        """
        slot = self._idle.pop()
        if (slot, key) not in self._views:
            self._views[slot, key] = self._bindings(self._buffers[slot], parameters, placement)
        memory = memoryview(self._buffers[slot])
        work = [self._readers.submit(self._copy, memory, placement.copies)] if placement.copies else []
        for address, offset, length in placement.reads:
            for done in range(0, length, CHUNK_BYTES):
                part = memory[offset + done : offset + min(length, done + CHUNK_BYTES)]
                work.append(self._readers.submit(self._read, address + done, part))
        return Landing(slot, self._views[slot, key], work)

    def give_back(self, landing: Landing) -> None:
        """Its buffer may be used for another piece."""
        landing.settle()
        landing.unbind()
        self._idle.append(landing.slot)

    def drop(self, address: int, length: int) -> None:
        """See `DirectFiles.drop`."""
        self._files.drop(address, length)

    def close(self) -> None:
        """Ends the readers and closes the files."""
        self._readers.shutdown()
        self.open(0, 0)
        self._files.close()

    @staticmethod
    def _bindings(
        buffer: mmap.mmap, parameters: Mapping[Span, nn.Parameter], placement: Placement
    ) -> list[tuple[nn.Parameter, torch.Tensor]]:
        with torch.inference_mode(False):
            return [
                (
                    parameters[weight],
                    torch.frombuffer(
                        buffer, dtype=parameters[weight].dtype, count=parameters[weight].numel(), offset=offset
                    ).as_strided(parameters[weight].size(), parameters[weight].stride()),
                )
                for weight, offset in placement.offsets.items()
            ]

    def _copy(self, memory: memoryview, moves: Sequence[tuple[int, int, int]]) -> None:
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for address, offset, length in moves:
            ctypes.memmove(base + offset, address, length)

    def _read(self, address: int, part: memoryview) -> None:
        self._watch()
        self._files.read(address, part)
