"""The rows of the plans on the device."""

from collections.abc import Sequence

import torch
from sojourn.inference.adaln.refusals import SettingRefused
from sojourn.inference.adaln.runs import Run
from sojourn.inference.adaln.settings import PLANS_SETTING, WIDTH_SETTING
from sojourn.inference.adaln.table import Table


class Slab:
    """Row buffers allocated once, written in place only: their pointers never move, and no state_dict holds them.

    Attributes:
        table: Where each projection's outputs lie within a row.
        plans: Slots P.
        width: The most distinct rows W that a slot can hold.
        lengths: [P] int64, distinct rows of the plan in a slot; 0 while the slot is not visible.
        rows: By dtype, [P, W, R] flat rows.
    """

    def __init__(self, table: Table, *, plans: int, width: int, device: torch.device) -> None:
        for setting, value in ((PLANS_SETTING, plans), (WIDTH_SETTING, width)):
            if value < 1:
                raise SettingRefused(setting, value, "must be at least 1")
        self.table = table
        self.plans = plans
        self.width = width
        self.lengths = torch.zeros(plans, dtype=torch.int64, device=device)
        self.rows = {
            dtype: torch.empty(plans, width, elements, dtype=dtype, device=device)
            for dtype, elements in table.row_elements.items()
        }
        flat = self.flat()
        self._outputs = {
            name: flat[entry.dtype][:, entry.offset : entry.offset + entry.width]
            for name, entry in table.entries.items()
        }

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.lengths.device

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.lengths.nbytes + sum(rows.nbytes for rows in self.rows.values())

    def hide(self, slots: Sequence[int]) -> None:
        """Makes slots invisible; always before one is written again."""
        for slot in slots:
            self.lengths[slot] = 0

    def show(self, lengths: dict[int, int]) -> None:
        """Makes slots visible with their lengths; always after the last write into them."""
        for slot, length in lengths.items():
            self.lengths[slot] = length

    def write(self, name: str, rows: torch.Tensor, places: Sequence[Run], *, first_output: int = 0) -> None:
        """Stores rows of one projection.

        Args:
            name: The projection.
            rows: [rows, outputs], the outputs beginning at `first_output` of the projection.
            places: Which of the rows go where: first number among all rows of the slab, first of `rows`, and count.
            first_output: Not 0 where these are not the projection's first outputs.
        """
        outputs, last_output = self._outputs[name], first_output + rows.shape[1]
        for target, source, count in places:
            outputs[target : target + count, first_output:last_output].copy_(rows[source : source + count])

    def look_up(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows of one projection, [M, outputs], by an index on the device.

        The gather reads no index on the host, so that a captured graph serves whatever rows the index names later.

        Args:
            name: The projection.
            rows: [M] int64 on the slab's device, numbers among all rows.
        """
        return self._outputs[name].index_select(0, rows)

    def flat(self) -> dict[torch.dtype, torch.Tensor]:
        """All rows one behind the other, [P · W, R] by dtype; row i of a slot is number slot · W + i."""
        return {dtype: rows.view(-1, rows.shape[-1]) for dtype, rows in self.rows.items()}

    def first_row(self, slot: int) -> int:
        """The number among all rows of a slot's first one."""
        return slot * self.width
