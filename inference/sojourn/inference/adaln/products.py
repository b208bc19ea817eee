"""The products of a build: which plans one of them takes, and where its rows go."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from sojourn.inference.adaln.plans import Plan
from sojourn.inference.adaln.refusals import PlansRefused, RequestReason
from sojourn.inference.adaln.runs import Run, runs
from sojourn.inference.adaln.slab import Slab
from torch.nn import functional


@dataclass(frozen=True, eq=False)
class Job:
    """A plan, the reserved slot for it, and what the projections read.

    Attributes:
        conditioning: By projection, [M, in].
    """

    plan: Plan
    slot: int
    conditioning: Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Batch:
    """Plans whose rows one product makes.

    Attributes:
        conditioning: By projection, [M of all plans, in].
        places: Which of the rows are stored, and where in the slab.
        repeated: Plans some of whose rows stand for others, each with its first row in the product.
    """

    conditioning: Mapping[str, torch.Tensor]
    places: tuple[Run, ...]
    repeated: tuple[tuple[Plan, int], ...]

    @classmethod
    def of(cls, jobs: Sequence[Job], slab: Slab) -> "Batch":
        """The jobs' plans, one behind the other."""
        ends = itertools.accumulate(job.plan.rows for job in jobs)
        placed = [(job, end - job.plan.rows) for job, end in zip(jobs, ends, strict=True)]
        pairs = [
            (slab.first_row(job.slot) + stored, first + made)
            for job, first in placed
            for stored, made in enumerate(job.plan.first_rows)
        ]
        repeated = tuple((job.plan, first) for job, first in placed if not job.plan.rows_are_distinct)
        return cls(_joined(jobs), tuple(runs(pairs)), repeated)

    def project(
        self, name: str, weight: torch.Tensor, bias: torch.Tensor | None, slab: Slab, *, first_output: int
    ) -> None:
        """Makes some outputs of one projection and stores them.

        Args:
            name: The projection.
            weight: [outputs, in].
            bias: [outputs], or None.
            slab: Where the rows go.
            first_output: Which output of the projection the first row of `weight` makes.

        Raises:
            PlansRefused: Rows that were to be stored once are not equal.
        """
        rows = functional.linear(self.conditioning[name], weight, bias)
        self._check_repeated(rows)
        slab.write(name, rows, self.places, first_output=first_output)

    def _check_repeated(self, rows: torch.Tensor) -> None:
        """Rows that are not stored must equal those that stand for them."""
        for plan, first in self.repeated:
            made = rows[first : first + plan.rows]
            if not torch.equal(made[[plan.first_rows[row] for row in plan.row_index]], made):
                raise PlansRefused(
                    RequestReason.ROWS_DIFFER,
                    f"rows of equal conditioning differ by their place among {plan.rows} on this device, so that they "
                    "cannot be stored once; send smaller batches or set --adaln-cache off",
                )


def batches(jobs: Sequence[Job], together: frozenset[int], slab: Slab) -> tuple[Batch, ...]:
    """Plans with the row counts `together` in one product, ordered by count, every other plan in its own."""
    joined = sorted((job for job in jobs if job.plan.rows in together), key=lambda job: job.plan.rows)
    alone = [[job] for job in jobs if job.plan.rows not in together]
    return tuple(Batch.of(group, slab) for group in [joined, *alone] if group)


def _joined(jobs: Sequence[Job]) -> Mapping[str, torch.Tensor]:
    """Most families have one conditioning vector for all projections: joined once."""
    joined: dict[tuple[int, ...], torch.Tensor] = {}
    by_name = {}
    for name in jobs[0].conditioning:
        vectors = [job.conditioning[name] for job in jobs]
        key = tuple(map(id, vectors))
        if key not in joined:
            joined[key] = vectors[0] if len(vectors) == 1 else torch.cat(vectors)
        by_name[name] = joined[key]
    return by_name
