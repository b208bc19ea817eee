"""Components by their own classes, with mapped weights in place of allocated ones.

Each model is built on the meta device as its library builds it when loading (so that buffers which are not in the
checkpoint are computed the same way), its names, shapes and dtypes are compared with the files, and the files' tensors
are put in as parameters. A tensor whose dtype is the wanted one stays a view of the mapping; the others are converted,
which copies. Which dtype is wanted is the library's own rule.
"""

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import init_empty_weights
from sojourn.inference.errors import ModelError
from sojourn.inference.loading import errors
from sojourn.inference.loading.errors import WeightsError
from sojourn.inference.loading.folder import ComponentFolder, ComponentKind
from sojourn.inference.loading.mapping import TORCH_DTYPES, MappedFile
from sojourn.inference.loading.precision import kept_in_float32
from sojourn.inference.loading.processor import build_processor
from sojourn.inference.loading.safetensors_file import TensorInfo

_LIBRARIES = ("diffusers", "transformers")
# Floating dtypes that convert into each other by value. The 8-bit ones mean nothing without their scales.
_FLOAT_DTYPES = frozenset({"F16", "BF16", "F32", "F64"})
_REMEDY = "config and weights are of different models; fetch the component again"


@dataclass(frozen=True, kw_only=True)
class Component:
    """One component, ready to run.

    Attributes:
        name: Its name in the pipeline.
        class_name: Its class.
        value: The component itself.
        files: Mappings of its weight files; on the CPU its parameters are views of them where dtypes allow.
    """

    name: str
    class_name: str
    value: Any
    files: tuple[MappedFile, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self._tensors(buffers=False))

    @property
    def size_bytes(self) -> int:
        """Bytes of parameters and buffers as loaded, tied ones once."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors(buffers=True))

    def _tensors(self, *, buffers: bool) -> Iterator[torch.Tensor]:
        if isinstance(self.value, torch.nn.Module):
            yield from self.value.parameters()
            if buffers:
                yield from self.value.buffers()


# Changes an empty model, given which dtype each tensor would be loaded in, so that it does without some of its tensors;
# returns their names.
LeaveOut = Callable[[torch.nn.Module, Callable[[str], torch.dtype]], frozenset[str]]


def build_component(
    folder: ComponentFolder, *, dtype: torch.dtype, device: torch.device, leave_out: LeaveOut | None = None
) -> Component:
    """Builds one component.

    Args:
        folder: Its files.
        dtype: Of the computation. Modules that the class keeps in float32 are float32 in any case.
        device: Where it runs. On the CPU parameters are views of the mapping; elsewhere they are copies.
        leave_out: Says which tensors of a model are checked and mapped, but not loaded; None for all loaded.

    Raises:
        ModelError: Files and class do not go together.
    """
    if folder.kind is ComponentKind.MODEL:
        return _build_model(folder, dtype=dtype, device=device, leave_out=leave_out)
    with _as_model_error(folder):
        if folder.kind is ComponentKind.PROCESSOR:
            value = build_processor(folder.library, folder.class_name, folder.path)
        elif folder.kind is ComponentKind.TOKENIZER:
            value = _class_of(folder).from_pretrained(folder.path, local_files_only=True)
        else:
            value = _class_of(folder).from_config(dict(folder.config))
    return Component(name=folder.name, class_name=type(value).__name__, value=value)


def _build_model(
    folder: ComponentFolder, *, dtype: torch.dtype, device: torch.device, leave_out: LeaveOut | None
) -> Component:
    with _as_model_error(folder):
        model = _empty_model(folder, dtype)
    tied = _tied_names(model)
    files = tuple(MappedFile(file) for file in folder.files)
    places = _places(folder, files)
    wanted = model.state_dict()
    _check_names(folder, wanted, places, tied)
    for name, file in places.items():
        _check_tensor(file, name, wanted[name])
    kept = kept_in_float32(folder.library, model)
    dtypes = {name: _wanted_dtype(kept, name, wanted[name], dtype) for name in places}
    left_out = leave_out(model, dtypes.__getitem__) if leave_out else frozenset()
    for name, file in places.items():
        if name not in left_out:
            _put(model, name, file.tensor(name).to(device=device, dtype=dtypes[name]))
    for name, source in tied.items():
        if name not in places:
            _put(model, name, model.get_parameter(source))
    if device.type != "cpu":
        model.to(device)  # the buffers that are not in the checkpoint
    return Component(name=folder.name, class_name=folder.class_name, value=model.eval(), files=files)


def _class_of(folder: ComponentFolder) -> Any:
    """Returns the component's class from its library; folders bring no code of their own."""
    if folder.library in _LIBRARIES:
        found = getattr(importlib.import_module(folder.library), folder.class_name, None)
        if found is not None:
            return found
    raise ModelError(
        errors.CLASS_UNKNOWN,
        folder.path,
        f"component {folder.name} is of class {folder.library}.{folder.class_name}, which is not installed; "
        f"classes come from {' and '.join(_LIBRARIES)}",
    )


