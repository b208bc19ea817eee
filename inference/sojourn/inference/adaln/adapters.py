"""Adapters (LoRA) on projections: their part would vanish with the projections, so they are refused wherever they come.

They come with the model's folder, through the transformer's own methods (and through the pipeline's, which call
those), or by hand, which `replace.check_unchanged` sees at the next request.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sojourn.inference.adaln.family import Family
from sojourn.inference.adaln.refusals import ModelReason, ModelRefused
from sojourn.inference.adaln.replace import stand_ins
from sojourn.inference.loading.safetensors_file import read_safetensors
from torch import nn

# What peft and diffusers save adapters as.
_ADAPTER_FILES = ("adapter_model*.safetensors", "pytorch_lora_weights*.safetensors")


def check_adapter(family: Family, targets: Iterable[str]) -> None:
    """Refuses an adapter that targets a projection, before any of it is written.

    Args:
        family: Of the transformer that the adapter is for.
        targets: Module names or state-dict keys of the adapter, with or without a prefix such as "transformer.".

    Raises:
        ModelRefused: The adapter's part on the projections would vanish.
    """
    hits = [target for target in targets if any(family.is_projection(name) for name in _module_names(target))]
    if hits:
        raise ModelRefused(
            ModelReason.ADAPTER,
            f"the adapter changes {len(hits)} tensors of modulation projections, {hits[0]} the first: with the plan "
            "cache they are not loaded and the change would vanish; set --adaln-cache off",
        )


def adapter_tensors(path: Path) -> list[str]:
    """Names of the tensors of the adapters that a file is or a folder holds; none where there are none."""
    if path.is_file():
        return list(read_safetensors(path).tensors)
    files = {file for pattern in _ADAPTER_FILES for file in path.glob(pattern)}
    return [name for file in sorted(files) for name in read_safetensors(file).tensors]


def guard_adapters(transformer: nn.Module, family: Family) -> None:
    """Has the transformer's own methods that load adapters check them first. Classes without such methods need none."""
    if hasattr(transformer, "load_lora_adapter"):
        load = transformer.load_lora_adapter

        @functools.wraps(load)
        def load_checked(source: Any, *args: Any, **kwargs: Any) -> Any:
            check_adapter(family, _tensors_of(source, kwargs.get("weight_name")))
            return load(source, *args, **kwargs)

        transformer.load_lora_adapter = load_checked
    if hasattr(transformer, "add_adapter"):
        add = transformer.add_adapter

        @functools.wraps(add)
        def add_checked(config: Any, *args: Any, **kwargs: Any) -> Any:
            check_adapter(family, _targeted(transformer, getattr(config, "target_modules", None)))
            return add(config, *args, **kwargs)

        transformer.add_adapter = add_checked


def _tensors_of(source: Any, weight_name: str | None) -> list[str]:
    """Of a state dict, a file, or a folder of files. A repository's name has none: nothing is downloaded here."""
    if isinstance(source, Mapping):
        return list(source)
    path = Path(source)
    return adapter_tensors(path / weight_name if weight_name else path)


def _targeted(transformer: nn.Module, targets: str | Iterable[str] | None) -> list[str]:
    """The replaced projections that an adapter's configuration means, by the rules of peft."""
    names = [stand_in.name for stand_in in stand_ins(transformer)]
    if isinstance(targets, str):
        return [name for name in names if targets == "all-linear" or re.fullmatch(targets, name)]
    wanted = tuple(targets or ())
    return [name for name in names if any(name == target or name.endswith(f".{target}") for target in wanted)]


def _module_names(target: str) -> list[str]:
    """Every name of a module that a key may mean: any run of its dotted parts that ends before a LoRA suffix."""
    parts = target.split(".")
    return [".".join(parts[start:end]) for start in range(len(parts)) for end in range(start + 1, len(parts) + 1)]
