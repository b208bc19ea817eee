"""The plan cache of one transformer, from its empty model to its hooked forward."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sojourn.inference.adaln.cache import PlanCache
from sojourn.inference.adaln.counters import Observer, Tier
from sojourn.inference.adaln.cursor import Cursor
from sojourn.inference.adaln.families import Family, Inputs
from sojourn.inference.adaln.fingerprint import arithmetic_of, rows_fingerprint
from sojourn.inference.adaln.host import HostTier, page_capacity
from sojourn.inference.adaln.lease import Lease
from sojourn.inference.adaln.projection import Projector
from sojourn.inference.adaln.ranks import OneRank, Ranks, Sharing
from sojourn.inference.adaln.replace import check_not_compiled, stand_ins
from sojourn.inference.adaln.settings import PlanCacheSettings, Precision
from sojourn.inference.adaln.slab import Slab
from sojourn.inference.adaln.store import PlanStore
from sojourn.inference.adaln.streams import streams_for
from sojourn.inference.adaln.table import Table
from sojourn.inference.adaln.weights import MappedWeights
from torch import nn


class CachedTransformer:
    """A transformer that runs on stored rows.

    Attributes:
        name: Of the component.
        cache: Its plans.
    """

    def __init__(self, name: str, transformer: nn.Module, cache: PlanCache, precision: Precision) -> None:
        self.name = name
        self.cache = cache
        self._transformer = transformer
        self._precision = precision
        self._cursor = Cursor(cache.slab, cache.find)
        for stand_in in stand_ins(transformer):
            stand_in.attach(self._cursor)
        self._signature = inspect.signature(transformer.forward)
        transformer.register_forward_pre_hook(self._begin, with_kwargs=True)
        transformer.register_forward_hook(self._end, always_call=True)

    def prepare(self, forwards: Sequence[Inputs]) -> Lease:
        """Makes the rows of a request's forwards available; see `PlanCache.prepare`.

        Raises:
            ModelRefused: The transformer has been compiled since, and rows promise the bits of eager mode.
        """
        if self._precision is Precision.MATCH:
            check_not_compiled(self._transformer)
        return self.cache.prepare(forwards)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        names = self.cache.family.inputs
        given = kwargs if all(name in kwargs for name in names) else self._bound(args, kwargs)
        self._cursor.begin({name: given[name] for name in names})

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._cursor.end()

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._signature.bind_partial(*args, **kwargs).arguments


def open_transformer(
    name: str,
    transformer: nn.Module,
    *,
    family: Family,
    table: Table,
    weights: MappedWeights,
    settings: PlanCacheSettings,
    host_bytes: int,
    host_budget_bytes: int,
    device: torch.device,
    observer: Observer,
    available_bytes: Callable[[], int] | None = None,
    ranks: Ranks | None = None,
    sharing: Sharing = Sharing.LAYERS,
) -> CachedTransformer:
    """Allocates the tiers of a transformer whose projections have been replaced, and hooks its forward.

    Args:
        name: Of the component.
        transformer: With stand-ins; its embedders are loaded.
        family: Of the transformer.
        table: Its projections.
        weights: Its checkpoint.
        settings: Of the process.
        host_bytes: This transformer's part of the host memory that is set for rows.
        host_budget_bytes: What this rank may take of the host's memory.
        device: Where it runs.
        observer: Counts.
        available_bytes: Free memory of the host, measured again whenever the tier grows.
        ranks: Who shares the transformer.
        sharing: What they divide.
    """
    ranks = ranks or OneRank()
    capacity = page_capacity(table, configured_bytes=host_bytes, budget_bytes=host_budget_bytes)
    host = HostTier(
        table,
        ranks.minimum(capacity),
        pinned=device.type == "cuda",
        evicted=lambda plans: observer.evicted(Tier.HOST, plans),
        available_bytes=available_bytes,
    )
    projector = Projector(
        transformer,
        family,
        table,
        weights,
        ranks=ranks,
        sharing=sharing,
        precision=settings.precision,
        read=observer.read,
    )
    cache = PlanCache(
        family=family,
        slab=Slab(table, plans=settings.plans, width=settings.width, device=device),
        projector=projector,
        observer=observer,
        host=host,
        store=_store(transformer, family, table, weights, settings, device, observer, ranks, sharing),
        streams=streams_for(device, pinned=host.pinned),
        ranks=ranks,
    )
    return CachedTransformer(name, transformer, cache, settings.precision)


def _store(
    transformer: nn.Module,
    family: Family,
    table: Table,
    weights: MappedWeights,
    settings: PlanCacheSettings,
    device: torch.device,
    observer: Observer,
    ranks: Ranks,
    sharing: Sharing,
) -> PlanStore | None:
    if settings.store is None:
        return None
    arithmetic = arithmetic_of(
        device, dtypes=table.row_elements, precision=settings.precision, sharing=sharing, ranks=ranks.size
    )
    fingerprint = rows_fingerprint(
        weights,
        family,
        config=dict(getattr(transformer, "config", {})),
        arithmetic=arithmetic,
        memory=settings.store / "fingerprints",
    )
    return PlanStore(settings.store, settings.store_bytes, fingerprint, table, observer.store_rejected)
