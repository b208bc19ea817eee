"""Threads beside the caller's, on which a build computes several pieces of the weights at a time.

Reading a layer keeps one core busy, and so does a product of few rows, whatever threads it is given. Lanes therefore
divide the pieces between them: each reads its own into its own buffer and multiplies it at once, with one thread of
torch, while the processor's cache still holds it.
"""

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from sojourn.inference.adaln.layers import PIECE_BYTES
from threadpoolctl import ThreadpoolController

Value = TypeVar("Value")
# Each holds a piece in memory, and a processor's memory feeds a few readers at most. Measured with two only.
_MOST = 8


class Lanes:
    """Runs work in threads of one torch thread each, or in the caller's.

    Args:
        count: Threads; 0 for the caller's alone, which computes with as many torch threads as ever.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = _pool(count) if count else None

    @classmethod
    def among(cls, nbytes: int, device: torch.device) -> "Lanes":
        """As many as the process computes with, each with a piece at least; none where a device computes."""
        count = min(torch.get_num_threads(), nbytes // PIECE_BYTES, _MOST)
        return cls(count if count > 1 and device.type == "cpu" else 0)

    def run(self, work: Callable[[], Value]) -> Value:
        """Runs `work` once, where the pieces are computed too."""
        if self._pool is None:
            return work()
        return self._submit(work).result()

    def run_on_all(self, work: Callable[[], None]) -> None:
        """Runs `work` on every lane at once and waits for all of them; raises the first error."""
        if self._pool is None:
            work()
            return
        running = [self._submit(work) for _ in range(self.count)]
        wait(running)
        for lane in running:
            lane.result()

    def _submit(self, work: Callable[[], Value]) -> "Future[Value]":
        assert self._pool is not None
        return self._pool.submit(_in_mode, torch.is_inference_mode_enabled(), work)


def _in_mode(inference: bool, work: Callable[[], Value]) -> Value:
    """Torch keeps its modes by thread."""
    with torch.inference_mode(inference), torch.no_grad():
        return work()


def _limit_threads() -> None:
    """For this thread alone; torch.set_num_threads would also bind threads that begin later."""
    torch.get_num_threads()  # torch sets a new thread's count at its first look, and never again
    _openmp().limit(limits=1)


@functools.cache
def _pool(count: int) -> ThreadPoolExecutor:
    """Kept from build to build: a new thread waits up to 5 ms for the interpreter while the first lane is at work."""
    return ThreadPoolExecutor(count, "adaln-lane", _limit_threads)


@functools.cache
def _openmp() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="openmp")
