"""Plans -> rows: the embedding and the projection, with the bits of each plan's own product with a whole weight.

A projected row's bits may depend on its place, on the row count of the product and on the extents and alignment of the
weight, and on the values of no other row. So plans share a product, and a weight is taken in pieces, only where a trial
has shown that neither changes a bit; otherwise every plan is projected at its own row count, as stock.
Each weight is read once for all plans of a build.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from sojourn.inference.adaln.family import Family
from sojourn.inference.adaln.lanes import Lanes
from sojourn.inference.adaln.layers import Layer, Span
from sojourn.inference.adaln.plans import Plan
from sojourn.inference.adaln.products import Batch, Job, batches
from sojourn.inference.adaln.ranks import Deferred, Ranks, Sharing
from sojourn.inference.adaln.runs import runs
from sojourn.inference.adaln.settings import Precision
from sojourn.inference.adaln.slab import Slab
from sojourn.inference.adaln.sweep import Sweep, Task
from sojourn.inference.adaln.table import Entry, Table
from sojourn.inference.adaln.trial import Trials, Verdict
from sojourn.inference.adaln.weights import WeightSource
from torch import nn


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
        self._trials = Trials()
        self.retarget(source)

    def retarget(self, source: WeightSource) -> None:
        """Reads from other weights from now on."""
        self._source = source
        # In the order of the files, so that a build is a sequential read.
        self._order = sorted(self._table, key=lambda name: _file_order(source, name))
        self._layers = [
            Layer.of(name, entry, Span(first, last), source, self._computed_in(name))
            for index, name in enumerate(self._order)
            for entry in [self._table[name]]
            for rank, first, last in self._owned(index, entry)
            if rank == self._ranks.rank
        ]

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
        lanes = Lanes.among(self._table.weight_bytes // self._ranks.size, slab.device)
        with _full_precision() if self._precision is Precision.FP32 else nullcontext():
            tasks = self._tasks(jobs, slab, lanes)
            sweep = Sweep(self._source, slab, check, self._read)
            sweep.run([task for task in tasks if task.in_pieces], lanes)
            sweep.run([task for task in tasks if not task.in_pieces], Lanes(0))

    def _tasks(self, jobs: Sequence[Job], slab: Slab, lanes: Lanes) -> list[Task]:
        """The layers of this rank, each in the fastest way that gives the stock bits."""
        rows = [job.plan.rows for job in jobs]
        verdicts: dict[object, Verdict] = {}
        joined: dict[frozenset[int], tuple[Batch, ...]] = {}
        tasks = []
        is_divided = slab.device.type == "cpu"
        for layer in self._layers:
            shape = layer.product, layer.spans if is_divided else (layer.whole,)
            if shape not in verdicts:
                verdicts[shape] = self._trials.verdict(*shape, rows, lanes, slab.device)
            verdict = verdicts[shape]
            if verdict.together not in joined:
                joined[verdict.together] = batches(jobs, verdict.together, slab)
            pieces = layer.pieces if is_divided and verdict.in_pieces else layer.undivided
            tasks.append(Task(layer, pieces, joined[verdict.together], verdict.in_pieces))
        return tasks

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
        stored = [slab.first_row(job.slot) + row for job in jobs for row in range(job.plan.length)]
        places = list(runs((place, row) for row, place in enumerate(stored)))
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
                        slab.write(name, packed, places, first_output=first)
        deferred.raise_first()

    def _owned(self, index: int, entry: Entry) -> list[tuple[int, int, int]]:
        """Rank, first and last output of each part of a layer."""
        if self._sharing is Sharing.LAYERS:
            return [(index % self._ranks.size, 0, entry.width)]
        return [
            (rank, rank * entry.width // self._ranks.size, (rank + 1) * entry.width // self._ranks.size)
            for rank in range(self._ranks.size)
        ]

    def _computed_in(self, name: str) -> torch.dtype:
        return torch.float32 if self._precision is Precision.FP32 else self._table[name].dtype


def _file_order(source: WeightSource, name: str) -> tuple[int, int]:
    place = source.places[f"{name}.weight"]
    return place.file, place.offset


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
