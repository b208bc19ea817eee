"""The plan caches of a process: which components get one, and what the loader leaves out for it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from sojourn.inference.adaln.adapters import adapter_tensors, check_adapter
from sojourn.inference.adaln.component import CachedTransformer, Place, Replaced, open_transformer
from sojourn.inference.adaln.counters import Counters, Description, Observer, Snapshot
from sojourn.inference.adaln.families import family_named, family_of
from sojourn.inference.adaln.family import Family
from sojourn.inference.adaln.host import host_budget_bytes
from sojourn.inference.adaln.host_memory import available_bytes
from sojourn.inference.adaln.ranks import OneRank, Ranks
from sojourn.inference.adaln.refusals import ModelReason, ModelRefused
from sojourn.inference.adaln.replace import check_model, projections_of, replace_projections
from sojourn.inference.adaln.settings import Mode, PlanCacheSettings
from sojourn.inference.adaln.table import Table
from sojourn.inference.adaln.weights import WeightFiles
from sojourn.inference.adaln.witness import check_modules
from sojourn.inference.adaln.worth import check_worth
from sojourn.inference.families.projections import PROJECTIONS
from sojourn.inference.loading.components import Component, LeaveOut
from sojourn.inference.loading.folder import ComponentFolder
from torch import nn

_log = logging.getLogger(__name__)


@dataclass
class PlanCaches:
    """One cache per transformer that runs on stored rows, by the component's name.

    Attributes:
        settings: Of the process.
        device: Where the transformers run.
        observer: Counts, over all of them.
        ranks: Who shares the transformers.
        off_reason: Why there is no cache; None while there is one, or none was looked for.
    """

    settings: PlanCacheSettings
    device: torch.device
    observer: Observer = field(default_factory=Counters)
    ranks: Ranks = field(default_factory=OneRank)
    off_reason: ModelReason | None = None
    transformers: dict[str, CachedTransformer] = field(default_factory=dict)
    _tables: dict[str, tuple[Family, Table]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.settings.mode is Mode.OFF:
            self.off_reason = ModelReason.SETTING

    def __deepcopy__(self, memo: object) -> "PlanCaches":
        """Pipelines copy their blocks with what they refer to; there is one set of caches all the same."""
        return self

    def leave_out(self, part: ComponentFolder) -> LeaveOut | None:
        """What the loader calls on the empty model of a component; None where it is loaded whole."""
        if self.settings.mode is Mode.OFF:
            return None
        if self.settings.projected_as(part.name, part.class_name) not in PROJECTIONS:
            return None

        def replace(model: nn.Module, dtype_of: Callable[[str], torch.dtype]) -> frozenset[str]:
            return self._replace(part, model, dtype_of)

        return replace

    def _replace(
        self, part: ComponentFolder, model: nn.Module, dtype_of: Callable[[str], torch.dtype]
    ) -> frozenset[str]:
        """Puts stand-ins into an empty model; returns the tensors that are not to be loaded."""
        try:
            family = self._family(part, model)
            check_model(model, family)
            check_adapter(family, adapter_tensors(part.path))
            table = Table.of(projections_of(model, family, dtype_of))
            if self.settings.mode is Mode.AUTO:
                check_worth(self.settings, family, table)
        except ModelRefused as refusal:
            self._turn_off(refusal)
            return frozenset()
        left_out = frozenset(tensor for tensor in model.state_dict() if family.is_projection_tensor(tensor))
        self._tables[part.name] = family, replace_projections(model, family, dtype_of=dtype_of, device=self.device)
        return left_out

    def _family(self, part: ComponentFolder, model: nn.Module) -> Family:
        """The family that a component was said to be of, which its modules must bear out; else that of its class."""
        named = self.settings.families.get(part.name)
        family = family_of(part.class_name) if named is None else family_named(named)
        if named is not None:
            check_modules(model, family, part.name)
        return family.of_config(getattr(model, "config", {}))

    def _turn_off(self, refusal: ModelRefused) -> None:
        if self.settings.mode is Mode.ON:
            raise refusal
        if self.off_reason is not refusal.reason:
            _log.info("AdaLN plan cache off", extra={"reason": refusal.reason.value, "detail": str(refusal)})
        self.off_reason = refusal.reason

    def open(self, components: Mapping[str, Component], *, host_left_bytes: int | None = None) -> None:
        """Allocates the caches of the components whose projections were left out.

        Args:
            components: All of the model.
            host_left_bytes: What the memory plan leaves of the host; None where nobody has planned.

        Raises:
            ModelRefused: The cache was asked for and no component can have one.
        """
        if self.settings.mode is not Mode.OFF and not self._tables and self.off_reason is None:
            self._turn_off(_nothing_to_cache(components))
        share = max(1, len(self._tables))
        free = available_bytes() if host_left_bytes is None else min(available_bytes(), max(0, host_left_bytes))
        place = Place(
            device=self.device,
            host_bytes=self.settings.host_bytes // share,
            host_budget_bytes=host_budget_bytes(free, ranks=self.ranks.size) // share,
            available_bytes=available_bytes,
            ranks=self.ranks,
        )
        for name, (family, table) in self._tables.items():
            weights = WeightFiles([mapped.file for mapped in components[name].files])
            model = components[name].value
            part = Replaced(name=name, transformer=model, family=family, table=table, weights=weights)
            self.transformers[name] = open_transformer(part, self.settings, place, self.observer)
        if self.transformers:
            self.off_reason = None
            now = self.snapshot()
            sizes = {"weight_bytes": now.weight_bytes, "slab_bytes": now.device_bytes, "host_bytes": now.host_bytes}
            _log.info("AdaLN plan cache on", extra={"transformers": list(self.transformers), **sizes})
        self.observer.opened(self._description(), self.snapshot)

    def for_component(self, names: Any) -> CachedTransformer | None:
        """The cached transformer among the components of a workflow, if one of them is."""
        return next((self.transformers[name] for name in sorted(names) if name in self.transformers), None)

    def _description(self) -> Description:
        return Description(
            mode=self.settings.mode.value,
            precision=self.settings.precision.value,
            host_kind=self.snapshot().host_kind,
            off_reason="" if self.off_reason is None else self.off_reason.value,
        )

    def snapshot(self) -> Snapshot:
        """The gauges over all caches; of the store, which they share, once."""
        return Snapshot.sum(transformer.cache.snapshot() for transformer in self.transformers.values())


def _nothing_to_cache(components: Mapping[str, Component]) -> ModelRefused:
    """The refusal of the component that comes nearest to a transformer."""
    names = [part.class_name for part in components.values()]
    for class_name in sorted(names, key=lambda name: "Transformer" not in name):
        try:
            family_of(class_name)
        except ModelRefused as refusal:
            return refusal
    return ModelRefused(ModelReason.NO_PROJECTION, "the model has no component with modulation projections")
