"""The step cache of tier `high`: diffusers' first-block cache, mounted and unmounted without a trace.

Each step runs the first block. Where what it adds has moved by less than `threshold` (mean absolute change, relative)
since the last step that ran in full, the rest of the blocks is not run and what it added then is added again. The
comparison is always with a step that ran, so that small changes cannot add up unseen. What this costs in the picture
was measured for each model (`measured`).

Two things are ours: its state is fresh for each clip, and for each trajectory in it (another size of the latents, or a
timestep that jumps back, as at Helios' chunks and levels); and a pipeline that names no context for it, as
MiniMax-H3's, gets one.
"""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from diffusers.hooks import FirstBlockCacheConfig
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.hooks.first_block_cache import _FBC_LEADER_BLOCK_HOOK
from diffusers.hooks.hooks import CacheContext
from sojourn.inference.quality.fusion_mount import MountRefused, UnmountFailed
from sojourn.inference.quality.observer import Observer, Part
from sojourn.inference.quality.sites import TransformerSites
from torch import nn
from torch.utils.hooks import RemovableHandle

_CONTEXT = "denoise"
_MIN_BLOCKS = 2


def register_blocks(sites: TransformerSites) -> None:
    """Tells diffusers what the blocks of a class take and give; twice does nothing."""
    module, _, name = sites.block_class.rpartition(".")
    block_class = getattr(import_module(module), name)
    try:
        TransformerBlockRegistry.get(block_class)
    except ValueError:
        metadata = TransformerBlockMetadata(return_hidden_states_index=0, return_encoder_hidden_states_index=None)
        TransformerBlockRegistry.register(block_class, metadata)


@dataclass
class MountedStepCache:
    """The step cache on one transformer.

    Attributes:
        sites: Blocks that it may skip or watches.
    """

    transformer: Any
    sites: int
    place: TransformerSites
    observer: Observer
    part: Part = Part.STEP_CACHE
    _manager: Any = None
    _modules_before: dict[nn.Module, frozenset[str]] = field(default_factory=dict)
    _handles: list[RemovableHandle] = field(default_factory=list)
    _last: tuple[torch.Size, torch.Tensor] | None = None
    _context_is_ours: bool = False

    @classmethod
    def on(
        cls, transformer: Any, place: TransformerSites, *, threshold: float, observer: Observer
    ) -> "MountedStepCache":
        """Mounts it.

        Raises:
            MountRefused: The transformer has another cache, or too few blocks; nothing is changed.
        """
        blocks = getattr(transformer, place.blocks)
        if transformer.is_cache_enabled:
            raise MountRefused(f"the transformer runs with {type(transformer._cache_config).__name__} already")
        if len(blocks) < _MIN_BLOCKS:
            raise MountRefused(f"the transformer has {len(blocks)} block, and there is nothing to skip after the first")
        register_blocks(place)
        mounted = cls(transformer=transformer, sites=len(blocks), place=place, observer=observer)
        # diffusers leaves a registry and a forward on every module that it has hooked once.
        mounted._modules_before = {module: frozenset(module.__dict__) for module in transformer.modules()}
        try:
            transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
            mounted._manager = blocks[0]._diffusers_hook.get_hook(_FBC_LEADER_BLOCK_HOOK).state_manager
            mounted._handles.append(transformer.register_forward_pre_hook(mounted._begin, with_kwargs=True))
            mounted._handles.append(transformer.register_forward_hook(mounted._end, always_call=True))
        except BaseException:
            mounted.undo()
            raise
        return mounted

    def fresh(self) -> None:
        """Forgets every step: another clip begins, or one has ended."""
        self._manager.reset()
        self._last = None

    def undo(self) -> None:
        """Takes it off. May be called again.

        Raises:
            UnmountFailed: diffusers could not; the transformer may not be run as if it were stock.
        """
        while self._handles:
            self._handles.pop().remove()
        if self.transformer.is_cache_enabled:
            try:
                self.transformer.disable_cache()
            except Exception as error:
                raise UnmountFailed(f"the step cache cannot be taken off: {error}; start the process anew") from error
        for module, names in self._modules_before.items():
            for left in ("forward", "_diffusers_hook", "_cache_config"):
                if left in module.__dict__ and left not in names:
                    delattr(module, left)
        self._modules_before.clear()

    def _begin(self, transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            context = self._manager.context
        except ValueError:
            self._context_is_ours, context = True, CacheContext(_CONTEXT)
        now = _argument("hidden_states", 0, args, kwargs).shape, _argument("timestep", 1, args, kwargs)
        if self._last is not None and (self._last[0] != now[0] or self.place.restarts(self._last[1], now[1])):
            self._manager.reset()
        self._last = now
        self._manager.set_context(context)

    def _end(self, transformer: nn.Module, args: Any, output: Any) -> None:
        if output is not None:  # None after an exception
            self.observer.evaluated(skipped=not self._manager.get_state().should_compute)
        if self._context_is_ours:
            self._manager.set_context(None)
            self._context_is_ours = False


def _argument(name: str, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return kwargs[name] if name in kwargs else args[place]
