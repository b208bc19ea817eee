"""A diffusers folder on disk, as its own files tell it, without importing torch or diffusers.

Everything is local: what the index names is looked for inside the folder and nowhere else, and nothing is downloaded.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from sojourn.inference.errors import ModelError
from sojourn.inference.loading import errors
from sojourn.inference.loading.errors import WeightsError
from sojourn.inference.loading.safetensors_file import SafetensorsFile, TensorInfo, read_safetensors

INDEX_NAME = "modular_model_index.json"
# The index of folders that are not modular: a component is its library and class, and lies under its name.
CLASSIC_INDEX_NAME = "model_index.json"
# What diffusers and transformers save a component's weights as.
_WEIGHT_STEMS = ("diffusion_pytorch_model", "model")
_PICKLE_NAMES = ("diffusion_pytorch_model.bin", "pytorch_model.bin")


class ComponentKind(StrEnum):
    """What a component is made of on disk."""

    MODEL = "model"
    SCHEDULER = "scheduler"
    GUIDER = "guider"
    TOKENIZER = "tokenizer"
    PROCESSOR = "processor"


# Which suffix of a class name makes which kind; everything else holds weights.
_KIND_BY_SUFFIX = {
    "Scheduler": ComponentKind.SCHEDULER,
    "Guidance": ComponentKind.GUIDER,
    "Tokenizer": ComponentKind.TOKENIZER,
    "TokenizerFast": ComponentKind.TOKENIZER,
    "Processor": ComponentKind.PROCESSOR,
}
_CONFIG_NAMES = {
    ComponentKind.MODEL: "config.json",
    ComponentKind.SCHEDULER: "scheduler_config.json",
    ComponentKind.GUIDER: "guider_config.json",
}


@dataclass(frozen=True, kw_only=True)
class ComponentFolder:
    """One component as its files tell it.

    Attributes:
        name: Its name in the pipeline.
        library, class_name: Its class, such as "diffusers" and "AutoencoderKL".
        kind: What it is made of.
        path: Its folder.
        config: Its configuration; empty for tokenizers and processors.
        files: Its checked weight files; empty for kinds other than MODEL.
    """

    name: str
    library: str
    class_name: str
    kind: ComponentKind
    path: Path
    config: Mapping[str, Any]
    files: tuple[SafetensorsFile, ...]

    @property
    def tensors(self) -> Iterable[TensorInfo]:
        """All tensors of all its files."""
        return (tensor for file in self.files for tensor in file.tensors.values())


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A model folder as its files tell it.

    Attributes:
        path: The folder.
        pipeline_class: Name of the pipeline's class, such as "MiniMaxH3ModularPipeline".
        values: The index's entries that are not components, such as "canvas_short_edge".
        components: The components that are there, by name, in the index's order.
        absent: Components that the index names without a folder being there, with the folder looked for.
    """

    path: Path
    pipeline_class: str
    values: Mapping[str, Any]
    components: Mapping[str, ComponentFolder]
    absent: Mapping[str, Path]


def read_folder(path: Path) -> ModelFolder:
    """Reads the index, the configurations and the weight files' headers of a model folder.

    Raises:
        ModelError: Something is missing or not as it should be; the reason says what.
    """
    index_path, index = _read_index(path)
    pipeline_class = index.get("_class_name")
    if not isinstance(pipeline_class, str):
        raise ModelError(errors.INDEX_INVALID, index_path, f"_class_name is {pipeline_class!r}, not a class name")
    components, absent, values = {}, {}, {}
    for name, entry in index.items():
        if not _is_component(entry):
            values[name] = entry
            continue
        folder = _component_path(path, index_path, name, entry)
        if folder is None or not folder.is_dir():
            absent[name] = folder or path / name
        else:
            components[name] = _read_component(index_path, name, entry, folder)
    return ModelFolder(path=path, pipeline_class=pipeline_class, values=values, components=components, absent=absent)


