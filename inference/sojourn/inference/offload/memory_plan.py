"""The memory plan: what will be where, whether it fits, and what would have to change. Made before anything is loaded.

Two kinds of machine, two kinds of plan. With memory of its own, a device has to hold, in every stage, the components
of that stage as far as they do not stream, the window of those that do, and the activations; the host holds the rest.
In shared memory (the CPU, or a device without memory of its own) mapped weights are dropped and read again at will, so
what has to fit is what cannot be dropped: conversions, activations, the runtime and the window.

In mode `auto` everything stays resident if it fits. If not, components that do not repeat come and go as a whole, and
layers of the largest stream, as many as it takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sojourn.inference.errors import DoesNotFit
from sojourn.inference.offload.activations import RUNTIME_BYTES, Workload, activation_bytes
from sojourn.inference.offload.budget import HostMemory, pin_benefit
from sojourn.inference.offload.headers import Bytes, ComponentWeights
from sojourn.inference.offload.hosting import HostTier, LayerBytes, plan_hosting
from sojourn.inference.offload.settings import (
    Mode,
    OffloadSettings,
    Selection,
    prefetch_layers,
    resident_layers,
    streamed_layers,
)

VRAM = "vram"


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """The plan cache of a component.

    Attributes:
        slots: Plans on the device.
        width: Distinct rows of a plan.
        host_bytes: Of the host tier.
        row_element_bytes: Of one element of a row.
        transformer: The class whose projections it replaces; None for the component's own.
    """

    slots: int = 64
    width: int = 4
    host_bytes: int = 0
    row_element_bytes: int = 2
    transformer: str | None = None

    def slab_bytes(self, outputs: int) -> int:
        """On the device, for projections with so many outputs together."""
        return self.slots * self.width * outputs * self.row_element_bytes


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a model may take.

    Attributes:
        device_bytes: Of the device's own memory; None where it computes in host memory.
        host_bytes: Of host memory.
        shared_device: Whether a device other than the CPU computes in host memory.
    """

    device_bytes: int | None
    host_bytes: int
    shared_device: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerRange:
    """Neighbouring layers with one tier.

    Attributes:
        first, last: Indices; both -1 for the weights outside the layers.
        tier: Where they are while the component waits: "vram", or a `HostTier`.
        size_bytes: Together.
    """

    first: int
    last: int
    tier: str
    size_bytes: int

    def __str__(self) -> str:
        """Such as "layers 0-34", or "rest"."""
        if self.first < 0:
            return "rest"
        return f"layer {self.first}" if self.first == self.last else f"layers {self.first}-{self.last}"


