"""What the step cache costs in the picture, as measured, one entry for each checkpoint and dtype.

The table that comes with Sojourn is `measured.json`; `sojourn serve --step-cache-table` adds another. An entry is made
by `python bench/step_cache.py MODEL`, which says in `provenance` how. Without an entry for the very checkpoint (by its
fingerprint) tier `high` is refused: an error that nobody has measured is no error bound.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from sojourn.inference.errors import SojournError

SHIPPED = Path(__file__).with_name("measured.json")


class TableUnreadable(SojournError):
    """A table of measured errors is not one; the message says where."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One entry.

    Attributes:
        fingerprint: SHA-256 over the checkpoint's tensors.
        model: Its name, for people.
        transformer: Class of its transformer.
        dtype: Of the computation, such as "bfloat16".
        threshold: Relative change of the first block's output under which the other blocks are skipped.
        workflows: Those that were measured.
        min_steps, max_steps: Fewest and most points of the schedules that were measured.
        clips: How many clips were compared, each with the lossless one of its seed.
        lowest_psnr_db, mean_psnr_db: Peak signal-to-noise ratio of the frames, of the worst clip and on average.
        lowest_ssim: Structural similarity of the frames of the worst clip, from 0 to 1.
        largest_latents_error: Largest root mean square error of a clip's latents, relative to theirs.
        skipped_share: Share of the evaluations that were skipped, from 0 to 1.
        provenance: Command, versions, device and day.
    """

    fingerprint: str
    model: str
    transformer: str
    dtype: str
    threshold: float
    workflows: tuple[str, ...]
    min_steps: int
    max_steps: int
    clips: int
    lowest_psnr_db: float
    mean_psnr_db: float
    lowest_ssim: float
    largest_latents_error: float
    skipped_share: float
    provenance: str

    def obstacle(self, *, workflow: str, steps: int) -> str | None:
        """Says why a request is outside of what was measured; None where it is within."""
        if workflow not in self.workflows:
            return f"it was measured for {', '.join(self.workflows)}, not for {workflow}"
        if not self.min_steps <= steps <= self.max_steps:
            return f"it was measured from {self.min_steps} to {self.max_steps} steps, not for {steps}"
        return None


def read_table(path: Path) -> tuple[Measured, ...]:
    """Reads a table.

    Raises:
        TableUnreadable: It is no list of entries, or an entry lacks a field or has one too many.
    """
    try:
        entries = json.loads(path.read_text("utf-8"))
        return tuple(_entry(entry) for entry in entries)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TableUnreadable(f"{path}: no table of measured errors: {error}") from error


def _entry(values: dict[str, object]) -> Measured:
    known = {field.name for field in fields(Measured)}
    if set(values) != known:
        raise ValueError(f"an entry has fields {sorted(values)} and not {sorted(known)}")
    return Measured(**(values | {"workflows": tuple(values["workflows"])}))  # type: ignore[arg-type]


def write_table(path: Path, entries: Iterable[Measured]) -> None:
    """Writes a table, in a stable order."""
    ordered = sorted(entries, key=lambda entry: (entry.model, entry.dtype))
    path.write_text(json.dumps([asdict(entry) for entry in ordered], indent=2, sort_keys=True) + "\n", "utf-8")


def find(table: Sequence[Measured], *, fingerprint: str, dtype: str) -> Measured | None:
    """The entry of a checkpoint and dtype; the last one of several, so that a later table replaces an earlier one."""
    matching = [entry for entry in table if (entry.fingerprint, entry.dtype) == (fingerprint, dtype)]
    return matching[-1] if matching else None
