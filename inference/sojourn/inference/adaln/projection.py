"""Plans -> rows: the embedding and the projection, each plan at its own row count.

A projected row's bits depend on its input and on the row count of the GEMM, on nothing else (measured on CPU, torch
2.13). So plans are never batched together and a row is never expanded before the projection.
Each weight is read once for all plans of a build, one layer at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from sojourn.inference.adaln.family import Family
from sojourn.inference.adaln.plans import Plan
from sojourn.inference.adaln.ranks import Deferred, Ranks, Sharing
from sojourn.inference.adaln.readahead import ReadAhead
from sojourn.inference.adaln.refusals import PlansRefused, RequestReason
from sojourn.inference.adaln.settings import Precision
from sojourn.inference.adaln.slab import Slab
from sojourn.inference.adaln.table import Entry, Table
from sojourn.inference.adaln.weights import Part, WeightSource
from torch import nn
from torch.nn import functional

# Layers that the storage is asked for ahead of the one that computes. Of 370 MB on a virtual disk, seven plans took
# 0.40 s with one, 0.53 s with two and 0.48 s with eight, the plain read 0.48 s.
_NEAR = 1
# Addresses are told apart up to a cache line, as torch aligns its own tensors.
_LINE_BYTES = 64


@dataclass(frozen=True, eq=False)
class Job:
    """A plan, the reserved slot for it, and what the projections read.

    Attributes:
        conditioning: By projection, [M, in].
    """

    plan: Plan
    slot: int
    conditioning: Mapping[str, torch.Tensor]


class Projector:
    """Computes rows of plans into reserved slots of a slab.

    Args:
        transformer: Its resident embedders make the conditioning vectors.
        family: Says how.
        table: The projections.
        source: Their weights.
        ranks: Who shares the work.
        sharing: How.
        precision: See `Precision`.
        read: Hears how many bytes were read.
    """

    def __init__(
        self,
        transformer: nn.Module,
        family: Family,
        table: Table,
        source: WeightSource,
        *,
        ranks: Ranks,
        sharing: Sharing = Sharing.LAYERS,
        precision: Precision = Precision.MATCH,
        read: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._transformer = transformer
        self._family = family
        self._table = table
        self._ranks = ranks
        self._sharing = sharing
        self._precision = precision
        self._read = read
        self.retarget(source)

    def retarget(self, source: WeightSource) -> None:
        """Reads from other weights from now on."""
        self._source = source
        # In the order of the files, so that a build is a sequential read.
        self._order = sorted(self._table, key=lambda name: _file_order(source, name))

    @torch.no_grad()
    def embed(self, plan: Plan, device: torch.device) -> Mapping[str, torch.Tensor]:
        """What each projection reads for a plan, in the dtype in which it computes; touches no slot."""
        inputs = {name: value.to(device) for name, value in plan.inputs.items()}
        read = self._family.embed(self._transformer, inputs)
        vectors = dict.fromkeys(self._table, read) if isinstance(read, torch.Tensor) else read
        cast: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        for name, vector in vectors.items():
            key = id(vector), self._computed_in(name)
            if key not in cast:
                cast[key] = vector.to(key[1])
        return {name: cast[id(vectors[name]), self._computed_in(name)] for name in self._table}

    def check_source(self) -> None:
        """Raises WeightsChanged if the checkpoint is no longer what was mapped."""
        self._source.check()

    @torch.no_grad()
    def project_own(self, jobs: Sequence[Job], slab: Slab, check: Callable[[], None]) -> None:
        """Computes this rank's share of all jobs' rows, one layer after another; before each, `check` may raise."""
        names = self._order
        if self._sharing is Sharing.LAYERS:
            names = [name for index, name in enumerate(names) if index % self._ranks.size == self._ranks.rank]
        with _full_precision() if self._precision is Precision.FP32 else nullcontext():
            for name, weight, bias in self._stream(names, slab.device):
                check()
                first = self._first_output(self._table[name])
                for job in jobs:
                    rows = functional.linear(job.conditioning[name], weight, bias)
                    slab.write(name, job.slot, _distinct_rows(rows, job.plan), first_output=first)

    def exchange_buffers(self, jobs: Sequence[Job], slab: Slab) -> dict[torch.dtype, torch.Tensor]:
        """Memory for `share`: taken beforehand, so that no rank lacks it between two collectives."""
        if self._ranks.size == 1:
            return {}
        rows = sum(job.plan.length for job in jobs)
        widest: dict[torch.dtype, int] = {}
        for entry in self._table.entries.values():
            widest[entry.dtype] = max(widest.get(entry.dtype, 0), entry.width)
        return {dtype: torch.zeros(rows * width, dtype=dtype, device=slab.device) for dtype, width in widest.items()}

    def share(self, jobs: Sequence[Job], slab: Slab, buffers: dict[torch.dtype, torch.Tensor]) -> None:
        """Gives this rank's rows to the others and takes theirs. Never leaves out a collective, whatever fails."""
        if self._ranks.size == 1:
            return
        deferred = Deferred()
        lengths = [job.plan.length for job in jobs]
        for index, name in enumerate(self._order):
            entry = self._table[name]
            for owner, first, last in self._owned(index, entry):
                packed = buffers[entry.dtype][: sum(lengths) * (last - first)].view(-1, last - first)
                with deferred.keeping():
                    if owner == self._ranks.rank:
                        torch.cat([_stored(slab, entry, job, first, last) for job in jobs], out=packed)
                self._ranks.broadcast(packed, owner)
                with deferred.keeping():
                    if owner != self._ranks.rank:
                        for job, rows in zip(jobs, packed.split(lengths), strict=True):
                            slab.write(name, job.slot, rows, first_output=first)
        deferred.raise_first()

    def _owned(self, index: int, entry: Entry) -> list[tuple[int, int, int]]:
        """Rank, first and last output of each part of a layer."""
        if self._sharing is Sharing.LAYERS:
            return [(index % self._ranks.size, 0, entry.width)]
        return [
            (rank, rank * entry.width // self._ranks.size, (rank + 1) * entry.width // self._ranks.size)
            for rank in range(self._ranks.size)
        ]

    def _first_output(self, entry: Entry) -> int:
        return 0 if self._sharing is Sharing.LAYERS else self._owned(0, entry)[self._ranks.rank][1]

    def _parts(self, name: str) -> list[Part]:
        """Weight and bias of a layer, or this rank's rows of them."""
        entry = self._table[name]
        first, last = 0, entry.width
        if self._sharing is Sharing.OUTPUTS:
            _, first, last = self._owned(0, entry)[self._ranks.rank]
        return [Part(f"{name}.{tensor}", first, last) for tensor in ("weight", "bias")[: 1 + entry.bias]]

    def _stream(
        self, names: Sequence[str], device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        """Each layer's weight and bias in turn, in one buffer.

        While one computes, the storage reads the next one into the page cache. A second buffer, to copy the next layer
        while this one computes, makes builds slower: what was just copied is in the processor's cache (370 MB in the
        page cache on 2 cores: one plan 0.037 s with one buffer and 0.051 s with two, seven 0.14 and 0.18 s).
        """
        layers = [self._parts(name) for name in names]
        buffer = _buffer(max(map(self._layer_bytes, layers), default=0), device)
        with ReadAhead(self._source) as storage:
            for near in layers[:_NEAR]:
                storage.ask(near)
            for index, name in enumerate(names):
                stored = self._read_layer(layers[index], buffer)
                for near in layers[index + _NEAR : index + _NEAR + 1]:
                    storage.ask(near)
                storage.done(layers[index])
                weight, *bias = (self._as_computed(tensor, name, device) for tensor in stored)
                yield name, weight, bias[0] if bias else None

    def _read_layer(self, parts: Sequence[Part], buffer: torch.Tensor) -> list[torch.Tensor]:
        """Reads the tensors of a layer one behind the other into the buffer, aligned as they lie in their file.

        A mapped weight has that alignment, and on a CPU the bits of a float32 product of one row depend on it: with the
        weight 4, 8 or 24 bytes off a cache line most elements differ (torch 2.13, MKL; bfloat16 does not care).
        """
        tensors: list[torch.Tensor] = []
        address = buffer.data_ptr()
        for part in parts:
            offset, nbytes = part.span(self._source.places[part.name])
            # The loader copies, and so aligns, what is not even aligned to its dtype.
            address += ((offset if offset % _itemsize(self._source, part) == 0 else 0) - address) % _LINE_BYTES
            tensors.append(self._source.read(part, buffer[address - buffer.data_ptr() :]))
            self._read(nbytes)
            address += nbytes
        return tensors

    def _layer_bytes(self, parts: Sequence[Part]) -> int:
        return sum(part.span(self._source.places[part.name])[1] + _LINE_BYTES for part in parts)

    def _as_computed(self, stored: torch.Tensor, name: str, device: torch.device) -> torch.Tensor:
        return stored.to(device=device, dtype=self._computed_in(name))

    def _computed_in(self, name: str) -> torch.dtype:
        return torch.float32 if self._precision is Precision.FP32 else self._table[name].dtype


def _itemsize(source: WeightSource, part: Part) -> int:
    dtype = source.places[part.name].dtype
    return 1 if dtype is None else dtype.itemsize


def _buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Host memory to read into; page-locked for a device, which then copies from it directly."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _file_order(source: WeightSource, name: str) -> tuple[int, int]:
    place = source.places[f"{name}.weight"]
    return place.file, place.offset


def _distinct_rows(rows: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Those to store, if the others are really theirs."""
    if plan.rows_are_distinct:
        return rows
    stored = rows[list(plan.first_rows)]
    if not torch.equal(stored[list(plan.row_index)], rows):
        raise PlansRefused(
            RequestReason.ROWS_DIFFER,
            f"rows of equal conditioning differ by their place among {plan.rows} on this device, so that they cannot "
            "be stored once; send smaller batches or set --adaln-cache off",
        )
    return stored


def _stored(slab: Slab, entry: Entry, job: Job, first: int, last: int) -> torch.Tensor:
    return slab.rows[entry.dtype][job.slot, : job.plan.length, entry.offset + first : entry.offset + last]


@contextmanager
def _full_precision() -> Iterator[None]:
    """float32 matrix products in float32, whatever the process has chosen for its own."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
