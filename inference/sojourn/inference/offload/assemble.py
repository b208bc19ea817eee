"""Builds the strategy of a component from its module: finds layers, mappings and pieces, hooks the window in.

One function for each way of hosting; which one applies is the memory plan's decision.
"""

import os
from collections.abc import Callable

import torch
from sojourn.inference.offload.adviser import Adviser, PageAdvice
from sojourn.inference.offload.budget import PinLedger
from sojourn.inference.offload.courier import Courier
from sojourn.inference.offload.direct import DirectFiles, DirectReader
from sojourn.inference.offload.hosting import HostingPlan, HostTier, LayerBytes, plan_hosting
from sojourn.inference.offload.integrity import MappedFiles, hook_checks
from sojourn.inference.offload.mapped import is_file_backed, mapped_spans
from sojourn.inference.offload.observer import Observer, silent
from sojourn.inference.offload.pages import PageWindow, hook_pages
from sojourn.inference.offload.pieces import find_pieces
from sojourn.inference.offload.pinning import PinDriver, RegisterFailed, pin_filled, pinned_size_bytes
from sojourn.inference.offload.room import RoomReader
from sojourn.inference.offload.settings import (
    OffloadSettings,
    prefetch_layers,
    resident_layers,
    streamed_layers,
)
from sojourn.inference.offload.spans import all_pages, whole_pages, without
from sojourn.inference.offload.stack import LayerStack, find_layers, stack_layers
from sojourn.inference.offload.stores import Pinner, Store, mapped_store, pageable_store
from sojourn.inference.offload.strategies import Copied, Paged, Resident
from sojourn.inference.offload.streams import Streams
from sojourn.inference.offload.window import LayerWindow, hook
from sojourn.residencyd.kernel.advice import populate_read
from sojourn.residencyd.kernel.maps import Lookup, MapsTable, read_maps
from torch import nn

Warn = Callable[[str], None]


def own_mappings() -> Lookup:
    """The mappings of this process now."""
    return MapsTable(read_maps(os.getpid()))


def resident(component: nn.Module) -> Resident:
    """A component that stays where it is; if that is on mapped files, they are watched.

    Args:
        component: Its module.
    """
    mappings = own_mappings()
    spans = mapped_spans(list(component.parameters()), mappings)
    if not spans:
        return Resident()
    files = MappedFiles(spans, mappings)
    return Resident(files=files, undo=hook_checks(_watched(component), files.check))


def _watched(component: nn.Module) -> tuple[nn.Module, ...]:
    """What looks at its files before it computes: every layer, or the component's children where nothing repeats."""
    return find_layers(component) or tuple(component.children())


def paged(
    name: str,
    component: nn.Module,
    *,
    settings: OffloadSettings,
    layerwise: bool,
    cold_advice: bool = True,
    reader: RoomReader | None = None,
    advice: PageAdvice | None = None,
    observer: Observer = silent,
    warn: Warn = lambda text: None,
) -> Paged:
    """A component that computes on its mapped weights.

    Args:
        name: Of the component.
        component: Its module, on the CPU or on a device that shares its memory.
        settings: Policy and prefetch; a count of resident layers has no meaning where room decides.
        layerwise: Whether to give advice within a pass; else at the ends of a use only.
        cold_advice: Whether to give advice at the end of a use.
        reader: Measures room.
        advice: The kernel calls.
        observer: Told of everything.
        warn: Called with a text at each change to a degraded mode.
    """
    mappings = own_mappings()
    parameters = list({p.data_ptr(): p for p in component.parameters()}.values())
    spans = whole_pages(mapped_spans(parameters, mappings))
    adviser = Adviser(failed=lambda error: warn(f"{name}: page advice failed: {error}"))
    strategy = Paged(
        name=name,
        spans=spans,
        files=MappedFiles(spans, mappings),
        adviser=adviser,
        fetch_whole=not layerwise,
        cold_advice=cold_advice,
        advice=advice,
        observer=observer,
        warn=warn,
    )
    unhook = hook_checks(_watched(component), strategy.files.check)
    strategy.undo = unhook
    if layerwise:
        measure = reader or RoomReader(os.getpid())
        layers = find_layers(component)
        pieces = find_pieces(layers, mappings)
        window = PageWindow(
            name,
            pieces,
            room=measure.read,
            adviser=adviser,
            resident=measure.resident_bytes,
            policy=settings.policy,
            rest=without(all_pages(mapped_spans(parameters, mappings)), [s for piece in pieces for s in piece.spans]),
            anonymous=measure.anonymous_bytes,
            advice=advice,
            direct=lambda: DirectReader(DirectFiles(window.spans, mappings), watch=window.look),
            observer=observer,
            warn=warn,
        )
        strategy.window = window
        unpage = hook_pages(component, layers, window, check=strategy.files.check)

        def undo() -> None:
            unhook()
            unpage()

        strategy.undo = undo
    return strategy


