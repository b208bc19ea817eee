"""Copies of many rows as few copies of many rows each."""

from collections.abc import Iterable, Iterator

import torch

Rows = dict[torch.dtype, torch.Tensor]
Run = tuple[int, int, int]
"""First row of the target, first row of the source, and how many."""


def copy_rows(targets: Rows, sources: Rows, pairs: Iterable[tuple[int, int]]) -> None:
    """Copies rows of `sources` into rows of `targets`, without waiting where memory and device allow.

    Args:
        targets: [rows, R] by dtype.
        sources: [rows, R] by dtype.
        pairs: (row of the target, row of the source).
    """
    for target, source, count in runs(pairs):
        for dtype, rows in targets.items():
            rows[target : target + count].copy_(sources[dtype][source : source + count], non_blocking=True)


def runs(pairs: Iterable[tuple[int, int]]) -> Iterator[Run]:
    """Stretches in which target and source both go up by one."""
    start: tuple[int, int] | None = None
    count = 0
    for target, source in pairs:
        if start is not None and (target, source) == (start[0] + count, start[1] + count):
            count += 1
            continue
        if start is not None:
            yield *start, count
        start, count = (target, source), 1
    if start is not None:
        yield *start, count
