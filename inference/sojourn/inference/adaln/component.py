"""The plan cache of one transformer, from its empty model to its hooked forward."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sojourn.inference.adaln.adapters import guard_adapters
from sojourn.inference.adaln.cache import Check, PlanCache, go_on
from sojourn.inference.adaln.counters import Observer, Tier
from sojourn.inference.adaln.cursor import Cursor
from sojourn.inference.adaln.family import Family, Inputs
from sojourn.inference.adaln.fingerprint import arithmetic_of, rows_fingerprint
from sojourn.inference.adaln.host import HostTier, page_capacity
from sojourn.inference.adaln.lease import Lease
from sojourn.inference.adaln.projection import Projector
from sojourn.inference.adaln.ranks import OneRank, Ranks, Sharing
from sojourn.inference.adaln.refusals import ModelReason, ModelRefused
from sojourn.inference.adaln.replace import check_unchanged, stand_ins
from sojourn.inference.adaln.settings import PlanCacheSettings, Precision
from sojourn.inference.adaln.slab import Slab
from sojourn.inference.adaln.store import PlanStore
from sojourn.inference.adaln.streams import streams_for
from sojourn.inference.adaln.table import Table
from sojourn.inference.adaln.weights import WeightFiles
from sojourn.inference.adaln.witness import Witness
from torch import nn


class CachedTransformer:
    """A transformer that runs on stored rows.

    Attributes:
        name: Of the component.
        cache: Its plans.
    """

    def __init__(
        self,
        name: str,
        transformer: nn.Module,
        cache: PlanCache,
        precision: Precision,
        *,
        witness: Witness | None = None,
    ) -> None:
        self.name = name
        self.cache = cache
        self._transformer = transformer
        self._precision = precision
        self._cursor = Cursor(cache.slab, cache.find, witness=witness)
        for stand_in in stand_ins(transformer):
            stand_in.attach(self._cursor)
        guard_adapters(transformer, cache.family)
        self._signature = inspect.signature(transformer.forward)
        transformer.register_forward_pre_hook(self._begin, with_kwargs=True)
        transformer.register_forward_hook(self._end, always_call=True)

    def __deepcopy__(self, memo: object) -> "CachedTransformer":
        """Pipelines copy their blocks with what they refer to; there is one transformer all the same."""
        return self

    def prepare(self, forwards: Sequence[Inputs], *, check: Check = go_on) -> Lease:
        """Makes the rows of a request's forwards available; see `PlanCache.prepare`.

        Raises:
            ModelRefused: The transformer has been compiled or been given an adapter since.
        """
        check_unchanged(self._transformer, self._precision)
        return self.cache.prepare(forwards, check=check)

    def forwards(self, value: Callable[[str], Any]) -> list[Inputs]:
        """The inputs of each forward of a request.

        Args:
            value: What the pipeline's blocks have left before the denoising loop, by name.

        Raises:
            ModelRefused: The family has no modular blocks.
        """
        family = self.cache.family
        if family.forwards is None:
            raise ModelRefused(
                ModelReason.NO_BLOCKS,
                f"{family.transformer} has no modular pipeline whose schedule could be known ahead; hand the inputs of "
                "each forward to `prepare`, or set --adaln-cache off",
            )
        return family.forwards(value, getattr(self._transformer, "config", {}))

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._cursor.begin(self._bound(args, kwargs) if args else kwargs)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._cursor.end(has_output=output is not None)

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._signature.bind_partial(*args, **kwargs).arguments


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a transformer runs, and what it may take there.

    Attributes:
        device: Of the transformer and of the slab.
        host_bytes: Its part of the host memory that is set for rows.
        host_budget_bytes: What it may take of the host's memory, whatever is set.
        available_bytes: Free memory of the host, measured again whenever the tier grows.
        ranks: Who shares the transformer.
        sharing: What they divide.
    """

    device: torch.device
    host_bytes: int
    host_budget_bytes: int
    available_bytes: Callable[[], int] | None = None
    ranks: Ranks = field(default_factory=OneRank)
    sharing: Sharing = Sharing.LAYERS


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """A transformer whose projections have been replaced.

    Attributes:
        name: Of the component.
        transformer: With stand-ins; its embedders are loaded.
        family: Of the transformer.
        table: Its projections.
        weights: Its checkpoint.
    """

    name: str
    transformer: nn.Module
    family: Family
    table: Table
    weights: WeightFiles


def open_transformer(
    part: Replaced, settings: PlanCacheSettings, place: Place, observer: Observer
) -> CachedTransformer:
    """Allocates the tiers of a transformer and hooks its forward.

    Args:
        part: The transformer.
        settings: Of the process.
        place: Where it runs.
        observer: Counts.
    """
    host = _host_tier(part.table, place, observer)
    cache = PlanCache(
        family=part.family,
        slab=Slab(part.table, plans=settings.plans, width=settings.width, device=place.device),
        projector=Projector(
            part.transformer,
            part.family,
            part.table,
            part.weights,
            ranks=place.ranks,
            sharing=place.sharing,
            precision=settings.precision,
            read=observer.read,
        ),
        observer=observer,
        host=host,
        store=_store(part, settings, place, observer),
        streams=streams_for(place.device, pinned=host.pinned),
        ranks=place.ranks,
    )
    named = part.name in settings.families
    witness = Witness(part.transformer, part.family, part.name) if named else None
    return CachedTransformer(part.name, part.transformer, cache, settings.precision, witness=witness)


def _host_tier(table: Table, place: Place, observer: Observer) -> HostTier:
    """As many pages as all ranks can have."""
    pages = page_capacity(table, configured_bytes=place.host_bytes, budget_bytes=place.host_budget_bytes)
    return HostTier(
        table,
        place.ranks.minimum(pages),
        pinned=place.device.type == "cuda",
        evicted=lambda plans: observer.evicted(Tier.HOST, plans),
        available_bytes=place.available_bytes,
    )


def _store(part: Replaced, settings: PlanCacheSettings, place: Place, observer: Observer) -> PlanStore | None:
    """The store, bound to what makes this transformer's rows."""
    if settings.store is None:
        return None
    fingerprint = rows_fingerprint(
        part.weights,
        part.family,
        config=dict(getattr(part.transformer, "config", {})),
        arithmetic=arithmetic_of(
            place.device,
            dtypes=part.table.row_elements,
            precision=settings.precision,
            sharing=place.sharing,
            ranks=place.ranks.size,
        ),
        memory=settings.store / "fingerprints",
    )
    return PlanStore(settings.store, settings.store_bytes, fingerprint, part.table, observer.store_rejected)
