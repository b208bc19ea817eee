"""From a model folder to a pipeline."""

import logging
import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from sojourn.inference.adaln.caches import PlanCaches
from sojourn.inference.adaln.counters import Counters, Observer
from sojourn.inference.adaln.overrides import check_components
from sojourn.inference.adaln.settings import PlanCacheSettings
from sojourn.inference.errors import ModelError, Unsupported
from sojourn.inference.families.family import Family
from sojourn.inference.families.table import family_of
from sojourn.inference.loading import errors
from sojourn.inference.loading.components import Component, build_component
from sojourn.inference.loading.fingerprint import BackgroundFingerprint, checkpoint_fingerprint
from sojourn.inference.loading.folder import ModelFolder, read_folder
from sojourn.inference.offload.install import install, log_component
from sojourn.inference.offload.observer import Observer as OffloadObserver
from sojourn.inference.offload.observer import silent
from sojourn.inference.offload.options import OffloadOptions
from sojourn.inference.offload.planning import plan_model, this_machine, with_plan_caches, with_usual_request
from sojourn.inference.offload.room import RoomReader
from sojourn.inference.pipeline.pipeline import Pipeline
from sojourn.inference.pipeline.workflow import components_of, served_stages, workflow_leaves
from sojourn.inference.quality.observer import Observer as QualityObserver
from sojourn.inference.quality.observer import silent as silent_quality
from sojourn.inference.quality.settings import QualitySettings


class DeviceChoice(StrEnum):
    """Where to run."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Precision(StrEnum):
    """What to compute in; the names are torch's."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


def load_pipeline(
    path: Path,
    *,
    device: DeviceChoice = DeviceChoice.AUTO,
    precision: Precision = Precision.BFLOAT16,
    model_name: str | None = None,
    fingerprint_cache: Path | None = None,
    plan_settings: PlanCacheSettings | None = None,
    plan_observer: Observer | None = None,
    offload: OffloadOptions | None = None,
    offload_observer: OffloadObserver = silent,
    quality_settings: QualitySettings | None = None,
    quality_observer: QualityObserver = silent_quality,
) -> Pipeline:
    """Loads a diffusers modular model folder. Nothing is downloaded.

    Args:
        path: The folder.
        device: Where to run; AUTO takes CUDA where there is one.
        precision: What to compute in, but for the modules that their classes keep in float32.
        model_name: Name to serve it under; the folder's own by default.
        fingerprint_cache: Folder to keep the digests of weight files in between starts.
        plan_settings: Of the AdaLN plan cache; None for its defaults.
        plan_observer: Counts what the plan cache does.
        offload: What to place weights by; the defaults if None.
        offload_observer: Told where weights are and what moves them.
        quality_settings: Of the quality tiers; None for their defaults.
        quality_observer: Told of what is mounted on the transformers.

    Raises:
        ModelError: The folder cannot be served; the reason says why.
        DoesNotFit: The memory plan finds no placement; the message has the number needed.
        Unsupported: CUDA was asked for and there is none, or the plan cache was asked for and cannot serve the model.
        SettingRefused: A family was named for a component that there is not, or that is not of it.
        TableUnreadable: A table of measured errors is not one.
    """
    where = torch_device(device)
    _quieten_libraries()
    folder = read_folder(path)
    family = family_of(folder)
    _check_serves_something(folder, family)
    dtype: torch.dtype = getattr(torch, precision.value)
    settings = plan_settings or PlanCacheSettings()
    check_components(settings.families, folder.components)
    plans = PlanCaches(settings, where, plan_observer or Counters())
    left_out = {name: plans.leave_out(part) for name, part in folder.components.items()}
    options = with_usual_request(offload or OffloadOptions(), folder, family.usual)
    options = with_plan_caches(options, folder, plans.settings)
    stages = served_stages(family, folder.components)
    machine = this_machine(where, options, reader=RoomReader(os.getpid()))
    plan = plan_model(folder, stages, machine, options, dtype=dtype)
    plan.check(path)
    components = {
        name: build_component(
            part,
            dtype=dtype,
            device=where if plan.resident(name) else torch.device("cpu"),
            leave_out=left_out[name],
        )
        for name, part in folder.components.items()
    }
    # Weights are pinned after this: the host tier takes what the plan leaves them, not what is free now.
    plans.open(components, host_left_bytes=plan.headroom_bytes()["host"])
    for component in components.values():
        log_component(component)
    pipeline = Pipeline(
        model_name=model_name or path.resolve().name,
        family=family,
        stock=_stock_pipeline(folder, family, components),
        components=components,
        device=where,
        dtype=dtype,
        fingerprint=_fingerprint(components, fingerprint_cache),
        plans=plans,
        quality_settings=quality_settings,
        quality_observer=quality_observer,
    )
    placed = install(components, plan, options, device=where, observer=offload_observer)
    placed.log_settled()
    pipeline.offload, pipeline.life = placed, placed.life
    return pipeline


def torch_device(choice: DeviceChoice) -> torch.device:
    """The device of a choice.

    Raises:
        Unsupported: CUDA was asked for and there is none.
    """
    there = torch.cuda.is_available()
    if choice is DeviceChoice.CUDA and not there:
        raise Unsupported("device cuda was asked for and torch sees none; ask for cpu, or check driver and torch build")
    return torch.device("cuda:0" if there and choice is not DeviceChoice.CPU else "cpu")


def _quieten_libraries() -> None:
    """Silences what the libraries print: their errors reach us as exceptions, their progress as events."""
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity(logging.CRITICAL)
        library.utils.logging.disable_progress_bar()


def _check_serves_something(folder: ModelFolder, family: Family) -> None:
    """Refuses a folder in which every workflow lacks a component."""
    needs = (components_of(workflow_leaves(family, workflow)) for workflow in family.workflows)
    lacking = min((sorted(need - folder.components.keys()) for need in needs), key=len)
    if lacking:
        raise ModelError(
            errors.COMPONENT_MISSING,
            folder.absent.get(lacking[0], folder.path / lacking[0]),
            f"component {lacking[0]} is missing, so no workflow of {family.name} can be served; fetch the whole folder",
        )


def _stock_pipeline(folder: ModelFolder, family: Family, components: Mapping[str, Component]) -> Any:
    """Makes the stock pipeline object with our components in it. Of the index it is given the values alone."""
    pipeline_class = getattr(diffusers, family.pipeline_class)
    stock = pipeline_class(blocks=getattr(diffusers, family.blocks_class)(), modular_config_dict=dict(folder.values))
    stock.register_to_config(**{name: value for name, value in folder.values.items() if not name.startswith("_")})
    for name, make in family.companions.items():
        setattr(stock, name, make())
    for name, component in components.items():
        setattr(stock, name, component.value)
    return stock


def _fingerprint(components: Mapping[str, Component], cache: Path | None) -> BackgroundFingerprint:
    files = {name: component.files for name, component in components.items()}
    return BackgroundFingerprint(lambda: checkpoint_fingerprint(files, cache=cache))
