"""Puts a loaded model under its memory plan: one strategy per component, their life cycle, the report and the map."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from sojourn.inference.loading.components import Component
from sojourn.inference.offload.activations import Workload, activation_bytes, headroom_bytes
from sojourn.inference.offload.assemble import copied, own_mappings, paged, resident
from sojourn.inference.offload.budget import HostMemory, PinLedger
from sojourn.inference.offload.headers import width_of
from sojourn.inference.offload.lifecycle import LifeCycle, Situation
from sojourn.inference.offload.memory_plan import MemoryPlan
from sojourn.inference.offload.observer import Observer, silent
from sojourn.inference.offload.options import OffloadOptions
from sojourn.inference.offload.pinning import CudaPinDriver, PinDriver
from sojourn.inference.offload.plan_report import tell
from sojourn.inference.offload.planning import shares_host_memory
from sojourn.inference.offload.room import RoomReader
from sojourn.inference.offload.settings import Mode, OffloadSettings
from sojourn.inference.offload.strategies import Copied, Paged, Strategy
from sojourn.inference.offload.streams import CudaStreams, Streams
from sojourn.inference.residency.component_map import ComponentMapPublisher, PublishedComponent
from sojourn.inference.residency.report import Residency, log_loaded, log_settled, residency_of
from sojourn.residencyd.kernel.process_io import read_io

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What copying to a device takes; tests put their own in.

    Attributes:
        streams: Of the device.
        driver: Locks host memory for it.
        empty_cache: Gives its allocator's cache back.
    """

    streams: Streams
    driver: PinDriver
    empty_cache: Callable[[], None]

    @classmethod
    def cuda(cls, device: torch.device) -> "Devices":
        """A CUDA device's own."""
        return cls(streams=CudaStreams(device), driver=CudaPinDriver(), empty_cache=torch.cuda.empty_cache)


class Offload:
    """Offload of one loaded model.

    Attributes:
        plan: What it follows.
        life: When components come and go; the pipeline drives it.
        publisher: Of the component map; None if none is published.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        life: LifeCycle,
        components: Mapping[str, Component],
        publisher: ComponentMapPublisher | None,
    ) -> None:
        self.plan = plan
        self.life = life
        self.publisher = publisher
        self._components = components

    def residencies(self) -> Mapping[str, Residency]:
        """Where every component with weights is now, as this process knows it."""
        mappings = own_mappings()
        found = {
            name: residency_of(part.value, mappings, hosted=hosted_tensors(self.life.strategies.get(name)))
            for name, part in self._components.items()
        }
        return {name: residency for name, residency in found.items() if residency is not None}

    def log_settled(self) -> None:
        """The line once everything has its place."""
        log_settled(self.residencies())

    def close(self) -> None:
        """Ends threads and hooks, and takes the map away: the process is about to end, or another model comes."""
        self.life.close()
        if self.publisher is not None:
            self.publisher.withdraw()


def install(
    components: Mapping[str, Component],
    plan: MemoryPlan,
    options: OffloadOptions,
    *,
    device: torch.device,
    devices: Devices | None = None,
    reader: RoomReader | None = None,
    observer: Observer = silent,
) -> Offload:
    """Puts components under a plan.

    Args:
        components: Everything that was loaded; what the plan does not hold resident is on the host.
        plan: Made for this model, and checked.
        options: As the plan was made with.
        device: Where the model runs.
        devices: What copying takes; None for the device's own.
        reader: Measures room.
        observer: Told of everything.
    """
    measure = reader or RoomReader(os.getpid())
    strategies = _strategies(
        components, plan, options, device=device, devices=devices, reader=measure, observer=observer
    )
    needs = _Needs(strategies, components, options, measure, shared=plan.machine.shared_device)
    publisher = None
    if options.component_map is not None:
        publisher = ComponentMapPublisher(
            Path(options.component_map),
            [_published(part, strategies.get(name)) for name, part in components.items()],
            devices=_named(device),
            need_bytes=needs.beyond_resident,
        )
    life = LifeCycle(
        strategies,
        room=needs.room if plan.machine.device_bytes is None else lambda situation: None,
        read_bytes=lambda: read_io().read_bytes,
        changed=publisher.publish if publisher is not None else lambda situation: None,
        observer=observer,
    )
    tell(plan, observer)
    if publisher is not None:
        publisher.publish(Situation())
    return Offload(plan, life, components, publisher)


def log_component(part: Component) -> None:
    """The line at load of one component; nothing for one without weights."""
    residency = residency_of(part.value, own_mappings())
    if residency is not None:
        log_loaded(part.name, part.value, residency, size_bytes=part.size_bytes)


def hosted_tensors(strategy: Strategy | None) -> list[torch.Tensor]:
    """What offload itself keeps of a component, on the host and on the device."""
    if isinstance(strategy, Paged) and strategy.window is not None:
        return strategy.window.buffers()
    if not isinstance(strategy, Copied):
        return []
    return [*strategy.window.host_tensors(), *strategy.window.device_tensors()]


def _strategies(
    components: Mapping[str, Component],
    plan: MemoryPlan,
    options: OffloadOptions,
    *,
    device: torch.device,
    devices: Devices | None,
    reader: RoomReader,
    observer: Observer,
) -> dict[str, Strategy]:
    by_name = {part.name: part for part in plan.components}
    copies = plan.machine.device_bytes is not None or plan.machine.shared_device
    ledger = _ledger(plan, options, reader, observer) if copies else None
    strategies: dict[str, Strategy] = {}
    for name, part in components.items():
        if name not in by_name:
            continue
        mode = by_name[name].mode
        settings = options.settings.of(name)
        if mode is Mode.RESIDENT:
            strategies[name] = resident(part.value)
        elif ledger is not None:
            own = devices or Devices.cuda(device)
            strategies[name] = copied(
                name, part.value, settings=_with_residents(settings, by_name[name].layers - by_name[name].streamed),
                layerwise=mode is Mode.LAYERWISE, streams=own.streams, driver=own.driver, ledger=ledger,
                empty_cache=own.empty_cache, observer=observer, warn=log.warning,
            )  # fmt: skip
        else:
            strategies[name] = paged(
                name, part.value, settings=settings, layerwise=mode is Mode.LAYERWISE,
                cold_advice=options.cold_advice, reader=reader, observer=observer, warn=log.warning,
            )  # fmt: skip
    return strategies


def _with_residents(settings: OffloadSettings, resident: int) -> OffloadSettings:
    """The plan's own number of resident layers in place of a share."""
    return replace(settings, resident=float(resident))


