"""What a model folder holds, from configurations and headers alone: no torch, no weights read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sojourn.inference.families.projections import is_projection
from sojourn.inference.loading.folder import ComponentFolder, read_folder


@dataclass(frozen=True, kw_only=True)
class ComponentInspection:
    """One component as its files tell it.

    Attributes:
        name: Its name in the pipeline.
        class_name: Its class.
        parameters: Elements of its tensors; tied weights are stored, and counted, once.
        size_bytes: Bytes of its tensors on disk.
        dtypes: Their dtypes as safetensors spells them, that of most bytes first.
        files: Number of weight files.
        adaln_parameters, adaln_bytes: The part of them that projects the timestep embedding (AdaLN).
    """

    name: str
    class_name: str
    parameters: int
    size_bytes: int
    dtypes: tuple[str, ...]
    files: int
    adaln_parameters: int
    adaln_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelInspection:
    """A model folder as its files tell it.

    Attributes:
        path: The folder.
        pipeline_class: Class of the pipeline as the index names it.
        components: Components with weights first, largest first, then the others by name.
        absent: Names of components that the index names and the folder does not hold.
    """

    path: Path
    pipeline_class: str
    components: tuple[ComponentInspection, ...]
    absent: tuple[str, ...]


def inspect_folder(path: Path, *, transformers: Mapping[str, str] | None = None) -> ModelInspection:
    """Reads a model folder's configurations and headers.

    Args:
        path: The folder.
        transformers: Components whose projections are those of another class than their own, with that class.

    Raises:
        ModelError: The folder, or a file in it, is not as it should be; the reason says what.
    """
    folder = read_folder(path)
    others = transformers or {}
    parts = [_inspect(part, others.get(part.name, part.class_name)) for part in folder.components.values()]
    return ModelInspection(
        path=path,
        pipeline_class=folder.pipeline_class,
        components=tuple(sorted(parts, key=lambda part: (-part.size_bytes, part.name))),
        absent=tuple(sorted(folder.absent)),
    )


def _inspect(part: ComponentFolder, transformer: str) -> ComponentInspection:
    tensors = list(part.tensors)
    projections = [tensor for tensor in tensors if is_projection(transformer, tensor.name)]
    bytes_by_dtype: dict[str, int] = {}
    for tensor in tensors:
        bytes_by_dtype[tensor.dtype] = bytes_by_dtype.get(tensor.dtype, 0) + tensor.size_bytes
    return ComponentInspection(
        name=part.name,
        class_name=part.class_name,
        parameters=sum(tensor.elements for tensor in tensors),
        size_bytes=sum(tensor.size_bytes for tensor in tensors),
        dtypes=tuple(sorted(bytes_by_dtype, key=lambda dtype: -bytes_by_dtype[dtype])),
        files=len(part.files),
        adaln_parameters=sum(tensor.elements for tensor in projections),
        adaln_bytes=sum(tensor.size_bytes for tensor in projections),
    )
