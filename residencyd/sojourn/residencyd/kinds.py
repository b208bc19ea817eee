"""What a mapping is, by the kernel's word alone.

| kind | how it is known | the kernel can |
|---|---|---|
| driver | a device node (`/dev/nvidia*`, ...) | nothing |
| store | a memfd of our agreed name: memory that a pinned store has locked | nothing |
| shared | shared anonymous memory, memfd, System V, any file of tmpfs or hugetlbfs | swap |
| file | a regular file of any other file system | drop |
| anonymous | no file | swap |

Names decide only what has no file system of its own: the kernel's internal mount of shared memory is in no list of
mounts. Everything that has one goes by its type.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum

from sojourn.residencyd.claims import Tier
from sojourn.residencyd.kernel import maps
from sojourn.residencyd.kernel.maps import PINNED_STORE_NAME
from sojourn.residencyd.kernel.pages import Content


class Kind(StrEnum):
    """What a mapping is."""

    DRIVER = "driver"
    STORE = "store"
    SHARED = "shared"
    FILE = "file"
    ANONYMOUS = "anonymous"


# File systems whose pages are memory itself.
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})

_STORE_PREFIX = f"/memfd:{PINNED_STORE_NAME}"
_SHARED_PREFIXES = ("/memfd:", "/SYSV", "/dev/zero", "/dev/shm/", "/anon_hugepage", "[anon_shmem:")
_DRIVER_PREFIXES = ("/dev/nvidia", "/dev/dri/", "/dev/kfd", "/dev/infiniband/", "/dev/gdrdrv")
# What CUDA allocates by cudaHostAlloc on kernels that name anonymous memory.
_CUDA_ANONYMOUS_PREFIX = "[anon:cuda"

# All memory of a sandboxed process is this one file, so every page looks shared.
SANDBOX_NAMES = ("/memfd:runsc-memory",)


def kind_of(mapping: maps.Mapping, file_systems: Mapping[tuple[int, int], str]) -> Kind:
    """What a mapping is.

    Args:
        mapping: One line of maps.
        file_systems: Types by device number, see `kernel.mounts`.
    """
    name = mapping.name
    if name.startswith(_DRIVER_PREFIXES):
        return Kind.DRIVER
    if not mapping.inode:
        return Kind.SHARED if name.startswith(_SHARED_PREFIXES) else Kind.ANONYMOUS
    if name.startswith(_STORE_PREFIX):
        return Kind.STORE
    if name.startswith(_SHARED_PREFIXES) or file_systems.get(mapping.device) in _MEMORY_FILE_SYSTEMS:
        return Kind.SHARED
    return Kind.FILE


def tier_of(kind: Kind, mapping: maps.Mapping, claimed: Tier | None) -> Tier:
    """The tier that the kernel's word leaves for a mapping.

    Pinned is tested before file-backed: pinned memory sits behind named mappings. Shared anonymous memory is pinned
    if the process says so, for that is how CUDA's own host allocator shows; no word of the kernel contradicts it.
    """
    if kind in (Kind.DRIVER, Kind.STORE):
        return Tier.HOST_PINNED
    may_be_pinned = kind is Kind.SHARED or mapping.name.startswith(_CUDA_ANONYMOUS_PREFIX)
    if claimed is Tier.HOST_PINNED and may_be_pinned:
        return Tier.HOST_PINNED
    return Tier.HOST_MAPPED if kind is Kind.FILE else Tier.HOST_PAGEABLE


def content_of(kind: Kind, mapping: maps.Mapping) -> Content:
    """What pages of a mapping can be. Only in a private mapping with a file behind it they can be two things."""
    if kind is Kind.ANONYMOUS:
        return Content.ANONYMOUS
    return Content.EITHER if mapping.private else Content.FILE


def is_sandbox(names: Iterable[str]) -> bool:
    """Whether the name of a mapping gives away that the process is a sandbox."""
    return any(name.startswith(SANDBOX_NAMES) for name in names)


def uses_driver(names: Iterable[str]) -> bool:
    """Whether the name of a mapping gives away that the process drives an accelerator.

    Its shared anonymous memory is pinned then.
    """
    return any(name.startswith(_DRIVER_PREFIXES) for name in names)