@contextlib.contextmanager
def _as_model_error(folder: ComponentFolder) -> Iterator[None]:
    """Whatever a library says about a folder it cannot take is said as a ModelError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (ValueError, TypeError, KeyError, OSError, RuntimeError, AttributeError, ImportError) as error:
        raise ModelError(
            errors.CONFIG_INVALID, folder.path, f"{folder.class_name} cannot be built from it: {error}"
        ) from error


def _empty_model(folder: ComponentFolder, dtype: torch.dtype) -> torch.nn.Module:
    """Builds the model with parameters on the meta device and computed buffers in place, as stock loading does."""
    model_class = _class_of(folder)
    if folder.library == "transformers":
        config = model_class.config_class.from_pretrained(folder.path, local_files_only=True)
        construct = partial(model_class._from_config, config, dtype=dtype)
    else:
        construct = partial(model_class.from_config, dict(folder.config))
    with _default_dtype(dtype), init_empty_weights():
        return construct()


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _tied_names(model: torch.nn.Module) -> Mapping[str, str]:
    """Returns which parameters share another's storage: transformers' tie, empty where the config unties them."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def _places(folder: ComponentFolder, files: Sequence[MappedFile]) -> Mapping[str, MappedFile]:
    """Returns which file holds which tensor."""
    places: dict[str, MappedFile] = {}
    for file in files:
        for name in file.file.tensors:
            if name in places:
                raise WeightsError(
                    errors.TENSOR_DUPLICATE, file.file.path, f"tensor {name!r}", expected="in one file",
                    found=f"in {places[name].file.path.name} too", remedy=_REMEDY,
                )  # fmt: skip
            places[name] = file
    return places


def _check_names(
    folder: ComponentFolder,
    wanted: Mapping[str, torch.Tensor],
    places: Mapping[str, MappedFile],
    tied: Mapping[str, str],
) -> None:
    missing = [name for name in wanted if name not in places and name not in tied]
    if missing:
        first = missing[0]
        raise WeightsError(
            errors.TENSOR_MISSING, folder.path, f"tensor {first!r}{_and_more(missing)}",
            expected=f"shape {list(wanted[first].shape)}", found="no such tensor", remedy=_REMEDY,
        )  # fmt: skip
    unexpected = [name for name in places if name not in wanted]
    if unexpected:
        first = unexpected[0]
        info = places[first].file.tensors[first]
        raise WeightsError(
            errors.TENSOR_UNEXPECTED, places[first].file.path, f"tensor {first!r}{_and_more(unexpected)}",
            expected=f"no such tensor in {folder.class_name}", found=f"{info.dtype} {list(info.shape)}",
            remedy=_REMEDY,
        )  # fmt: skip


def _and_more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _check_tensor(file: MappedFile, name: str, wanted: torch.Tensor) -> None:
    info = file.file.tensors[name]
    if info.shape != tuple(wanted.shape):
        raise WeightsError(
            errors.TENSOR_SHAPE_MISMATCH, file.file.path, f"shape of tensor {name!r}",
            expected=f"{list(wanted.shape)}", found=f"{list(info.shape)}", remedy=_REMEDY,
        )  # fmt: skip
    if not _dtypes_agree(info, wanted.dtype):
        raise WeightsError(
            errors.TENSOR_DTYPE_MISMATCH, file.file.path, f"dtype of tensor {name!r}",
            expected=" or ".join(sorted(_FLOAT_DTYPES)) if wanted.dtype.is_floating_point else str(wanted.dtype),
            found=info.dtype, remedy="quantised checkpoints are not served; fetch the plain one",
        )  # fmt: skip


def _dtypes_agree(info: TensorInfo, wanted: torch.dtype) -> bool:
    if wanted.is_floating_point:
        return info.dtype in _FLOAT_DTYPES
    return TORCH_DTYPES.get(info.dtype) is wanted


def _wanted_dtype(kept: frozenset[str], name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of one tensor: float32 below a module that is kept so."""
    if not tensor.dtype.is_floating_point:
        return tensor.dtype
    return torch.float32 if kept & set(name.split(".")) else dtype


def _put(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Puts a tensor in place of the parameter or buffer of that name."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._parameters:
        parameter = tensor if isinstance(tensor, torch.nn.Parameter) else torch.nn.Parameter(tensor, False)
        module._parameters[leaf] = parameter
    else:
        module._buffers[leaf] = tensor