@dataclass(frozen=True, kw_only=True)
class ComponentPlan:
    """One component.

    Attributes:
        name: In the pipeline.
        mode: How its weights come and go; never `auto`.
        size_bytes: All that is loaded of it: not the projections if a cache replaces them.
        projection_bytes: The modulation projections.
        cached: Whether the plan cache replaces them.
        slab_bytes, cache_host_bytes: What the cache takes instead.
        layers: How many repeat.
        streamed: How many of those stream.
        prefetch: Layers on their way ahead.
        ranges: Where everything is.
        device_bytes: What a stage that uses it takes on the device, activations apart.
        host_bytes: What it takes on the host and cannot be dropped.
    """

    name: str
    mode: Mode
    size_bytes: int
    projection_bytes: int = 0
    cached: bool = False
    slab_bytes: int = 0
    cache_host_bytes: int = 0
    layers: int = 0
    streamed: int = 0
    prefetch: int = 0
    ranges: tuple[LayerRange, ...] = ()
    device_bytes: int = 0
    host_bytes: int = 0

    def bytes_by_tier(self) -> Mapping[str, int]:
        """Sizes of the ranges, every tier named."""
        sums = dict.fromkeys((VRAM, *HostTier), 0)
        for part in self.ranges:
            sums[part.tier] += part.size_bytes
        return {str(tier): size for tier, size in sums.items()}

    def layers_by_tier(self) -> Mapping[str, int]:
        """How many layers have each tier, every tier named; a layer in two tiers counts in both."""
        counts = dict.fromkeys((VRAM, *HostTier), 0)
        for part in self.ranges:
            counts[part.tier] += part.last - part.first + 1 if part.first >= 0 else 0
        return {str(tier): count for tier, count in counts.items()}


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The whole model on a machine.

    Attributes:
        components: In order of size.
        machine: What there is.
        device_peak_bytes, host_peak_bytes: The most that any stage takes; on the host, what cannot be dropped.
        busiest: Name of the stage with the device's (or, in shared memory, the host's) peak.
        resident_bytes: What everything resident would take in the space that computes.
        changes: What would make it fit, or faster; empty if nothing is wanted.
    """

    components: tuple[ComponentPlan, ...]
    machine: Machine
    device_peak_bytes: int
    host_peak_bytes: int
    busiest: str
    resident_bytes: int
    changes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether every stage fits in both spaces."""
        device_fits = self.machine.device_bytes is None or self.device_peak_bytes <= self.machine.device_bytes
        return device_fits and self.host_peak_bytes <= self.machine.host_bytes

    def resident(self, name: str) -> bool:
        """Whether a component stays where it computes; one without weights does."""
        return all(part.mode is Mode.RESIDENT for part in self.components if part.name == name)

    def headroom_bytes(self) -> Mapping[str, int]:
        """What is left of each space at the peak; negative if it does not fit."""
        spaces = {"host": self.machine.host_bytes - self.host_peak_bytes}
        if self.machine.device_bytes is not None:
            spaces["device"] = self.machine.device_bytes - self.device_peak_bytes
        return spaces

    def check(self, model: Path) -> None:
        """Refuses what cannot fit.

        Args:
            model: Its folder, for the message.

        Raises:
            DoesNotFit: With the number that is needed, and what to change.
        """
        for space, peak, budget in (
            ("device", self.device_peak_bytes, self.machine.device_bytes),
            ("host", self.host_peak_bytes, self.machine.host_bytes),
        ):
            if budget is not None and peak > budget:
                raise DoesNotFit(
                    model, space, needed_bytes=peak, available_bytes=budget, stage=self.busiest, changes=self.changes
                )


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What is to be planned.

    Attributes:
        weights: Of every component.
        stages: Name of each stage with the names of its components, in order.
        settings: Of all components and of single ones.
        caches: Plan caches by component.
        uses: How often a request runs a component, by name; 1 for those that are missing.
        workload: The largest request.
        pinning: Whether host memory may be locked.
    """

    weights: Sequence[ComponentWeights]
    stages: Sequence[tuple[str, frozenset[str]]]
    settings: Selection = field(default_factory=Selection)
    caches: Mapping[str, CacheSize] = field(default_factory=dict)
    uses: Mapping[str, int] = field(default_factory=dict)
    workload: Workload = field(default_factory=Workload)
    pinning: bool = True

    def setting(self, name: str) -> OffloadSettings:
        """Of a component."""
        return self.settings.of(name)

    def activation_bytes(self, stage: frozenset[str]) -> int:
        """What a stage with these components takes besides weights.

        A component that tells no width, such as a decoder, is taken to be made to the measure of the model.
        """
        widths = {part.name: part.hidden_size for part in self.weights}
        own = [width for name, width in widths.items() if name in stage]
        return activation_bytes(self.workload, hidden_size=max(own) or max(widths.values())) if own else 0


def plan_memory(demand: Demand, machine: Machine) -> MemoryPlan:
    """Chooses a mode and a tier for everything."""
    loaded = [part.without_projections() if part.name in demand.caches else part for part in demand.weights]
    demand = replace(demand, weights=loaded)
    return _plan_shared(demand, machine) if machine.device_bytes is None else _plan_discrete(demand, machine)


# A device that computes in host memory


def _plan_shared(demand: Demand, machine: Machine) -> MemoryPlan:
    resident = RUNTIME_BYTES + _most_activations(demand) + sum(_all_bytes(demand, part) for part in demand.weights)
    all_fits = resident <= machine.host_bytes
    plans = tuple(_shared_component(demand, part, all_fits=all_fits) for part in demand.weights)
    needs = {stage: _shared_need(demand, plans, components) for stage, components in demand.stages}
    busiest = max(needs, key=lambda stage: needs[stage])
    plan = MemoryPlan(
        components=_by_size(plans),
        machine=machine,
        device_peak_bytes=0,
        host_peak_bytes=needs[busiest],
        busiest=busiest,
        resident_bytes=resident,
    )
    return replace(plan, changes=_changes(plan, demand))


def _shared_component(demand: Demand, part: ComponentWeights, *, all_fits: bool) -> ComponentPlan:
    settings = demand.setting(part.name)
    mode = settings.mode
    if mode is Mode.AUTO:
        mode = Mode.RESIDENT if all_fits else Mode.LAYERWISE if part.layers else Mode.COMPONENT
    plan = _begun(demand, part, mode)
    layers = tuple(
        LayerRange(first=i, last=i, tier=tier, size_bytes=size)
        for i, layer in enumerate(part.layers)
        for tier, size in _shared_tiers(layer)
    )
    rest = tuple(LayerRange(first=-1, last=-1, tier=t, size_bytes=size) for t, size in _shared_tiers(part.rest))
    return replace(
        plan,
        streamed=len(part.layers) if mode is Mode.LAYERWISE else 0,
        prefetch=prefetch_layers(settings.prefetch, len(part.layers)) if part.layers else 0,
        ranges=_joined((*layers, *rest)),
        host_bytes=part.total.converted + plan.slab_bytes + plan.cache_host_bytes,
    )


def _shared_tiers(size: Bytes) -> list[tuple[str, int]]:
    tiers = [(str(HostTier.MAPPED), size.mapped), (str(HostTier.PAGEABLE), size.converted)]
    return [(tier, amount) for tier, amount in tiers if amount]


def _shared_need(demand: Demand, plans: Sequence[ComponentPlan], stage: frozenset[str]) -> int:
    """What a stage cannot do without: all that cannot be dropped, and of the mapped weights what it reads at once."""
    by_name = {part.name: part for part in demand.weights}
    need = RUNTIME_BYTES + demand.activation_bytes(stage) + sum(plan.host_bytes for plan in plans)
    for plan in plans:
        part = by_name[plan.name]
        if plan.mode is Mode.RESIDENT:
            need += plan.size_bytes - part.total.converted
        elif plan.name in stage and plan.mode is Mode.COMPONENT:
            need += part.total.mapped
        elif plan.name in stage:
            largest = max((layer.mapped for layer in part.layers), default=0)
            need += part.rest.mapped + largest * (1 + plan.prefetch)
    return need


# A device with memory of its own


def _plan_discrete(demand: Demand, machine: Machine) -> MemoryPlan:
    assert machine.device_bytes is not None
    modes = {
        part.name: Mode.RESIDENT if demand.setting(part.name).mode is Mode.AUTO else demand.setting(part.name).mode
        for part in demand.weights
    }
    residents = {part.name: _wanted_residents(demand, part) for part in demand.weights}
    resident = max(_device_needs(demand, _draw(demand, modes, residents)).values(), default=0)
    for name in _in_order_of_leaving(demand):
        if _device_peak(demand, modes, residents) <= machine.device_bytes:
            break
        modes[name] = Mode.COMPONENT
    for name in _in_order_of_streaming(demand):
        if _device_peak(demand, modes, residents) <= machine.device_bytes:
            break
        modes[name] = Mode.LAYERWISE
    for name in _in_order_of_filling(demand, modes):
        residents[name] = _most_residents(demand, modes, residents, name, machine.device_bytes)
    plans = _hosted(demand, _draw(demand, modes, residents), machine)
    needs = _device_needs(demand, plans)
    busiest = max(needs, key=lambda stage: needs[stage])
    plan = MemoryPlan(
        components=_by_size(plans),
        machine=machine,
        device_peak_bytes=needs[busiest],
        host_peak_bytes=RUNTIME_BYTES + sum(plan.host_bytes for plan in plans),
        busiest=busiest,
        resident_bytes=resident,
    )
    return replace(plan, changes=_changes(plan, demand))


def _wanted_residents(demand: Demand, part: ComponentWeights) -> int:
    return resident_layers(demand.setting(part.name).resident, len(part.layers)) if part.layers else 0


def _in_order_of_leaving(demand: Demand) -> list[str]:
    """Components that may come and go as a whole: those a request uses least first, the largest of them first."""
    free = [part for part in demand.weights if demand.setting(part.name).mode is Mode.AUTO]
    return [p.name for p in sorted(free, key=lambda p: (demand.uses.get(p.name, 1), -p.total.total))]


def _in_order_of_streaming(demand: Demand) -> list[str]:
    free = [part for part in demand.weights if demand.setting(part.name).mode is Mode.AUTO and part.layers]
    return [part.name for part in sorted(free, key=lambda part: -part.total.total)]


def _in_order_of_filling(demand: Demand, modes: Mapping[str, Mode]) -> list[str]:
    """Components that stream, with as many resident layers as fit."""
    free = [p for p in demand.weights if modes[p.name] is Mode.LAYERWISE and demand.setting(p.name).resident is None]
    return [part.name for part in sorted(free, key=lambda part: -part.total.total)]


def _most_residents(
    demand: Demand, modes: Mapping[str, Mode], residents: Mapping[str, int], name: str, budget_bytes: int
) -> int:
    """The most layers of a component that can stay on the device; 0 if even that is too many."""
    part = next(part for part in demand.weights if part.name == name)
    for count in range(len(part.layers), 0, -1):
        if _device_peak(demand, modes, {**residents, name: count}) <= budget_bytes:
            return count
    return 0


def _device_peak(demand: Demand, modes: Mapping[str, Mode], residents: Mapping[str, int]) -> int:
    return max(_device_needs(demand, _draw(demand, modes, residents)).values(), default=0)


def _device_needs(demand: Demand, plans: Sequence[ComponentPlan]) -> Mapping[str, int]:
    """What each stage takes on the device: its components, and those that never leave."""
    return {
        stage: demand.activation_bytes(components)
        + sum(plan.device_bytes for plan in plans if plan.name in components or plan.mode is Mode.RESIDENT)
        for stage, components in demand.stages
    }


def _draw(demand: Demand, modes: Mapping[str, Mode], residents: Mapping[str, int]) -> tuple[ComponentPlan, ...]:
    """The components with these modes, without places on the host."""
    return tuple(_discrete_component(demand, part, modes[part.name], residents[part.name]) for part in demand.weights)


def _discrete_component(demand: Demand, part: ComponentWeights, mode: Mode, resident: int) -> ComponentPlan:
    plan = _begun(demand, part, mode)
    if mode is not Mode.LAYERWISE or not part.layers:
        return replace(plan, device_bytes=plan.size_bytes + plan.slab_bytes)
    settings = demand.setting(part.name)
    streamed = streamed_layers(len(part.layers), resident, settings.policy)
    prefetch = prefetch_layers(settings.prefetch, len(part.layers))
    held = sum(layer.total for i, layer in enumerate(part.layers) if i not in streamed)
    window = sorted((part.layers[i].total for i in streamed), reverse=True)[: 1 + prefetch]
    return replace(
        plan,
        streamed=len(streamed),
        prefetch=prefetch,
        device_bytes=held + sum(window) + part.rest.total + plan.slab_bytes,
    )


def _hosted(demand: Demand, plans: Sequence[ComponentPlan], machine: Machine) -> tuple[ComponentPlan, ...]:
    """Gives everything that leaves the device a place on the host, the component that pays most for pins first."""
    memory = HostMemory(
        available_bytes=max(0, machine.host_bytes - RUNTIME_BYTES), shares_device=False, pinning=demand.pinning
    )
    budget = memory.pin_budget_bytes
    by_name = {part.name: part for part in demand.weights}
    done: dict[str, ComponentPlan] = {}
    for plan in sorted(plans, key=lambda p: -pin_benefit(p.size_bytes, demand.uses.get(p.name, 1))):
        done[plan.name] = _host(demand, plan, by_name[plan.name], memory, budget)
        taken = done[plan.name].bytes_by_tier()[str(HostTier.PINNED)]
        budget -= taken
        memory = replace(memory, available_bytes=max(0, memory.available_bytes - done[plan.name].host_bytes))
    return tuple(done[plan.name] for plan in plans)


def _host(
    demand: Demand, plan: ComponentPlan, part: ComponentWeights, memory: HostMemory, budget_bytes: int
) -> ComponentPlan:
    if plan.mode is Mode.RESIDENT:
        return replace(plan, ranges=_resident_ranges(part), host_bytes=plan.cache_host_bytes)
    if plan.mode is Mode.COMPONENT or not part.layers:
        whole = (*part.layers, part.rest)
        hosting = plan_hosting(
            [LayerBytes(copy_bytes=size.total, mapped_bytes=size.mapped) for size in whole],
            streamed=range(len(whole)), memory=memory, pin_budget_bytes=budget_bytes,
        )  # fmt: skip
        ranges = [
            LayerRange(first=i, last=i, tier=str(tier), size_bytes=size.total)
            for i, (tier, size) in enumerate(zip(hosting.tiers, whole, strict=True))
        ]
        ranges[-1] = replace(ranges[-1], first=-1, last=-1)
        return _with_host(plan, ranges)
    hosting = plan_hosting(
        [LayerBytes(copy_bytes=layer.total, mapped_bytes=layer.mapped) for layer in part.layers],
        streamed=streamed_layers(len(part.layers), len(part.layers) - plan.streamed, demand.setting(part.name).policy),
        memory=memory,
        pin_budget_bytes=budget_bytes,
    )
    return _with_host(plan, [
        *(LayerRange(first=i, last=i, tier=str(tier), size_bytes=layer.total)
          for i, (tier, layer) in enumerate(zip(hosting.tiers, part.layers, strict=True))),
        LayerRange(first=-1, last=-1, tier=VRAM, size_bytes=part.rest.total),
    ])  # fmt: skip


def _resident_ranges(part: ComponentWeights) -> tuple[LayerRange, ...]:
    return _joined((
        *(LayerRange(first=i, last=i, tier=VRAM, size_bytes=layer.total) for i, layer in enumerate(part.layers)),
        LayerRange(first=-1, last=-1, tier=VRAM, size_bytes=part.rest.total),
    ))  # fmt: skip


def _with_host(plan: ComponentPlan, ranges: Sequence[LayerRange]) -> ComponentPlan:
    held = sum(part.size_bytes for part in ranges if part.tier in (HostTier.PINNED, HostTier.PAGEABLE))
    return replace(plan, ranges=_joined(ranges), host_bytes=held + plan.cache_host_bytes)


# Both


def _begun(demand: Demand, part: ComponentWeights, mode: Mode) -> ComponentPlan:
    cache = demand.caches.get(part.name) if part.projections.total else None
    return ComponentPlan(
        name=part.name,
        mode=mode,
        size_bytes=part.total.total,
        projection_bytes=part.projections.total,
        cached=cache is not None,
        slab_bytes=cache.slab_bytes(part.projection_outputs) if cache else 0,
        cache_host_bytes=cache.host_bytes if cache else 0,
        layers=len(part.layers),
    )


def _all_bytes(demand: Demand, part: ComponentWeights) -> int:
    plan = _begun(demand, part, Mode.RESIDENT)
    return plan.size_bytes + plan.slab_bytes + plan.cache_host_bytes


def _most_activations(demand: Demand) -> int:
    return max((demand.activation_bytes(components) for _, components in demand.stages), default=0)


def _by_size(plans: Sequence[ComponentPlan]) -> tuple[ComponentPlan, ...]:
    return tuple(sorted(plans, key=lambda plan: -plan.size_bytes))


def _joined(ranges: Sequence[LayerRange]) -> tuple[LayerRange, ...]:
    """Neighbours of one tier as one range; the rest, by tier, at the end."""
    result: list[LayerRange] = []
    for part in ranges:
        last = next((r for r in reversed(result) if r.tier == part.tier), None)
        if part.size_bytes and last is not None and part.first >= 0 and part.first - 1 <= last.last:
            result[result.index(last)] = replace(last, last=part.first, size_bytes=last.size_bytes + part.size_bytes)
        elif part.size_bytes:
            result.append(part)
    return tuple(result)


def _changes(plan: MemoryPlan, demand: Demand) -> tuple[str, ...]:
    """What would help, the cheapest first."""
    if plan.fits:
        return ()
    changes = []
    for part in plan.components:
        if part.projection_bytes and not part.cached:
            changes.append(f"turn the plan cache on: {part.name} then loads {part.projection_bytes} bytes less")
        if part.mode is Mode.RESIDENT and demand.setting(part.name).mode is Mode.RESIDENT:
            changes.append(f"let {part.name} leave: set its offload mode to auto, component or layerwise")
    for space, left in plan.headroom_bytes().items():
        if left < 0:
            changes.append(f"give the {space} {-left} bytes more, or ask for fewer pixels or frames")
    return tuple(changes)
