"""A transformer with four modulation projections, and a cache over it, small enough to build thousands of times."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from sojourn.inference.adaln.cache import PlanCache
from sojourn.inference.adaln.counters import Counters, Tier
from sojourn.inference.adaln.family import Family, Inputs
from sojourn.inference.adaln.host import HostTier
from sojourn.inference.adaln.plans import Plan
from sojourn.inference.adaln.projection import Projector
from sojourn.inference.adaln.ranks import OneRank, Ranks, Sharing
from sojourn.inference.adaln.replace import projections_of
from sojourn.inference.adaln.settings import Precision
from sojourn.inference.adaln.slab import Slab
from sojourn.inference.adaln.store import PlanStore
from sojourn.inference.adaln.streams import OneStream, Streams
from sojourn.inference.adaln.table import Table
from sojourn.inference.adaln.weights import Part, Place
from torch import nn
from torch.nn import functional

CPU = torch.device("cpu")
EMBEDDED = 64  # inputs of a projection: as many as it takes for a product to be tried in other ways


class Block(nn.Module):
    def __init__(self, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.modulation = nn.Linear(EMBEDDED, outputs, dtype=dtype)

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        shift, scale = self.modulation(functional.silu(temb).to(self.modulation.weight.dtype)).chunk(2, dim=-1)
        return x * (1 + scale.sum()) + shift.sum()


class Toy(nn.Module):
    """Projections of two dtypes, of different widths."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.time_embedder = nn.Linear(1, EMBEDDED)
        dtypes = [torch.bfloat16, torch.float32, torch.bfloat16]
        self.blocks = nn.ModuleList(Block(12 + 4 * index, dtypes[index % 3]) for index in range(blocks))
        self.norm_out = Block(6, torch.bfloat16)

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        temb = self.time_embedder(timestep[:, None].float())
        for block in [*self.blocks, self.norm_out]:
            x = block(x, temb)
        return x


def embed(transformer: nn.Module, inputs: Inputs) -> torch.Tensor:
    return functional.silu(transformer.time_embedder(inputs["timestep"][:, None].float()))


PROJECTIONS = ["blocks.0.modulation", "blocks.1.modulation", "blocks.2.modulation", "norm_out.modulation"]
TOY = Family(
    name="toy",
    transformer="Toy",
    projections=r"(blocks\.\d+|norm_out)\.modulation",
    embedders="time_embedder",
    inputs=("timestep",),
    embed=embed,
    forwards=lambda value, config: [{"timestep": timestep} for timestep in value("timesteps")],
    widths={"one": 1, "many": 4},
)


def toy(seed: int = 0) -> Toy:
    torch.manual_seed(seed)
    return Toy().eval().requires_grad_(False)


class Injected(Exception):
    """A failure that a test has injected."""


@dataclass
class MemorySource:
    """Weights in memory that record who asks for what, and fail where told."""

    tensors: Mapping[str, torch.Tensor]
    fail_at: str | None = None
    fail_check: bool = False
    cached: bool = False
    reads: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, transformer: nn.Module) -> "MemorySource":
        return cls({name: tensor.clone() for name, tensor in transformer.state_dict().items()})

    @property
    def places(self) -> Mapping[str, Place]:
        return {
            name: Place(0, index * 64, tensor.nbytes, tuple(tensor.shape), tensor.dtype)
            for index, (name, tensor) in enumerate(self.tensors.items())
        }

    def check(self) -> None:
        if self.fail_check:
            raise Injected("check")

    def absent(self, parts: Iterable[Part]) -> list[Part]:
        return [] if self.cached else list(parts)

    def read_cached(self, part: Part, into: memoryview) -> bool:
        if self.cached:
            self.read(part, into)
        return self.cached

    def read(self, part: Part, into: memoryview) -> None:
        self.reads.append(part.name)
        if part.name == self.fail_at:
            raise Injected(part.name)
        rows = self.tensors[part.name][part.first : part.last].reshape(-1)
        torch.frombuffer(into, dtype=torch.uint8).copy_(rows.view(torch.uint8))

    def forget(self, parts: Iterable[Part]) -> None:
        self.forgotten += [part.name for part in parts]


@dataclass
class Rig:
    """A cache with everything that a test looks at."""

    cache: PlanCache
    transformer: Toy
    source: MemorySource
    counters: Counters

    @property
    def keys(self) -> list[bytes]:
        return list(self.cache.slots.published)

    def build(self, *timesteps: list[float]) -> None:
        """Runs a request to its end: its plans are pinned no longer."""
        self.cache.prepare([step(*values) for values in timesteps]).release()

    def holds(self, *values: float) -> bool:
        return plan(*values).key in self.cache.slots.published

    def check(self) -> None:
        """The invariants of the contract."""
        slots, slab = self.cache.slots, self.cache.slab
        published = set(slots.published.values())
        assert slots.free | slots.reserved | published == set(range(slots.capacity))
        assert len(slots.free) + len(slots.reserved) + len(published) == slots.capacity
        assert {slot for slot in range(slab.plans) if slab.lengths[slot] > 0} == published

    def rows(self, name: str, *values: float) -> torch.Tensor:
        """The published rows of a plan, as a forward would look them up."""
        (found,) = self.cache.find(step(*values))
        return self.cache.slab.look_up(name, found.rows)


def make_rig(
    *,
    plans: int = 4,
    width: int = 4,
    pages: int = 0,
    pinned: bool = False,
    store: Callable[[Table, Counters], PlanStore] | None = None,
    streams: Streams | None = None,
    ranks: Ranks | None = None,
    sharing: Sharing = Sharing.LAYERS,
    precision: Precision = Precision.MATCH,
    available_bytes: Callable[[], int] | None = None,
    seed: int = 0,
) -> Rig:
    transformer = toy(seed)
    table = Table.of(projections_of(transformer, TOY))
    source = MemorySource.of(transformer)
    counters = Counters()
    one = ranks or OneRank()
    cache = PlanCache(
        family=TOY,
        slab=Slab(table, plans=plans, width=width, device=CPU),
        projector=Projector(
            transformer, TOY, table, source, ranks=one, sharing=sharing, precision=precision, read=counters.read
        ),
        observer=counters,
        host=HostTier(
            table,
            pages,
            pinned=pinned,
            evicted=lambda count: counters.evicted(Tier.HOST, count),
            available_bytes=available_bytes,
        ),
        store=store(table, counters) if store else None,
        streams=streams or OneStream(),
        ranks=one,
    )
    return Rig(cache, transformer, source, counters)


def step(*values: float) -> Inputs:
    return {"timestep": torch.tensor(values, dtype=torch.float32)}


def plan(*values: float) -> Plan:
    return Plan.of(step(*values), len(values))


def fresh_rows(transformer: Toy, *values: float) -> dict[str, torch.Tensor]:
    """What the resident projections give, [M, out] of each."""
    read = embed(transformer, step(*values))
    modules = dict(transformer.named_modules())
    return {name: module(read.to(module.weight.dtype)) for name, module in modules.items() if TOY.is_projection(name)}
