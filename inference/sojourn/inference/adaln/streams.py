"""Order between the compute stream, the copy stream and the host.

The rules, each of which a test drops in turn to see the race that it prevents:
    begin            copies wait for compute (a forward may still read the slots that a swap-in overwrites) and compute
                     waits for copies (a failed earlier request may have left some)
    compute_waits    before anything computes with rows that the copy stream brought in
    copies_wait      before the copy stream reads rows that compute has projected
    synchronize      before the host believes that pages hold what was copied into them
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Streams(Protocol):
    """The copy stream of a cache beside its compute stream."""

    def begin(self) -> None:
        """Fences both ways, once at the start of a transaction."""

    def compute_waits(self) -> None:
        """Compute issued from now on runs after all copies issued so far."""

    def copies_wait(self) -> None:
        """Copies issued from now on run after all compute issued so far."""

    def synchronize(self) -> None:
        """The host waits until all copies issued so far have ended; their errors surface here."""

    def copying(self) -> AbstractContextManager[None]:
        """What is issued within goes to the copy stream."""


class OneStream:
    """Everything runs in the order in which it is issued: the CPU, or copies that are synchronous anyway."""

    def begin(self) -> None:
        """Nothing runs elsewhere."""

    def compute_waits(self) -> None:
        """Nothing runs elsewhere."""

    def copies_wait(self) -> None:
        """Nothing runs elsewhere."""

    def synchronize(self) -> None:
        """Nothing runs elsewhere."""

    @contextmanager
    def copying(self) -> Iterator[None]:
        """The one stream."""
        yield


class CudaStreams:
    """A CUDA copy stream beside the current stream of the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy = torch.cuda.Stream(device)

    def begin(self) -> None:
        """Fences both ways."""
        self.copies_wait()
        self.compute_waits()

    def compute_waits(self) -> None:
        """The current stream waits for the copy stream."""
        torch.cuda.current_stream(self._device).wait_stream(self._copy)

    def copies_wait(self) -> None:
        """The copy stream waits for the current stream."""
        self._copy.wait_stream(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """The host waits for the copy stream."""
        self._copy.synchronize()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Work goes to the copy stream."""
        with torch.cuda.stream(self._copy):
            yield


def streams_for(device: torch.device, *, pinned: bool) -> Streams:
    """The streams of a device; one alone where copies cannot overlap."""
    return CudaStreams(device) if device.type == "cuda" and pinned else OneStream()
