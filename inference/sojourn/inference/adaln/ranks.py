"""Several processes that build the same plans together.

Every rank sees the same requests and takes the same decisions; what only one of them can know (its host memory, a file
that it cannot read, an error) is agreed upon before anyone acts on it. No rank leaves a sequence of collectives half
way through, so an error on one of them fails the build on all and leaves the group usable.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Protocol

import torch
import torch.distributed as dist
from sojourn.inference.adaln.refusals import BuildFailedElsewhere


class Sharing(StrEnum):
    """What the ranks divide between them."""

    LAYERS = "layers"
    """Rank r projects the layers l ≡ r (mod ranks) with the stock GEMM: where projections are replicated."""
    OUTPUTS = "outputs"
    """Rank r projects its own rows of every weight: where the engine shards them, which is another GEMM."""


class Ranks(Protocol):
    """The processes that share a transformer."""

    @property
    def rank(self) -> int:
        """This process."""

    @property
    def size(self) -> int:
        """How many there are."""

    def minimum(self, value: int) -> int:
        """The least of all ranks' values."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrites a contiguous tensor with that of the source rank."""


class OneRank:
    """A process on its own."""

    rank = 0
    size = 1

    def minimum(self, value: int) -> int:
        """The value."""
        return value

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Nothing to do."""


class DistributedRanks:
    """A torch.distributed process group.

    Args:
        device: Where the group's backend wants its tensors.
        group: None for all processes.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._device = device
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def minimum(self, value: int) -> int:
        """The least of all ranks' values."""
        agreed = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self._group)
        return int(agreed.item())

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrites a contiguous tensor with that of the source rank of the group."""
        dist.broadcast(tensor, group_src=source, group=self._group)


@contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """A block that succeeds on all ranks or fails on all.

    What it raises is raised here, and on the other ranks `BuildFailedElsewhere`. The block itself holds no collective
    that an exception could skip.
    """
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
    all_well = ranks.minimum(0 if failure else 1) == 1
    if failure is not None:
        raise failure
    if not all_well:
        raise BuildFailedElsewhere("another rank failed in this build; the plans are not published, try again")


class Deferred:
    """Keeps the first failure of blocks between collectives, so that this rank still takes part in all of them."""

    def __init__(self) -> None:
        self._failure: BaseException | None = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Runs a block unless an earlier one has failed."""
        try:
            yield
        except BaseException as error:
            self._failure = self._failure or error

    @property
    def failed(self) -> bool:
        """Whether a block has failed."""
        return self._failure is not None

    def raise_first(self) -> None:
        """Raises the first failure, if there was one."""
        if self._failure is not None:
            raise self._failure