def _ledger(plan: MemoryPlan, options: OffloadOptions, reader: RoomReader, observer: Observer) -> PinLedger:
    def available() -> int:
        return min(plan.machine.host_bytes, reader.read(()).available_bytes)

    memory = HostMemory(available_bytes=available(), shares_device=plan.machine.shared_device, pinning=options.pinning)
    return PinLedger(memory, available_now=available, observer=observer)


class _Needs:
    """What the next stage will take of host memory, and what that leaves for a component whose use ends."""

    def __init__(
        self,
        strategies: Mapping[str, Strategy],
        components: Mapping[str, Component],
        options: OffloadOptions,
        reader: RoomReader,
        *,
        shared: bool,
    ) -> None:
        self._strategies = strategies
        self._components = components
        self._workload = options.workload or Workload()
        self._headroom_bytes = options.next_stage_headroom_bytes
        self._reader = reader
        self._shared = shared

    def room(self, situation: Situation) -> int:
        """What may stay of a component whose use ends as this situation begins."""
        need = self._mapped(situation.needed_now) + self._growth(situation.needed_now)
        return max(0, self._reader.read(()).available_bytes - need)

    def beyond_resident(self, situation: Situation) -> int:
        """What the stage after this one will take beyond what is resident of its components now."""
        spans = [span for name in situation.needed_next for span in self._strategies[name].host_spans()]
        missing = self._mapped(situation.needed_next) - self._reader.resident_bytes(spans)
        return max(0, missing) + self._growth(situation.needed_next)

    def _mapped(self, names: frozenset[str]) -> int:
        return sum(span.size_bytes for name in names for span in self._strategies[name].host_spans())

    def _growth(self, names: frozenset[str]) -> int:
        """What was asked for; else activations, on a device that shares host memory its allocator's margin too.

        A decoder tells no width. It is taken to be made to the measure of the model: a model with a narrow transformer
        does not decode as the measured one does.
        """
        if not names:
            return 0
        if self._headroom_bytes is not None:
            return self._headroom_bytes
        widths = {name: _width(part.value) for name, part in self._components.items()}
        width = max(widths[name] for name in names) or max(widths.values())
        estimate = headroom_bytes if self._shared else activation_bytes
        return estimate(self._workload, hidden_size=width)


def _width(component: object) -> int:
    config = getattr(component, "config", None)
    if isinstance(config, Mapping):
        return width_of(config)
    return width_of(config.to_dict()) if config is not None and hasattr(config, "to_dict") else 0


def _published(part: Component, strategy: Strategy | None) -> PublishedComponent:
    if isinstance(strategy, Paged) and strategy.window is not None:
        return PublishedComponent(name=part.name, value=part.value, hosted=strategy.window.buffers)
    if not isinstance(strategy, Copied):
        return PublishedComponent(name=part.name, value=part.value)
    window = strategy.window
    return PublishedComponent(
        name=part.name, value=part.value, hosted=window.host_tensors, device_buffers=window.device_tensors
    )


def _named(device: torch.device) -> list[tuple[int, str, bool]]:
    if device.type != "cuda":
        return []
    return [(device.index or 0, torch.cuda.get_device_name(device), shares_host_memory(device))]
