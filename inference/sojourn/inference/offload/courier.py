"""Carries mapped weights to the device without making the computation wait for the disk.

A copy from a file mapping is synchronous however it is asked for: the driver cannot read pageable memory by itself.
So a thread of its own copies from the mapping into one of two pinned slots, the size of the largest unit each, and
from there the device's copy engine takes over. The computation's thread hands units in and collects them; it alone
touches parameters. Whatever goes wrong retires the courier for good, and its user copies synchronously from then on.
"""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sojourn.inference.offload.stores import Buffers, Store
from sojourn.inference.offload.streams import Streams


class CourierRetired(Exception):
    """The courier has failed, now or before; copy without it."""


@dataclass(eq=False, kw_only=True)
class Parcel:
    """A unit on its way.

    Attributes:
        store: What to carry.
        buffers: Where to.
        mark: Behind its last copy, once `ready` is set; None if it failed.
    """

    store: Store
    buffers: Buffers
    mark: Any = None
    failed: BaseException | None = None
    ready: threading.Event = field(default_factory=threading.Event)


@dataclass(kw_only=True)
class _Slot:
    """Pinned memory and the mark behind the last copy out of it."""

    memory: torch.Tensor
    mark: Any = None


class Courier:
    """One thread and its slots. `close` ends it.

    Args:
        slots: uint8 host tensors, pinned where the device can make use of it, each at least as long as the largest
            unit's flat buffers together.
        streams: Where copies go.
        populate: Called with the runs of a unit before they are read, to have their pages read in large pieces.
    """

    def __init__(
        self,
        slots: Sequence[torch.Tensor],
        streams: Streams,
        *,
        populate: Callable[[torch.Tensor], None] = lambda run: None,
    ) -> None:
        self.retired = False
        self._streams = streams
        self._populate = populate
        self._parcels: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for memory in slots:
            self._free.put(_Slot(memory=memory))
        self._thread = threading.Thread(target=self._work, name="weight-courier", daemon=True)
        self._thread.start()

    def submit(self, store: Store, buffers: Buffers) -> Parcel:
        """Hands a unit in and returns at once.

        Raises:
            CourierRetired: It no longer works.
        """
        if self.retired:
            raise CourierRetired("the courier failed before")
        parcel = Parcel(store=store, buffers=buffers)
        self._parcels.put(parcel)
        return parcel

    def collect(self, parcel: Parcel) -> Any:
        """The mark behind the unit's copies; waits until they have all been issued.

        Raises:
            CourierRetired: It failed over this unit or an earlier one.
        """
        parcel.ready.wait()
        if parcel.failed is not None:
            raise CourierRetired(f"the courier failed: {parcel.failed}") from parcel.failed
        return parcel.mark

    def close(self) -> None:
        """Carries out what was handed in, then ends the thread. Further calls do nothing."""
        if self._thread.is_alive():
            self._parcels.put(None)
            self._thread.join()

    def _work(self) -> None:
        with torch.inference_mode(False):
            while (parcel := self._parcels.get()) is not None:
                try:
                    if self.retired:
                        raise CourierRetired("the courier failed before")
                    self._carry(parcel)
                except BaseException as error:
                    self.retired = True
                    parcel.failed = error
                finally:
                    parcel.ready.set()

    def _carry(self, parcel: Parcel) -> None:
        slot = self._free.get()
        try:
            if slot.mark is not None:
                self._streams.host_waits_for(slot.mark)  # the last unit may still be leaving this slot
            _each_run(parcel, slot.memory, self._load)
            _each_run(parcel, slot.memory, self._streams_copy)
            slot.mark = parcel.mark = self._streams.mark()
        finally:
            self._free.put(slot)

    def _load(self, destination: torch.Tensor, staged: torch.Tensor, run: torch.Tensor) -> None:
        self._populate(run)
        staged.copy_(run)

    def _streams_copy(self, destination: torch.Tensor, staged: torch.Tensor, run: torch.Tensor) -> None:
        self._streams.copy(destination, staged)


def _each_run(
    parcel: Parcel, slot: torch.Tensor, act: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
) -> None:
    """Calls `act(place on the device, place in the slot, bytes of the mapping)` for every run of the unit."""
    begin = _slot_offsets(parcel.store.layout.buffer_bytes)
    for dtype, offset, run in parcel.store.runs:
        size = run.numel()
        place = begin[dtype] + offset
        act(parcel.buffers[dtype][offset : offset + size], slot[place : place + size], run)


def _slot_offsets(buffer_bytes: Mapping[torch.dtype, int]) -> Mapping[torch.dtype, int]:
    """Where in a slot each dtype's flat buffer begins."""
    offsets, end = {}, 0
    for dtype, size in buffer_bytes.items():
        offsets[dtype] = end
        end += size
    return offsets
