from types import SimpleNamespace
from typing import Any

import pytest
from sojourn.residencyd.claims import DeviceClaim
from sojourn.residencyd.devices import DeviceMemory, read_devices
from sojourn.residencyd.kernel.meminfo import MemInfo

from tests.residencyd.children import GIB

HOST = MemInfo(total_bytes=120 * GIB, free_bytes=3 * GIB, available_bytes=115 * GIB, swap_free_bytes=0)


class NotSupported(Exception):
    pass


REFUSAL = NotSupported()


def nvml(*, name: Any = "H200", memory: Any = REFUSAL, mig: Any = REFUSAL, count: Any = 1) -> Any:
    """A driver that answers, or raises what it is given."""

    def answer(what: Any) -> Any:
        if isinstance(what, Exception):
            raise what
        return what

    return SimpleNamespace(
        NVMLError=NotSupported,
        nvmlDeviceGetCount=lambda: answer(count),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: answer(name),
        nvmlDeviceGetMigMode=lambda handle: answer(mig),
        nvmlDeviceGetMemoryInfo=lambda handle: answer(memory),
    )


def info(used: Any, free: Any) -> Any:
    return SimpleNamespace(used=used, free=free)


def test_figures_of_a_device_of_its_own_memory() -> None:
    assert read_devices(nvml(memory=info(5, 7)), (), HOST) == (DeviceMemory("0", used_bytes=5, free_bytes=7),)


@pytest.mark.parametrize("name", ["NVIDIA GB10", b"NVIDIA GB10", "Orin (nvgpu)", "NVIDIA Thor"])
def test_on_shared_memory_free_is_what_the_host_has_not_what_it_has_unused(name: Any) -> None:
    found = read_devices(nvml(name=name, memory=info(117 * GIB, 3 * GIB)), (), HOST)
    assert found == (DeviceMemory("0", "", 5 * GIB, 115 * GIB, shares_host_memory=True),)


def test_the_process_knows_that_memory_is_shared() -> None:
    claimed = (DeviceClaim(0, "new chip", shares_host_memory=True),)
    assert read_devices(nvml(name="new chip"), claimed, HOST)[0].free_bytes == 115 * GIB
    assert read_devices(None, claimed, HOST)[0].free_bytes == 115 * GIB


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (nvml(), "not_supported"),
        (nvml(memory=info("[N/A]", "[N/A]")), "not_supported"),
        (nvml(memory=info(None, None)), "not_supported"),
        (nvml(name=NotSupported(), memory=info(1, 1)), "not_supported"),
        (nvml(memory=info(0, 0), mig=(1, 1)), "mig"),
    ],
)
def test_what_cannot_be_had_is_absent_with_a_reason(driver: Any, reason: str) -> None:
    assert read_devices(driver, (), HOST) == (DeviceMemory("0", absent_reason=reason),)


def test_a_device_without_mig_is_no_mig() -> None:
    assert read_devices(nvml(memory=info(1, 2), mig=(0, 0)), (), HOST)[0].absent_reason == ""


def test_without_a_driver_only_the_process_knows_of_devices() -> None:
    assert read_devices(None, (), HOST) == ()
    claimed = (DeviceClaim(1, "H200", shares_host_memory=False),)
    assert read_devices(None, claimed, HOST) == (DeviceMemory("1", absent_reason="no_driver"),)


def test_shared_memory_of_an_unreadable_host_is_absent() -> None:
    assert read_devices(nvml(name="GB10"), (), None)[0].absent_reason == "not_supported"


def test_a_driver_that_counts_nothing_has_nothing() -> None:
    assert read_devices(nvml(count=NotSupported()), (), HOST) == ()
