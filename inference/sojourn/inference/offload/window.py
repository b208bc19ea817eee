"""The window over a stack of layers: those on the device now, those on their way, those dropped.

Copies run ahead of the computation in the order in which the layers are really called. Every call of a layer goes
through `enter` and `leave`, by hooks. What is kept on the device follows from one rule: a streamed layer stays while
it runs or is among the next ones expected; everything else is dropped. So a skipped layer's early fetch is given back
without a special case, and after the last layer the head of the next pass is already on its way.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sojourn.inference.offload.courier import Courier, CourierRetired, Parcel
from sojourn.inference.offload.hosting import HostTier
from sojourn.inference.offload.observer import Fallback, Observer, silent
from sojourn.inference.offload.order import CallOrder
from sojourn.inference.offload.passes import hook_passes
from sojourn.inference.offload.stack import LayerStack
from sojourn.inference.offload.stores import Buffers, Store
from sojourn.inference.offload.streams import Streams
from torch import nn
from torch.utils.hooks import RemovableHandle


@dataclass(eq=False, kw_only=True)
class _Loaded:
    """A unit on the device or on its way.

    Attributes:
        buffers: Its flat buffers.
        mark: Behind its copies; None while the courier has it.
        parcel: With the courier; None if copied directly.
        users: Layers for which it is held.
        bound: Whether parameters point into the buffers.
    """

    buffers: Buffers
    mark: Any = None
    parcel: Parcel | None = None
    users: set[int] = field(default_factory=set)
    bound: bool = False


class LayerWindow:
    """Streams the layers of a stack through a device. From construction on its parameters are placeholders.

    All methods are called from the thread that computes.

    Args:
        name: Of the component, for metrics.
        stack: The layers and their units.
        stores: The host's copy of each unit, by index.
        streams: Of the device.
        streamed: Indices of the layers that stream; the others stay from `prepare` to `release`.
        prefetch: Layers on their way ahead of the one that runs.
        courier: Carries mapped units; None to copy them synchronously.
        observer: Told of copies, waits and fallbacks.
        warn: Called with a text at the first fallback.
    """

    def __init__(
        self,
        name: str,
        stack: LayerStack,
        stores: Sequence[Store],
        streams: Streams,
        *,
        streamed: Iterable[int],
        prefetch: int,
        courier: Courier | None = None,
        observer: Observer = silent,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.name = name
        self.stack = stack
        self.stores = tuple(stores)
        self.streamed = frozenset(streamed)
        self.prefetch = prefetch
        self.order = CallOrder.of(len(stack.layers))
        self._streams = streams
        self._courier = courier
        self._observer = observer
        self._warn = warn
        self._warned = False
        self._units_of = [stack.units_of(i) for i in range(len(stack.layers))]
        self._loaded: dict[int, _Loaded] = {}
        self._placeholders: dict[torch.dtype, torch.Tensor] = {}
        self._prefetching = True
        for unit in range(len(stack.units)):
            self._unbind(unit)

    # The life of a use

    def prepare(self) -> None:
        """A use begins: fetches what stays, then the head of the stream; waits for neither."""
        self._prefetching = True
        resident = [i for i in range(len(self.stack.layers)) if i not in self.streamed]
        self._fetch_ahead([*resident, *self.order.upcoming_head(self.prefetch, among=self.streamed)])

    def make_ready(self) -> None:
        """Brings everything in and points all parameters there, for modules whose layers are not called as such."""
        with torch.inference_mode(False), torch.no_grad():
            for layer in range(len(self.stack.layers)):
                self._fetch(layer)
            for unit in self._loaded:
                self._make_ready(unit)

    def release(self) -> None:
        """A use ends: everything leaves the device. The host's copies were never touched."""
        self._collect_all()
        self._streams.synchronize()
        for layer in self.held_layers():
            self._drop(layer)
        self.order = self.order.begun()

    def held_layers(self) -> tuple[int, ...]:
        """Layers with memory on the device, on their way included."""
        return tuple(sorted({layer for loaded in self._loaded.values() for layer in loaded.users}))

    def host_tensors(self) -> Iterator[torch.Tensor]:
        """What the host keeps of the layers."""
        for store in self.stores:
            yield from (run for _, _, run in store.runs)

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """The flat buffers on the device now."""
        for loaded in list(self._loaded.values()):
            yield from loaded.buffers.values()

    def device_bytes(self) -> int:
        """What the flat buffers on the device take."""
        return sum(buffer.numel() for loaded in self._loaded.values() for buffer in loaded.buffers.values())

    # The life of a pass

    def begin_pass(self) -> None:
        """The component's forward begins."""
        self.order = self.order.begun()

    def end_pass(self) -> None:
        """The component's forward has ended well: its calls are known now, and with them the head of the next pass."""
        self.order = self.order.ended()
        head = self.order.upcoming_head(self.prefetch, among=self.streamed)
        self._drop_all_but(set(head))
        self._fetch_ahead(head)

    def enter(self, layer: int) -> None:
        """A layer is about to compute: its weights are complete on the device when this returns to the stream."""
        began = time.perf_counter()
        self.order = self.order.called(layer)
        upcoming = self.order.upcoming(self.prefetch, among=self.streamed)
        self._drop_all_but({layer, *upcoming})
        self._fetch(layer)
        for unit in self._units_of[layer]:
            self._make_ready(unit)
        self._observer.waited(component=self.name, seconds=time.perf_counter() - began)
        self._fetch_ahead(upcoming)

    def leave(self, layer: int) -> None:
        """A layer has been issued: its weights may go unless they are wanted again at once."""
        if layer in self.streamed and layer not in self.order.upcoming(self.prefetch, among=self.streamed):
            self._drop(layer)

    # Units

    def _fetch_ahead(self, layers: Sequence[int]) -> None:
        """Starts copies that nobody waits for yet. A failure here must not fail what runs: it loads by itself later."""
        if not self._prefetching:
            return
        for layer in layers:
            try:
                self._fetch(layer)
            except Exception as error:
                self._prefetching = False
                self._drop(layer)
                self._fell_back(f"layer {layer} could not be fetched ahead: {error}")
                return

    def _fetch(self, layer: int) -> None:
        for unit in self._units_of[layer]:
            if unit not in self._loaded:
                self._loaded[unit] = self._copy(self.stores[unit])
            self._loaded[unit].users.add(layer)

    def _copy(self, store: Store) -> _Loaded:
        """Starts the copy of a unit into new buffers."""
        self._streams.copies_wait()
        buffers = {dtype: self._streams.allocate(size) for dtype, size in store.layout.buffer_bytes.items()}
        self._observer.copied(component=self.name, size_bytes=store.layout.total_bytes)
        if store.tier is HostTier.MAPPED and self._courier is not None and not self._courier.retired:
            return _Loaded(buffers=buffers, parcel=self._courier.submit(store, buffers))
        return _Loaded(buffers=buffers, mark=self._copy_directly(store, buffers))

    def _copy_directly(self, store: Store, buffers: Buffers) -> Any:
        store.copy_into(buffers, self._streams.copy)
        return self._streams.mark()

    def _make_ready(self, unit: int) -> None:
        """Orders the computation behind the unit's copies and points the parameters into its buffers."""
        loaded = self._loaded[unit]
        if loaded.parcel is not None:
            loaded.mark, loaded.parcel = self._collect(unit, loaded.parcel), None
        self._streams.compute_waits(loaded.mark)
        if not loaded.bound:
            self._bind(unit, self.stack.units[unit].layout.views(loaded.buffers))
            loaded.bound = True

    def _collect(self, unit: int, parcel: Parcel) -> Any:
        assert self._courier is not None
        try:
            return self._courier.collect(parcel)
        except CourierRetired as error:
            self._fell_back(str(error))
            self._streams.copies_wait()
            return self._copy_directly(self.stores[unit], parcel.buffers)

    def _collect_all(self) -> None:
        """Waits until the courier no longer writes to any buffer."""
        for loaded in self._loaded.values():
            if loaded.parcel is not None:
                loaded.parcel.ready.wait()

    def _drop_all_but(self, wanted: set[int]) -> None:
        for layer in self.held_layers():
            if layer in self.streamed and layer not in wanted:
                self._drop(layer)

    def _drop(self, layer: int) -> None:
        """Lets go of a layer's units; one that nobody holds any more leaves the device."""
        for unit in self._units_of[layer]:
            loaded = self._loaded.get(unit)
            if loaded is None:
                continue
            loaded.users.discard(layer)
            if not loaded.users:
                if loaded.parcel is not None:
                    loaded.parcel.ready.wait()
                self._unbind(unit)
                del self._loaded[unit]

    # Parameters

    def _bind(self, unit: int, views: Mapping[str, torch.Tensor]) -> None:
        for name, view in views.items():
            self.stack.parameters[name].data = view

    def _unbind(self, unit: int) -> None:
        for extent, _ in self.stack.units[unit].layout.extents:
            for weight in extent.weights:
                self.stack.parameters[weight.name].data = self._placeholder(weight.dtype)

    def _placeholder(self, dtype: torch.dtype) -> torch.Tensor:
        """One element, shared by all parameters of a dtype that are away."""
        if dtype not in self._placeholders:
            self._placeholders[dtype] = torch.zeros(1, dtype=dtype, device=self._streams.device)
        return self._placeholders[dtype]

    def _fell_back(self, why: str) -> None:
        self._observer.fell_back(reason=Fallback.PREFETCH)
        if not self._warned:
            self._warned = True
            self._warn(f"{self.name}: weights are copied synchronously and the computation waits for them: {why}")


