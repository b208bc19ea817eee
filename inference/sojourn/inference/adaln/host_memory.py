"""How much memory the host has to give, and pages of it that the device can copy from directly."""

import weakref

import torch
from sojourn.residencyd.kernel import cgroups
from sojourn.residencyd.kernel.errors import KernelError
from sojourn.residencyd.kernel.meminfo import read_meminfo


def available_bytes() -> int:
    """What this process may still take: of the machine, and of every control group above it; 0 where nobody says."""
    try:
        return cgroups.available_bytes(read_meminfo().available_bytes, cgroups.read_groups())
    except KernelError:
        return 0


def allocate_pages(pages: int, elements: int, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
    """[pages, elements] in host memory, page-locked where asked for.

    Locked memory is registered in place, at its exact size: the allocator of torch rounds up to powers of two.

    Raises:
        RuntimeError: The memory cannot be locked.
    """
    tensor = torch.empty(pages, elements, dtype=dtype)
    if pinned:
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)))
        weakref.finalize(tensor, runtime.cudaHostUnregister, tensor.data_ptr())
    return tensor
