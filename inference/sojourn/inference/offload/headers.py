"""What a model's weights will take, from the headers of its files: nothing is loaded, no page of a weight is read.

The loader's rules decide: a tensor whose dtype is the wanted one stays where it is mapped, any other is converted, and
the conversion is a copy.
"""

import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sojourn.inference.families.projections import is_projection
from sojourn.inference.loading.folder import ComponentFolder, ComponentKind, ModelFolder
from sojourn.inference.loading.precision import kept_in_float32
from sojourn.inference.loading.safetensors_file import DTYPE_BITS, TensorInfo

_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Sizes of some weights once loaded.

    Attributes:
        mapped: Stay in the file's mapping on a device that computes in host memory.
        converted: Of another dtype in the file: become anonymous memory.
    """

    mapped: int = 0
    converted: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.mapped + self.converted

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(mapped=self.mapped + other.mapped, converted=self.converted + other.converted)

    def __sub__(self, other: "Bytes") -> "Bytes":
        return Bytes(mapped=self.mapped - other.mapped, converted=self.converted - other.converted)


@dataclass(frozen=True, kw_only=True)
class ComponentWeights:
    """The weights of one component.

    Attributes:
        name: In the pipeline.
        class_name: Its class.
        layers: Sizes of its repeated layers, in order; empty if nothing repeats.
        rest: Everything else.
        layer_projections: Part of each layer that the plan cache can replace.
        rest_projections: Part of the rest that it can.
        projection_outputs: Sum of the projections' outputs: the elements of one row of the cache.
        hidden_size: Width of its activations; 0 if the configuration does not tell.
    """

    name: str
    class_name: str
    layers: tuple[Bytes, ...] = ()
    rest: Bytes = field(default_factory=Bytes)
    layer_projections: tuple[Bytes, ...] = ()
    rest_projections: Bytes = field(default_factory=Bytes)
    projection_outputs: int = 0
    hidden_size: int = 0

    @property
    def total(self) -> Bytes:
        """All that is loaded."""
        return sum(self.layers, self.rest)

    @property
    def projections(self) -> Bytes:
        """All that the plan cache can replace."""
        return sum(self.layer_projections, self.rest_projections)

    def without_projections(self) -> "ComponentWeights":
        """What is loaded if the plan cache replaces the projections; they are still told of."""
        layers = tuple(layer - part for layer, part in zip(self.layers, self.layer_projections, strict=True))
        return replace(self, layers=layers, rest=self.rest - self.rest_projections)


def component_weights(folder: ComponentFolder, *, precision: str, transformer: str | None = None) -> ComponentWeights:
    """Sizes of a component.

    Args:
        folder: Its checked files.
        precision: What it computes in, as safetensors spells it, such as "BF16".
        transformer: The class whose projections it has; None for its own.
    """
    kept = _kept_in_float32(folder)
    repeated = _repeated(tensor.name for tensor in folder.tensors)
    places: dict[_Place, Bytes] = {}
    projections: dict[_Place, Bytes] = {}
    outputs = 0
    for tensor in folder.tensors:
        size = _loaded(tensor, "F32" if kept & set(tensor.name.split(".")) else precision)
        place = layer_of(tensor.name)
        place = place if place and place[0] in repeated else None
        places[place] = places.get(place, Bytes()) + size
        if is_projection(transformer or folder.class_name, tensor.name):
            projections[place] = projections.get(place, Bytes()) + size
            outputs += tensor.shape[0] if tensor.name.endswith(".weight") else 0
    order = sorted((key for key in places if key), key=lambda key: (repeated.index(key[0]), key[1]))
    return ComponentWeights(
        name=folder.name,
        class_name=folder.class_name,
        layers=tuple(places[key] for key in order),
        rest=places.get(None, Bytes()),
        layer_projections=tuple(projections.get(key, Bytes()) for key in order),
        rest_projections=projections.get(None, Bytes()),
        projection_outputs=outputs,
        hidden_size=width_of(folder.config),
    )


# A layer by its list and index; None outside the layers.
_Place = tuple[str, int] | None


def model_weights(
    folder: ModelFolder, *, precision: str, transformers: Mapping[str, str] | None = None
) -> tuple[ComponentWeights, ...]:
    """Sizes of every component that has weights.

    Args:
        folder: The model.
        precision: What it computes in, as safetensors spells it.
        transformers: Components whose projections are those of another class than their own, with that class.
    """
    others = transformers or {}
    models = (part for part in folder.components.values() if part.kind is ComponentKind.MODEL)
    return tuple(component_weights(part, precision=precision, transformer=others.get(part.name)) for part in models)


def layer_of(tensor: str) -> tuple[str, int] | None:
    """The list and the index that a tensor's name has first: "blocks.3.attn.weight" is ("blocks", 3)."""
    found = re.match(r"(.*?)\.(\d+)\.", tensor)
    return (found[1], int(found[2])) if found else None


def _repeated(tensors: Iterable[str]) -> list[str]:
    """The lists with two members or more, in order of appearance."""
    members: dict[str, set[int]] = {}
    for tensor in tensors:
        if (layer := layer_of(tensor)) is not None:
            members.setdefault(layer[0], set()).add(layer[1])
    return [name for name, indices in members.items() if len(indices) > 1]


def _loaded(tensor: TensorInfo, wanted: str) -> Bytes:
    if tensor.dtype == wanted or tensor.dtype not in _FLOATS:
        return Bytes(mapped=tensor.size_bytes)
    return Bytes(converted=tensor.elements * DTYPE_BITS[wanted] // 8)


def _kept_in_float32(folder: ComponentFolder) -> frozenset[str]:
    """Names of modules that the class keeps in float32 whatever the precision."""
    try:
        found = getattr(importlib.import_module(folder.library), folder.class_name, None)
    except ImportError:
        return frozenset()
    return kept_in_float32(folder.library, found)


def width_of(config: Mapping[str, Any]) -> int:
    """Width of a model's activations, by its configuration: as it says, or as its heads come to; 0 of others.

    Text encoders of several media keep it in the configuration of their language model.
    """
    heads, head = config.get("num_attention_heads"), config.get("attention_head_dim")
    product = heads * head if isinstance(heads, int) and isinstance(head, int) else 0
    found = config.get("hidden_size") or config.get("d_model") or product
    text = config.get("text_config")
    if not found and isinstance(text, Mapping):
        return width_of(text)
    return found if isinstance(found, int) else 0