def hook(window: LayerWindow) -> Callable[[], None]:
    """Makes calls of the layers drive the window; returns what undoes it.

    There is one set of weights on the device, so passes of several requests take turns.
    """
    turn = threading.RLock()

    def begin() -> None:
        turn.acquire()
        window.begin_pass()

    def end(well: bool) -> None:
        try:
            if well:
                _outside_inference_mode(window.end_pass)
        finally:
            turn.release()

    undo_passes = hook_passes(window.stack.component, window.stack.layers, begin=begin, end=end)
    handles = [handle for i, layer in enumerate(window.stack.layers) for handle in _hook_layer(layer, i, window)]

    def undo() -> None:
        undo_passes()
        while handles:
            handles.pop().remove()

    return undo


def _hook_layer(layer: nn.Module, index: int, window: LayerWindow) -> Iterator[RemovableHandle]:
    yield layer.register_forward_pre_hook(lambda *_: _outside_inference_mode(window.enter, index), prepend=True)
    # Also after an exception, or the layer would stay until the next pass.
    yield layer.register_forward_hook(lambda *_: _outside_inference_mode(window.leave, index), always_call=True)


def _outside_inference_mode(act: Callable[..., None], *arguments: int) -> None:
    """A tensor made in inference mode stays one, and parameters must not become such."""
    with torch.inference_mode(False), torch.no_grad():
        act(*arguments)
