"""Where a pass over a component's layers begins and ends.

Pipelines do not always call a component as such: a text encoder's inner model is called, a VAE's decoder. So every
module around the layers is watched, and the outermost one that is called makes the pass.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class _Depth(threading.local):
    """How many of the watched modules are running on this thread."""

    value = 0


def hook_passes(
    component: nn.Module, layers: Sequence[nn.Module], *, begin: Callable[[], None], end: Callable[[bool], None]
) -> Callable[[], None]:
    """Calls `begin` and `end` around every pass; returns what undoes it.

    Args:
        component: The module that holds the layers.
        layers: The layers.
        begin: Called before the outermost module runs; if it raises, the module does not run and `end` is called.
        end: Called after it, with whether it ended well.
    """
    depth = _Depth()

    def enter(*_: Any) -> None:
        depth.value += 1
        if depth.value == 1:
            begin()

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        depth.value -= 1
        if depth.value == 0:
            end(output is not None)  # a hook that is always called gets None after an exception

    handles: list[RemovableHandle] = []
    for module in ancestors(component, layers):
        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))

    def undo() -> None:
        while handles:
            handles.pop().remove()

    return undo


def ancestors(component: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that hold a layer at any depth, outermost first; the component is one in any case."""
    wanted = set(layers)
    return [
        module
        for module in component.modules()
        if module is component or (module not in wanted and any(child in wanted for child in module.modules()))
    ]
