from pathlib import Path

import pytest
from sojourn.residencyd.claims import Tier
from sojourn.residencyd.kernel.maps import Mapping, read_maps
from sojourn.residencyd.kernel.mounts import read_mounts
from sojourn.residencyd.kinds import Kind, is_sandbox, kind_of, tier_of, uses_driver

FILE_SYSTEMS = {(254, 0): "ext4", (0, 40): "tmpfs", (0, 41): "hugetlbfs", (0, 42): "overlay"}


def mapping(name: str, *, inode: int = 7, device: tuple[int, int] = (0, 1)) -> Mapping:
    return Mapping(0, 4096, "r--p", 0, device, inode, name)


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (mapping("/models/dit.safetensors", device=(254, 0)), Kind.FILE),
        (mapping("/models/gone.safetensors (deleted)", device=(254, 0)), Kind.FILE),
        (mapping("/models/dit.safetensors", device=(0, 42)), Kind.FILE),
        (mapping("/models/dit.safetensors", device=(9, 9)), Kind.FILE),
        (mapping("/cache/dit.safetensors", device=(0, 40)), Kind.SHARED),
        (mapping("/huge/dit.safetensors", device=(0, 41)), Kind.SHARED),
        (mapping("/dev/shm/x"), Kind.SHARED),
        (mapping("/SYSV00000000 (deleted)"), Kind.SHARED),
        (mapping("/dev/zero (deleted)"), Kind.SHARED),
        (mapping("/memfd:other (deleted)"), Kind.SHARED),
        (mapping("/anon_hugepage (deleted)"), Kind.SHARED),
        (mapping("[anon_shmem:x]"), Kind.SHARED),
        (mapping("/memfd:sojourn-pinned (deleted)"), Kind.STORE),
        (mapping("/memfd:sojourn-pinned-3 (deleted)"), Kind.STORE),
        (mapping("/dev/nvidia-uvm", device=(0, 6)), Kind.DRIVER),
        (mapping("/dev/nvidiactl", device=(0, 6)), Kind.DRIVER),
        (mapping("", inode=0), Kind.ANONYMOUS),
        (mapping("[heap]", inode=0), Kind.ANONYMOUS),
        (mapping("[anon:cuda]", inode=0), Kind.ANONYMOUS),
    ],
)
def test_what_a_mapping_is(found: Mapping, kind: Kind) -> None:
    assert kind_of(found, FILE_SYSTEMS) is kind


@pytest.mark.parametrize(
    ("name", "claimed", "tier"),
    [
        ("/dev/zero (deleted)", Tier.HOST_PINNED, Tier.HOST_PINNED),
        ("/dev/zero (deleted)", Tier.HOST_PAGEABLE, Tier.HOST_PAGEABLE),
        ("/dev/zero (deleted)", None, Tier.HOST_PAGEABLE),
        ("/dev/nvidia-uvm", Tier.HOST_MAPPED, Tier.HOST_PINNED),
        ("/dev/nvidiactl", None, Tier.HOST_PINNED),
        ("/memfd:sojourn-pinned (deleted)", Tier.HOST_PAGEABLE, Tier.HOST_PINNED),
        ("/memfd:other (deleted)", Tier.HOST_MAPPED, Tier.HOST_PAGEABLE),
        ("/dev/shm/x", Tier.HOST_MAPPED, Tier.HOST_PAGEABLE),
        ("/dev/shm/x", Tier.HOST_PINNED, Tier.HOST_PINNED),
        ("/models/dit", Tier.HOST_PINNED, Tier.HOST_MAPPED),
        ("/models/dit", Tier.HOST_PAGEABLE, Tier.HOST_MAPPED),
    ],
)
def test_the_tier_that_the_kernels_word_leaves(name: str, claimed: Tier | None, tier: Tier) -> None:
    found = mapping(name)
    assert tier_of(kind_of(found, FILE_SYSTEMS), found, claimed) is tier


def test_a_pinned_claim_on_anonymous_memory_is_believed_only_of_cudas_own() -> None:
    plain, cuda = mapping("", inode=0), mapping("[anon:cuda]", inode=0)
    assert tier_of(Kind.ANONYMOUS, plain, Tier.HOST_PINNED) is Tier.HOST_PAGEABLE
    assert tier_of(Kind.ANONYMOUS, cuda, Tier.HOST_PINNED) is Tier.HOST_PINNED


def test_captures(captures: Path) -> None:
    proc = captures / "proc"
    kinds = {m.name: kind_of(m, read_mounts(4711, proc=proc)) for m in read_maps(4711, proc=proc)}
    assert kinds["/models/my models/dit 01.safetensors"] is Kind.FILE
    assert kinds["/models/gone.safetensors (deleted)"] is Kind.FILE
    assert kinds["/dev/shm/weights"] is kinds["/SYSV00000000 (deleted)"] is Kind.SHARED
    names = {pid: [m.name for m in read_maps(pid, proc=proc)] for pid in (4711, 4712, 4713)}
    assert [is_sandbox(found) for found in names.values()] == [False, False, True]
    assert [uses_driver(found) for found in names.values()] == [False, True, False]
