"""One pass over the weights of a build: every layer once, piece by piece, on as many lanes as there are."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from sojourn.inference.adaln.lanes import Lanes
from sojourn.inference.adaln.layers import Layer, Piece
from sojourn.inference.adaln.piece_buffer import PieceBuffer
from sojourn.inference.adaln.products import Batch
from sojourn.inference.adaln.slab import Slab
from sojourn.inference.adaln.weights import Part, WeightSource


@dataclass(frozen=True)
class Task:
    """A layer of a pass.

    Attributes:
        pieces: Of the layer, in order; the whole layer alone if it must be computed as stock does.
        batches: Each takes its product with every piece.
        in_pieces: Whether that may happen on lanes.
    """

    layer: Layer
    pieces: tuple[Piece, ...]
    batches: tuple[Batch, ...]
    in_pieces: bool


@dataclass(frozen=True)
class _Read:
    """A piece of a task whose weights have been read.

    Attributes:
        weight, bias: As stored.
    """

    task: Task
    piece: Piece
    weight: torch.Tensor
    bias: torch.Tensor | None


class Sweep:
    """Reads the layers of tasks, piece by piece, into one buffer a lane, and stores the products.

    Args:
        source: The weights.
        slab: Where the rows go.
        check: Called before each layer; raises what stops the build.
        read: Hears how many bytes were read.
    """

    def __init__(
        self, source: WeightSource, slab: Slab, check: Callable[[], None], read: Callable[[int], None]
    ) -> None:
        self._source = source
        self._slab = slab
        self._check = check
        self._read = read

    def run(self, tasks: Sequence[Task], lanes: Lanes) -> None:
        """Passes once over all tasks. The first error ends the pass on every lane and is raised."""
        reader = _Reader(tasks, self._source, self._check, self._read)
        pieces = [piece for task in tasks for piece in task.pieces]
        is_beside = _reads_beside(self._slab.device)
        # Taken by the caller: what its thread gives back, its next build gets without a page fault.
        buffers = [PieceBuffer(pieces, self._slab.device) for _ in range(2 if is_beside else max(1, lanes.count))]
        if is_beside:
            self._read_beside(reader, buffers)
        else:
            lanes.run_on_all(lambda: self._read_and_project(reader, buffers.pop()))

    def _read_and_project(self, reader: "_Reader", buffer: PieceBuffer) -> None:
        with reader:
            while (read := reader.next(buffer)) is not None:
                self._project(read)

    def _read_beside(self, reader: "_Reader", buffers: list[PieceBuffer]) -> None:
        """Reads a piece in a thread of its own while the caller's has the one before it computed."""
        with ThreadPoolExecutor(1, "adaln-reader") as beside, reader:
            coming = beside.submit(reader.next, buffers[0])
            while (read := coming.result()) is not None:
                buffers.reverse()
                coming = beside.submit(reader.next, buffers[0])
                self._project(read)

    def _project(self, read: _Read) -> None:
        weight = self._computed(read.weight, read.task)
        bias = None if read.bias is None else self._computed(read.bias, read.task)
        for batch in read.task.batches:
            batch.project(read.task.layer.name, weight, bias, self._slab, first_output=read.piece.first_output)

    def _computed(self, stored: torch.Tensor, task: Task) -> torch.Tensor:
        """On the device and in the dtype of the product."""
        device, dtype = self._slab.device, task.layer.product.dtype
        is_there = stored.dtype is dtype and stored.device == device
        return stored if is_there else stored.to(device=device, dtype=dtype)


class _Reader:
    """Reads the pieces in order, for any thread. An error in it ends the reading.

    What is in the page cache the lanes copy from there at the same time. Once something is not, the storage is what a
    build waits for. Then they take turns, so that the kernel sees one sequential reader and reads ahead, while the
    other lanes compute; and what came into the page cache that way leaves it at once, so that a few pages serve the
    whole pass. Of 1.5 GB on a virtual disk a build of seven plans took 0.93 s so (a plain read 1.1 s), with the storage
    asked for pieces by fadvise 1.2 s, and past the page cache by O_DIRECT 0.9 to 1.5 s, by the hour.
    """

    def __init__(
        self, tasks: Sequence[Task], source: WeightSource, check: Callable[[], None], read: Callable[[int], None]
    ) -> None:
        self._waiting = deque((task, piece) for task in tasks for piece in task.pieces)
        self._layers = [task.layer for task in tasks]
        self._source = source
        self._check = check
        self._read = read
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._seeing = threading.Lock()
        self._layer: Layer | None = None
        self._bias: torch.Tensor | None = None
        # Tensors that were not wholly in the page cache; None as long as everything was found there.
        self._absent: frozenset[str] | None = None

    def next(self, buffer: PieceBuffer) -> _Read | None:
        """Reads the next piece into a buffer; None when there is none left."""
        with self._turn if self._absent is not None else nullcontext() as has_turn:
            with self._lock:
                if not self._waiting:
                    return None
                task, piece = self._waiting.popleft()
                if task.layer is not self._layer:
                    self._check()
                    self._layer, self._bias = task.layer, self._read_bias(task.layer)
                bias = self._bias
            spot = buffer.spot(piece)
            if not self._read_cached(piece.part, spot.target):
                with nullcontext() if has_turn else self._turn:
                    self._read_stored(piece.part, spot.target)
        first = piece.first_output - task.layer.span.first
        return _Read(task, piece, spot.tensor, None if bias is None else bias[first : first + len(spot.tensor)])

    def _read_bias(self, layer: Layer) -> torch.Tensor | None:
        if layer.biases is None:
            return None
        spot = PieceBuffer([layer.biases], torch.device("cpu")).spot(layer.biases)
        if not self._read_cached(layer.biases.part, spot.target):
            self._read_stored(layer.biases.part, spot.target)
        return spot.tensor

    def _read_cached(self, part: Part, target: memoryview) -> bool:
        is_read = self._absent is None and self._source.read_cached(part, target)
        if is_read:
            self._read(target.nbytes)
        return is_read

    def _read_stored(self, part: Part, target: memoryview) -> None:
        with self._seeing:
            # Before the storage brings in more than the attempt may have had it begin with.
            if self._absent is None:
                self._absent = frozenset({part.name, *self._names_of_absent()})
        self._source.read(part, target)
        self._read(target.nbytes)
        if part.name in self._absent:
            self._source.forget([part])

    def _names_of_absent(self) -> Iterator[str]:
        wholes = [piece.part for layer in self._layers for piece in (layer.biases, *layer.undivided) if piece]
        return (part.name for part in self._source.absent(wholes))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if kind is not None:
            with self._lock:
                self._waiting.clear()


def _reads_beside(device: torch.device) -> bool:
    """Whether another device computes, so that the processor can read meanwhile."""
    return device.type != "cpu"
