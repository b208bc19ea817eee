"""What stands in a transformer where a projection was: it returns stored rows, and the stock forward never knows."""

from typing import Protocol

import torch
from sojourn.inference.adaln.refusals import PlanMissing
from sojourn.inference.adaln.table import Projection
from torch import nn


class RowReader(Protocol):
    """Knows which plan the forward in progress runs on."""

    def rows(self, projection: str, conditioning: torch.Tensor) -> torch.Tensor:
        """The rows [M, out] of one projection for the forward in progress, M counting repeated rows.

        Args:
            projection: Its name.
            conditioning: [..., in], what the projection would read; a family that was named by hand is held against it.
        """


class StandIn(nn.Module):
    """Ignores the values of its input and returns the stored rows of its projection.

    `weight` is an empty buffer, for the callers that ask a Linear for its dtype or device; it is in no state_dict.
    """

    weight: torch.Tensor

    def __init__(self, name: str, projection: Projection, device: torch.device) -> None:
        super().__init__()
        self.name = name
        self.in_features = projection.inputs
        self.out_features = projection.width
        self.register_buffer("weight", torch.empty(0, dtype=projection.dtype, device=device), persistent=False)
        self._reader: RowReader | None = None

    def attach(self, reader: RowReader) -> None:
        """Says where rows come from."""
        self._reader = reader

    def forward(self, conditioning: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], as the Linear did.

        Raises:
            PlanMissing: No plan is at hand, or it was made for another number of rows or another dtype.
        """
        if self._reader is None:
            raise PlanMissing(f"{self.name}: the plan cache is not attached to the transformer yet")
        rows = self._reader.rows(self.name, conditioning)
        if conditioning.shape[:-1].numel() != rows.shape[0]:
            raise PlanMissing(
                f"{self.name}: the forward projects {conditioning.shape[:-1].numel()} rows, the plan was made for "
                f"{rows.shape[0]}; a row's last bits depend on their number"
            )
        if rows.dtype != self.weight.dtype:
            raise PlanMissing(
                f"{self.name}: the rows are {rows.dtype}, the transformer was cast to {self.weight.dtype}"
            )
        return rows.view(*conditioning.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """As a Linear prints itself."""
        return f"in_features={self.in_features}, out_features={self.out_features}, rows from the plan cache"