def _read_index(path: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the index that there is, the modular one first, with its components as the modular one has them."""
    classic = path / CLASSIC_INDEX_NAME
    if (path / INDEX_NAME).exists() or not classic.exists():
        modular = path / INDEX_NAME
        return modular, _read_json(modular, missing=errors.INDEX_MISSING, invalid=errors.INDEX_INVALID)
    index = _read_json(classic, missing=errors.INDEX_MISSING, invalid=errors.INDEX_INVALID)
    return classic, {name: _as_modular(name, entry) for name, entry in index.items()}


def _as_modular(name: str, entry: Any) -> Any:
    if isinstance(entry, list) and len(entry) == 2 and all(part is None or isinstance(part, str) for part in entry):
        return [*entry, {"subfolder": name if None not in entry else ""}]
    return entry


def _read_json(path: Path, *, missing: str, invalid: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ModelError(missing, path, "no such file; is this a diffusers modular model folder?") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(invalid, path, f"not readable as UTF-8 JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(invalid, path, f"expected a JSON object, found {type(content).__name__}")
    return content


def _is_component(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], dict)


def _component_path(root: Path, index_path: Path, name: str, entry: list[Any]) -> Path | None:
    """Returns the component's folder, or None where the index says that it has none.

    The index may name the repository it was published in: a local folder is complete in itself, so only the
    subfolder counts. An entry without a class, or without both source and subfolder, is a component left out.
    """
    spec = entry[2]
    subfolder = spec.get("subfolder") or ""
    if _class_of(entry) is None or not (subfolder or spec.get("pretrained_model_name_or_path")):
        return None
    if not isinstance(subfolder, str):
        raise ModelError(errors.INDEX_INVALID, index_path, f"subfolder of {name} is {subfolder!r}, not a path")
    return _inside(root, root / subfolder, index_path, f"component {name}")


def _inside(root: Path, path: Path, index_path: Path, what: str) -> Path:
    """Returns `path`, refusing one outside `root`. Links inside may point anywhere: caches are built of them."""
    relative = Path(path).relative_to(root) if path.is_relative_to(root) else path
    if relative.is_absolute() or ".." in relative.parts:
        raise ModelError(errors.PATH_ESCAPES, index_path, f"{what} lies at {path}, outside the folder {root}")
    return path


def _class_of(entry: list[Any]) -> tuple[str, str] | None:
    """Returns library and class of an index entry: the type hint, as diffusers does, else the pair before it."""
    for pair in (entry[2].get("type_hint"), entry[:2]):
        if isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair):
            return pair[0], pair[1]
    return None


def _read_component(index_path: Path, name: str, entry: list[Any], folder: Path) -> ComponentFolder:
    found = _class_of(entry)
    if found is None:
        raise ModelError(errors.INDEX_INVALID, index_path, f"component {name} names no class")
    library, class_name = found
    kind = next((k for suffix, k in _KIND_BY_SUFFIX.items() if class_name.endswith(suffix)), ComponentKind.MODEL)
    config = {}
    if kind in _CONFIG_NAMES:
        config = _read_json(folder / _CONFIG_NAMES[kind], missing=errors.CONFIG_MISSING, invalid=errors.CONFIG_INVALID)
    files = _weight_files(folder, entry[2].get("variant")) if kind is ComponentKind.MODEL else ()
    return ComponentFolder(
        name=name, library=library, class_name=class_name, kind=kind, path=folder, config=config, files=files
    )


def _weight_files(folder: Path, variant: str | None) -> tuple[SafetensorsFile, ...]:
    """Reads the headers of a component's weight files, one or several shards."""
    middle = f".{variant}" if variant else ""
    if Path(middle).name != middle:
        raise ModelError(errors.PATH_ESCAPES, folder, f"variant {variant!r} is a path, not a part of a file's name")
    for stem in _WEIGHT_STEMS:
        index_path = folder / f"{stem}.safetensors.index{middle}.json"
        if index_path.exists():
            return _shards(folder, index_path)
        single = folder / f"{stem}{middle}.safetensors"
        if single.exists() or single.is_symlink():
            return (read_safetensors(single),)
    pickles = [file for file in _PICKLE_NAMES if (folder / file).exists()]
    expected = " or ".join(f"{stem}{middle}.safetensors" for stem in _WEIGHT_STEMS)
    raise WeightsError(
        errors.WEIGHTS_NOT_SAFETENSORS if pickles else errors.WEIGHTS_MISSING, folder, "weights of the component",
        expected=expected, found=", ".join(pickles) or "no weight file",
        remedy="convert them to safetensors" if pickles else "fetch the folder again",
    )  # fmt: skip


def _shards(folder: Path, index_path: Path) -> tuple[SafetensorsFile, ...]:
    """Reads the headers of all shards, and checks that each tensor is in the shard that the index says."""
    index = _read_json(index_path, missing=errors.WEIGHTS_MISSING, invalid=errors.WEIGHTS_HEADER_INVALID)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise ModelError(errors.WEIGHTS_HEADER_INVALID, index_path, "weight_map is not an object of file names")
    files = {}
    for shard in sorted(set(places.values())):
        path = _inside(folder, folder / shard, index_path, "shard")
        if not path.exists():
            raise WeightsError(
                errors.WEIGHTS_SHARD_MISSING, index_path, "a shard", expected=shard,
                found="no such file", remedy="fetch the missing file",
            )  # fmt: skip
        files[shard] = read_safetensors(path)
    _check_places(index_path, places, files)
    return tuple(files.values())


def _check_places(index_path: Path, places: Mapping[str, str], files: Mapping[str, SafetensorsFile]) -> None:
    for name, shard in places.items():
        if name not in files[shard].tensors:
            raise WeightsError(
                errors.TENSOR_MISSING, files[shard].path, f"tensor {name!r}", expected=f"as {index_path.name} says",
                found="no such tensor", remedy="shards and index are of different checkpoints; fetch both again",
            )  # fmt: skip
    for shard, file in files.items():
        for name in file.tensors:
            if places.get(name) != shard:
                raise WeightsError(
                    errors.TENSOR_DUPLICATE, file.path, f"tensor {name!r}",
                    expected=f"in {places.get(name, 'no shard')} as {index_path.name} says", found=f"in {shard}",
                    remedy="shards and index are of different checkpoints; fetch both again",
                )  # fmt: skip
