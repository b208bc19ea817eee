"""From a model folder and a machine to a memory plan: what `sojourn plan` shows and `sojourn serve` follows."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from sojourn.inference.adaln.saving import saving_of
from sojourn.inference.adaln.settings import Mode as PlanCacheMode
from sojourn.inference.adaln.settings import PlanCacheSettings
from sojourn.inference.errors import Unsupported
from sojourn.inference.families.family import UsualRequest
from sojourn.inference.loading.folder import ModelFolder
from sojourn.inference.offload.activations import RUNTIME_BYTES, Workload
from sojourn.inference.offload.headers import ComponentWeights, model_weights
from sojourn.inference.offload.memory_plan import CacheSize, Demand, Machine, MemoryPlan, plan_memory
from sojourn.inference.offload.options import OffloadOptions
from sojourn.inference.offload.room import RoomReader
from sojourn.inference.offload.settings import Mode, Selection
from sojourn.inference.watch import Stage

# As safetensors spells torch's dtypes.
_PRECISIONS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


# A stage and the components that it uses.
StageUse = tuple[Stage, frozenset[str]]


def plan_model(
    folder: ModelFolder, stages: Sequence[StageUse], machine: Machine, options: OffloadOptions, *, dtype: torch.dtype
) -> MemoryPlan:
    """Plans a model from its headers alone.

    Args:
        folder: Its files.
        stages: Of every workflow that is served, in order.
        machine: What there is.
        options: What the installation asks for.
        dtype: Of the computation.

    Raises:
        Unsupported: An option names a component that the model does not have, or a mode that it cannot have.
    """
    named = {name: cache.transformer for name, cache in options.caches.items() if cache.transformer}
    weights = model_weights(folder, precision=_PRECISIONS[dtype], transformers=named)
    names = {part.name for part in weights}
    _check_names(options, weights)
    demand = Demand(
        weights=weights,
        stages=_named(stages, names),
        settings=_settings(options, weights),
        caches=options.caches,
        uses={name: options.passes or 1 for name in names if name.startswith("transformer")},
        workload=options.workload or Workload(),
        pinning=options.pinning,
    )
    return plan_memory(demand, machine)


def _check_names(options: OffloadOptions, weights: Sequence[ComponentWeights]) -> None:
    names = {part.name for part in weights}
    for name in (*options.settings.named, *options.caches):
        if name not in names:
            raise Unsupported(f"there is no component {name!r} to offload; the model has {', '.join(sorted(names))}")
    layered = {part.name for part in weights if part.layers}
    for name, setting in options.settings.named.items():
        if setting.mode is Mode.LAYERWISE and name not in layered:
            raise Unsupported(
                f"{name} has no repeated layers to stream; set its offload mode to component or resident "
                f"(layerwise is for {', '.join(sorted(layered)) or 'none of this model'})"
            )


def _settings(options: OffloadOptions, weights: Sequence[ComponentWeights]) -> Selection:
    """The settings of every component: one without layers comes and goes as a whole where all are to stream."""
    named = {}
    for part in weights:
        found = options.settings.of(part.name)
        streams = found.mode is Mode.LAYERWISE and not part.layers
        named[part.name] = replace(found, mode=Mode.COMPONENT) if streams else found
    return Selection(default=options.settings.default, named=named)


def with_plan_caches(options: OffloadOptions, folder: ModelFolder, settings: PlanCacheSettings) -> OffloadOptions:
    """The options with a plan cache for every component that will have one by these settings.

    Its host tier is not planned for: it takes what is left, and nothing where nothing is.
    """
    caches = dict(options.caches)
    for name, part in folder.components.items():
        saving = None if settings.mode is PlanCacheMode.OFF else saving_of(part, settings)
        if saving is not None and (settings.mode is PlanCacheMode.ON or saving.saved_bytes > 0):
            transformer = settings.projected_as(name, part.class_name)
            caches.setdefault(name, CacheSize(slots=settings.plans, width=settings.width, transformer=transformer))
    return replace(options, caches=caches)


def with_usual_request(options: OffloadOptions, folder: ModelFolder, usual: UsualRequest) -> OffloadOptions:
    """The options with what a family's requests usually are, where the installation does not say."""
    return replace(
        options,
        workload=options.workload or usual.workload(folder.values),
        passes=options.passes or usual.passes,
    )


def _named(stages: Sequence[StageUse], names: set[str]) -> list[tuple[str, frozenset[str]]]:
    """The stages by name, each distinct use once; where a stage has several, its components tell them apart."""
    found = list(dict.fromkeys((stage.value, used & names) for stage, used in stages if used & names))
    alike = [stage for stage, _ in found]
    return [
        (stage if alike.count(stage) == 1 else f"{stage} ({', '.join(sorted(used))})", used) for stage, used in found
    ]


def this_machine(device: torch.device, options: OffloadOptions, *, reader: RoomReader) -> Machine:
    """What the model may take here: what is asked for, or what there is.

    Args:
        device: Where it will run.
        options: With limits of the installation's own.
        reader: Measures the host.
    """
    host_bytes = options.host_memory_bytes
    if host_bytes is None:
        # The plan counts the runtime as needed, and what this process has of it already is no longer available.
        host_bytes = reader.read(()).available_bytes + min(RUNTIME_BYTES, reader.anonymous_bytes())
    if device.type != "cuda" or shares_host_memory(device):
        return Machine(device_bytes=None, host_bytes=host_bytes, shared_device=device.type == "cuda")
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return Machine(device_bytes=options.device_memory_bytes or free_bytes, host_bytes=host_bytes)


def shares_host_memory(device: torch.device) -> bool:
    """Whether device and host have one memory: the CPU itself, and integrated GPUs."""
    if device.type != "cuda":
        return device.type == "cpu"
    return bool(torch.cuda.get_device_properties(device).is_integrated)
