"""What one denoise step is conditioned on, and the key that names it: exact bits."""

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from sojourn.inference.adaln.refusals import PlansRefused, RequestReason

PlanKey = bytes
# Up to so many rows are stored as they are, though they be alike: equal inputs at different places of one product need
# not give equal bits (found with two rows of float32 and 24 outputs; torch 2.13, MKL). Beyond, a build compares them.
_KEPT_ROWS = 4
# Of one input in a key: more than any timesteps, guidance or sizes take.
_LONGEST_BYTES = 1024


@dataclass(frozen=True, eq=False)
class Plan:
    """Conditioning inputs and row count of one denoise step of one component.

    Attributes:
        inputs: What the time embedding reads, by the name of the forward's argument, with the dtypes in which the
            forward receives it; copies on the host. A tensor whose first extent is `rows` has a value per row, any
            other one for all.
        rows: Rows M that the forward gives to the projection GEMM. A projected row's last bits depend on M.
        key: The exact bits of `inputs` (of long ones the SHA-256) with their names, dtypes and shapes, and M: a
            projected row's last bits depend on M. No tolerance: 0.0 is not -0.0.
        row_index: For each of the M rows the stored row that it equals, in order of first occurrence. Few rows are
            stored as they are; of many, rows of equal inputs are stored once.
    """

    inputs: Mapping[str, torch.Tensor]
    rows: int
    key: PlanKey
    row_index: tuple[int, ...]

    @classmethod
    def of(cls, inputs: Mapping[str, torch.Tensor], rows: int) -> "Plan":
        """The plan of a forward that receives `inputs` and projects `rows` rows.

        Raises:
            PlansRefused: A value is NaN or infinite: no schedule yields it, and NaN equals nothing, not even itself.
            ValueError: `rows` is not positive.
        """
        if rows < 1:
            raise ValueError(f"a plan has at least one row, not {rows}")
        on_host = {
            name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in inputs.items()
        }
        _refuse_nonfinite(on_host)
        bits = {name: _bits(value) for name, value in on_host.items()}
        key = _key(on_host, bits, rows)
        return cls(inputs=on_host, rows=rows, key=key, row_index=_row_index(on_host, bits, rows))

    @property
    def length(self) -> int:
        """How many rows there are to store."""
        return max(self.row_index) + 1

    @cached_property
    def first_rows(self) -> tuple[int, ...]:
        """Where each stored row occurs first among the M rows."""
        return tuple(self.row_index.index(row) for row in range(self.length))

    @property
    def rows_are_distinct(self) -> bool:
        """Whether the stored rows are the M rows as they are."""
        return self.length == self.rows


def distinct(plans: Iterable[Plan]) -> list[Plan]:
    """The plans with different keys, in order of first occurrence."""
    by_key: dict[PlanKey, Plan] = {}
    for plan in plans:
        by_key.setdefault(plan.key, plan)
    return list(by_key.values())


def _refuse_nonfinite(inputs: Mapping[str, torch.Tensor]) -> None:
    for name, value in inputs.items():
        # A timestep has a few values, for which Python is the faster one.
        is_finite = all(map(math.isfinite, value.tolist())) if value.ndim == 1 else bool(torch.isfinite(value).all())
        if not is_finite:
            raise PlansRefused(
                RequestReason.NONFINITE,
                f"conditioning input {name} holds a NaN or infinity: {value.flatten()[:8].tolist()}",
            )


def _bits(value: torch.Tensor) -> bytes:
    return value.reshape(-1).view(torch.uint8).numpy().tobytes()


def _key(inputs: Mapping[str, torch.Tensor], bits: Mapping[str, bytes], rows: int) -> PlanKey:
    """Every part carries its length, so that no two different plans write the same bytes."""
    parts = [struct.pack("<I", rows)]
    for name in sorted(inputs):
        head = f"{name}:{inputs[name].dtype}:{tuple(inputs[name].shape)}".encode()
        parts += [struct.pack("<II", len(head), len(bits[name])), head, _short(bits[name])]
    return b"".join(parts)


def _short(bits: bytes) -> bytes:
    """The bits, or where they are many (text has megabytes) the digest that no other bits are known to have."""
    return bits if len(bits) <= _LONGEST_BYTES else hashlib.sha256(bits).digest()


def _row_index(inputs: Mapping[str, torch.Tensor], bits: Mapping[str, bytes], rows: int) -> tuple[int, ...]:
    """Rows are told apart by the bits of the inputs that have a value per row, where there are many."""
    if rows <= _KEPT_ROWS:
        return tuple(range(rows))
    per_row = [bits[name] for name, value in inputs.items() if value.ndim > 0 and value.shape[0] == rows]
    seen: dict[tuple[bytes, ...], int] = {}
    return tuple(seen.setdefault(tuple(_cut(part, row, rows) for part in per_row), len(seen)) for row in range(rows))


def _cut(part: bytes, row: int, rows: int) -> bytes:
    size = len(part) // rows
    return part[row * size : (row + 1) * size]
