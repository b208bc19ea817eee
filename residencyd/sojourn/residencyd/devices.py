"""Memory of accelerators, by NVML where the package nvidia-ml-py and a driver are there.

A figure that cannot be had is absent with a reason, never 0: NVML answers "Not Supported" on GB10, whose memory is
the host's, and per slice on MIG. On shared memory the driver's own "free" is MemFree, which counts the page cache as
used; what can really be had is MemAvailable, so that is what we say.
"""

import contextlib
import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sojourn.residencyd.claims import DeviceClaim
from sojourn.residencyd.kernel.meminfo import MemInfo

NOT_SUPPORTED, MIG, NO_DRIVER = "not_supported", "mig", "no_driver"

# Products whose GPU has no memory of its own.
_SHARED_MEMORY_NAMES = re.compile(r"\b(GB10|Orin|Thor|Xavier|Tegra)\b")


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one accelerator.

    Attributes:
        device: Its index, as text.
        absent_reason: Why there are no figures; empty if there are.
        used_bytes: Taken.
        free_bytes: To be had.
        shares_host_memory: Figures are the host's.
    """

    device: str
    absent_reason: str = ""
    used_bytes: int = 0
    free_bytes: int = 0
    shares_host_memory: bool = False


def load_nvml() -> Any | None:
    """The module `pynvml`, initialised; None where it or the driver is missing."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # the package raises its own kinds for each way in which a driver can be missing
        return None
    return nvml


def read_devices(nvml: Any | None, claimed: Sequence[DeviceClaim], memory: MemInfo | None) -> tuple[DeviceMemory, ...]:
    """Memory of every accelerator that the driver or the process knows of.

    Args:
        nvml: See `load_nvml`.
        claimed: What the process says it uses; the only word where there is no NVML.
        memory: The host's, for devices that share it.
    """
    shared = {device.index for device in claimed if device.shares_host_memory}
    if nvml is None:
        return tuple(_unknown(device.index, NO_DRIVER, device.index in shared, memory) for device in claimed)
    return tuple(_read(nvml, index, index in shared, memory) for index in _indices(nvml))


def _indices(nvml: Any) -> Iterator[int]:
    with contextlib.suppress(nvml.NVMLError):
        yield from range(nvml.nvmlDeviceGetCount())


def _read(nvml: Any, index: int, shared: bool, memory: MemInfo | None) -> DeviceMemory:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        shared = shared or bool(_SHARED_MEMORY_NAMES.search(_text(nvml.nvmlDeviceGetName(handle))))
        if shared:
            return _unknown(index, NOT_SUPPORTED, shared, memory)
        if _is_mig(nvml, handle):
            return DeviceMemory(str(index), absent_reason=MIG)
        found = nvml.nvmlDeviceGetMemoryInfo(handle)
        return DeviceMemory(str(index), used_bytes=int(found.used), free_bytes=int(found.free))
    except (nvml.NVMLError, TypeError, ValueError):
        return _unknown(index, NOT_SUPPORTED, shared, memory)


def _is_mig(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:  # the device does not know the word
        return False


def _unknown(index: int, reason: str, shared: bool, memory: MemInfo | None) -> DeviceMemory:
    """The host's figures for a device that shares its memory; a reason for any other."""
    if not shared or memory is None:
        return DeviceMemory(str(index), absent_reason=reason, shares_host_memory=shared)
    return DeviceMemory(
        str(index),
        used_bytes=memory.total_bytes - memory.available_bytes,
        free_bytes=memory.available_bytes,
        shares_host_memory=True,
    )


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name
