"""Takes the projections out of a transformer and puts stand-ins in their places."""

from collections.abc import Callable

import torch
from sojourn.inference.adaln.family import Family
from sojourn.inference.adaln.refusals import ModelReason, ModelRefused
from sojourn.inference.adaln.settings import Precision
from sojourn.inference.adaln.standin import StandIn
from sojourn.inference.adaln.table import Projection, Table
from torch import nn

DtypeOf = Callable[[str], torch.dtype]


def projections_of(transformer: nn.Module, family: Family, dtype_of: DtypeOf | None = None) -> dict[str, Projection]:
    """The projections of a transformer, in the order of its modules.

    Args:
        transformer: Of the family's class; its parameters may be on the meta device.
        family: Says which modules are projections.
        dtype_of: Name of a tensor -> what it would be loaded in; None for the dtype of the parameters as they are.

    Raises:
        ModelRefused: A projection is not a plain Linear, or there is none.
    """
    found = {}
    for name, module in transformer.named_modules():
        if family.is_projection(name):
            linear = _plain_linear(name, module)
            found[name] = Projection(
                width=linear.out_features,
                inputs=linear.in_features,
                dtype=dtype_of(f"{name}.weight") if dtype_of else linear.weight.dtype,
                bias=linear.bias is not None,
            )
    if not found:
        raise ModelRefused(
            ModelReason.NO_PROJECTION, f"{type(transformer).__name__} has no module named as a projection"
        )
    return found


def replace_projections(
    transformer: nn.Module, family: Family, *, dtype_of: DtypeOf | None = None, device: torch.device | None = None
) -> Table:
    """Puts a stand-in in the place of every projection.

    Args:
        transformer: Of the family's class; its parameters may be on the meta device.
        family: Says which modules are projections.
        dtype_of: Name of a tensor -> what it would be loaded in; None for the dtype of the parameters as they are.
        device: Where the transformer will run; None for where its projections lie.

    Returns:
        Where each projection's outputs lie in a row.

    Raises:
        ModelRefused: The model, as it is, cannot be served from the cache; nothing was replaced.
    """
    check_model(transformer, family)
    projections = projections_of(transformer, family, dtype_of)
    for name, projection in projections.items():
        parent, _, child = name.rpartition(".")
        owner = transformer.get_submodule(parent)
        where = device or getattr(owner, child).weight.device
        setattr(owner, child, StandIn(name, projection, where))
    return Table.of(projections)


def stand_ins(transformer: nn.Module) -> list[StandIn]:
    """The stand-ins of a transformer."""
    return [module for module in transformer.modules() if isinstance(module, StandIn)]


def check_model(transformer: nn.Module, family: Family) -> None:
    """Refuses what would give other rows than the resident projections, or none.

    Raises:
        ModelRefused: By name: quantised, cast to fp8 layer by layer, or with an adapter on a projection.
    """
    config = getattr(transformer, "config", {})
    family.check_config(config)
    if getattr(transformer, "hf_quantizer", None) is not None or config.get("quantization_config"):
        raise ModelRefused(
            ModelReason.QUANTISED,
            f"{type(transformer).__name__} is quantised: its projections are not those of the checkpoint; "
            "set --adaln-cache off",
        )
    for name, module in transformer.named_modules():
        if family.is_projection(name):
            _refuse_layerwise_cast(name, module)


def check_unchanged(transformer: nn.Module, precision: Precision) -> None:
    """Refuses a transformer that has become, since its projections were replaced, one that stored rows do not serve.

    Compilers fuse, and fused rows differ in their last bits: under precision "match" nothing may be compiled. An
    adapter around a stand-in would add to rows that were made without it.

    Raises:
        ModelRefused: Naming the module.
    """
    for name, module in transformer.named_modules():
        if isinstance(module._modules.get("base_layer"), StandIn):
            raise ModelRefused(
                ModelReason.ADAPTER, f"{name} carries an adapter; unload it or load the model with --adaln-cache off"
            )
        is_compiled = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
        if is_compiled and precision is Precision.MATCH:
            raise ModelRefused(
                ModelReason.COMPILED,
                f"{name or type(transformer).__name__} is compiled, and the plan cache promises the bits of the eager "
                "projection; set --adaln-precision fp32, or --adaln-cache off",
            )


def _plain_linear(name: str, module: nn.Module) -> nn.Linear:
    if type(module) is nn.Linear:
        return module
    if hasattr(module, "base_layer"):
        raise ModelRefused(
            ModelReason.ADAPTER,
            f"{name} carries an adapter, which would vanish; load without it or set --adaln-cache off",
        )
    raise ModelRefused(
        ModelReason.QUANTISED, f"{name} is a {type(module).__name__} and not a plain Linear; set --adaln-cache off"
    )


def _refuse_layerwise_cast(name: str, module: nn.Module) -> None:
    registry = getattr(module, "_diffusers_hook", None)
    stored = getattr(getattr(module, "weight", None), "dtype", None)
    if (registry is not None and registry.get_hook("layerwise_casting") is not None) or (
        stored is not None and stored.is_floating_point and stored.itemsize == 1
    ):
        raise ModelRefused(
            ModelReason.FP8_CAST,
            f"{name} is stored in fp8 and cast layer by layer, which gives other rows than the checkpoint; "
            "set --adaln-cache off or load without layerwise casting",
        )
