"""The repeated layers of a component, cut into units that are loaded and dropped as one.

Whose memory is whose is decided by addresses, not by names: a weight with two names, two parameters over one storage,
a view of another's view. Memory that one layer alone uses goes into that layer's unit. Memory that several layers use
gets a unit of its own, owned by nobody and held while any of them is. Memory that anything outside the layers uses
never leaves the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from sojourn.inference.offload.layout import REST, Extent, Layout, describe, find_extents, lay_out
from torch import nn


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """Weights that are loaded and dropped together.

    Attributes:
        layers: Indices of the layers that use them.
        layout: Their places in flat buffers.
    """

    layers: frozenset[int]
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class LayerStack:
    """A component's layers and what their weights lie in.

    Attributes:
        component: The whole module.
        layers: Its repeated layers, in registration order.
        units: What streams, each with the layers that it serves.
        parameters: Every parameter of the units by dotted name.
    """

    component: nn.Module
    layers: tuple[nn.Module, ...]
    units: tuple[UnitPlan, ...]
    parameters: Mapping[str, torch.Tensor]

    def units_of(self, layer: int) -> tuple[int, ...]:
        """Indices of the units that a layer needs."""
        return tuple(i for i, unit in enumerate(self.units) if layer in unit.layers)


def find_layers(component: nn.Module) -> tuple[nn.Module, ...]:
    """The repeated layers: the members of every ModuleList of two or more modules of one class.

    Lists inside a layer belong to that layer. A list of lists repeats nothing by itself, its members are never called.
    """
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in component.modules():
        if module not in inside and isinstance(module, nn.ModuleList) and _repeats(module):
            found.extend(module)
            inside.update(member for layer in module for member in layer.modules())
    return tuple(found)


def _repeats(layers: nn.ModuleList) -> bool:
    kinds = {type(layer) for layer in layers}
    return len(layers) > 1 and len(kinds) == 1 and not issubclass(kinds.pop(), nn.ModuleList | nn.ModuleDict)


def stack_layers(component: nn.Module, layers: Sequence[nn.Module]) -> LayerStack:
    """Cuts the layers' parameters into units. Buffers are no weights: they stay.

    Args:
        component: The module that holds the layers at any depth.
        layers: The layers; none inside another.
    """
    named = dict(component.named_parameters(remove_duplicate=False))
    prefixes = _prefixes(component, layers)
    weights = [describe(name, tensor.data, layer=_layer_of(name, prefixes)) for name, tensor in named.items()]
    units = _units(find_extents(weights))
    streamed = {weight.name for unit in units for extent, _ in unit.layout.extents for weight in extent.weights}
    return LayerStack(
        component=component,
        layers=tuple(layers),
        units=units,
        parameters={name: named[name] for name in sorted(streamed)},
    )


def _prefixes(component: nn.Module, layers: Sequence[nn.Module]) -> Mapping[str, int]:
    """Every dotted name of each layer."""
    index = {id(layer): i for i, layer in enumerate(layers)}
    names = component.named_modules(remove_duplicate=False)
    return {name: index[id(module)] for name, module in names if id(module) in index}


def _layer_of(name: str, prefixes: Mapping[str, int]) -> int:
    """The layer that holds a parameter, `REST` for none."""
    while name:
        name = name.rpartition(".")[0]  # ends at "", the name of the component itself
        if name in prefixes:
            return prefixes[name]
    return REST


def _units(extents: Sequence[Extent]) -> tuple[UnitPlan, ...]:
    """One unit for each set of layers that have memory in common; what the rest uses too is left out."""
    by_layers: dict[frozenset[int], list[Extent]] = {}
    for extent in extents:
        if REST not in extent.layers:
            by_layers.setdefault(extent.layers, []).append(extent)
    return tuple(UnitPlan(layers=layers, layout=lay_out(by_layers[layers])) for layers in sorted(by_layers, key=sorted))
