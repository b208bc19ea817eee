"""Which weights lie in files: the only host memory that the kernel can drop and read again."""

from collections.abc import Sequence

import torch
from sojourn.inference.offload.spans import Span
from sojourn.residencyd.kernel.maps import Lookup, Mapping

# Memory with a name: memfds, shared memory, devices' memory, System V segments, heap and stacks.
_MEMORY_NAMES = ("/memfd:", "/dev/", "/SYSV", "[")


def is_file(mapping: Mapping) -> bool:
    """Whether a mapping is one of a regular file."""
    return mapping.inode != 0 and not mapping.name.startswith(_MEMORY_NAMES)


def is_file_backed(address: int, mappings: Lookup) -> bool:
    """Whether the byte at an address lies in a regular file.

    Args:
        address: Of this process.
        mappings: Of this process.
    """
    found = mappings.overlapping(address, address + 1)
    return bool(found) and is_file(found[0])


def mapped_spans(tensors: Sequence[torch.Tensor], mappings: Lookup) -> list[Span]:
    """Where tensors of the CPU lie, as far as that is in regular files."""
    return [
        Span(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
        for tensor in tensors
        if tensor.device.type == "cpu" and tensor.numel() and is_file_backed(tensor.data_ptr(), mappings)
    ]