def copied(
    name: str,
    component: nn.Module,
    *,
    settings: OffloadSettings,
    layerwise: bool,
    streams: Streams,
    driver: PinDriver,
    ledger: PinLedger,
    empty_cache: Callable[[], None],
    observer: Observer = silent,
    warn: Warn = lambda text: None,
) -> Copied:
    """A component that is loaded on the host, and is copied to a device for its uses.

    What no unit holds (buffers, and weights outside the layers when `layerwise`) goes to the device now and stays.

    Args:
        name: Of the component.
        component: Its module, on the host: mapped or not.
        settings: Prefetch, residents, policy.
        layerwise: Whether layers stream one by one; else the component comes and goes as one.
        streams: Of the device.
        driver: Locks host memory.
        ledger: Grants it.
        empty_cache: Gives the device allocator's cache back.
        observer: Told of everything.
        warn: Called with a text at each change to a degraded mode.
    """
    layers = find_layers(component) if layerwise else (component,)
    stack = stack_layers(component, layers)
    resident = resident_layers(settings.resident, len(layers)) if layerwise else len(layers)
    streamed = streamed_layers(len(layers), resident, settings.policy)
    plan = plan_units(stack, streamed, ledger)
    stores = build_stores(stack, plan, Pinner(driver=driver, ledger=ledger, observer=observer, warn=warn))
    window = LayerWindow(
        *(name, stack, stores, streams),
        streamed=streamed,
        prefetch=prefetch_layers(settings.prefetch, len(layers)),
        courier=_courier(stores, streams, driver, ledger),
        observer=observer,
        warn=warn,
    )
    component.to(streams.device)
    observer.placed(component=name, layers_by_tier=_count(stack, stores))
    # A component that comes as one is bound when its use begins: not everything in it is called as a module.
    undo = hook(window) if layerwise else lambda: None
    return Copied(window, undo=undo, empty_cache=empty_cache, whole=not layerwise)


def plan_units(stack: LayerStack, streamed: tuple[int, ...], ledger: PinLedger) -> HostingPlan:
    """The host tier of each unit; one that serves several layers counts as streamed if any of them streams."""
    mappings = own_mappings()
    sizes = [
        LayerBytes(
            copy_bytes=pinned_size_bytes(unit.layout.total_bytes),
            mapped_bytes=sum(
                extent.size_bytes for extent, _ in unit.layout.extents if is_file_backed(extent.address, mappings)
            ),
        )
        for unit in stack.units
    ]
    order = [i for i, unit in enumerate(stack.units) if unit.layers & set(streamed)]
    return plan_hosting(sizes, streamed=order, memory=ledger.memory, pin_budget_bytes=ledger.spendable_bytes)


def build_stores(stack: LayerStack, plan: HostingPlan, pinner: Pinner) -> tuple[Store, ...]:
    """Carries a hosting plan out, one unit after the other, so that no more than one is there twice."""
    originals = {name: parameter.data for name, parameter in stack.parameters.items()}
    stores = []
    for unit, tier in zip(stack.units, plan.tiers, strict=True):
        mapped = mapped_store(unit.layout, originals)
        if tier is HostTier.PINNED:
            stores.append(pinner.store(mapped))
        else:
            stores.append(mapped if tier is HostTier.MAPPED else pageable_store(mapped))
        for extent, _ in unit.layout.extents:
            for weight in extent.weights:
                originals.pop(weight.name, None)
                if tier is not HostTier.MAPPED:
                    stack.parameters[weight.name].data = torch.empty(0, dtype=weight.dtype)
    return tuple(stores)


def _courier(stores: tuple[Store, ...], streams: Streams, driver: PinDriver, ledger: PinLedger) -> Courier | None:
    """A courier where something stays mapped, with two slots if they can be pinned; they are what makes it pay."""
    mapped = [store.layout.total_bytes for store in stores if store.tier is HostTier.MAPPED]
    if not mapped:
        return None
    slots = []
    for _ in range(2):
        try:
            slot = pin_filled(max(mapped), lambda buffer: None, driver=driver, ledger=ledger)
        except (RegisterFailed, OSError):
            return None
        if slot is None:
            return None
        slots.append(slot)
    return Courier(slots, streams, populate=lambda run: _read_whole(run.data_ptr(), run.numel()))


def _read_whole(address: int, length: int) -> None:
    populate_read(address, length)


def _count(stack: LayerStack, stores: tuple[Store, ...]) -> dict[str, int]:
    """Layers by tier; a layer is where its largest unit is."""
    counts: dict[str, int] = {tier.value: 0 for tier in HostTier}
    for layer in range(len(stack.layers)):
        units = stack.units_of(layer)
        if units:
            largest = max(units, key=lambda unit: stack.units[unit].layout.total_bytes)
            counts[stores[largest].tier.value] += 1
    return counts
