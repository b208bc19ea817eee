"""Cold-page headroom: how much the next stage may have without hurting it or the running one. Pure.

room + cold is to be held against need. The parts do not overlap: the control groups and MemAvailable count every
clean file page as available, the components' own mapped pages too, hot ones included. So what is resident of the
components' mappings is taken off the room, and of that only what is cold and would really go is added back as cold.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sojourn.residencyd.attribution import Piece
from sojourn.residencyd.claims import ComponentClaim, Tier
from sojourn.residencyd.kernel.cgroups import Group
from sojourn.residencyd.kernel.pages import PageCounts

NOT_OWNER, SHARED, LOCKED, OTHER = "not_owner", "shared", "locked", "other"
STUCK_REASONS = (NOT_OWNER, SHARED, LOCKED, OTHER)


@dataclass(frozen=True)
class ColdPiece:
    """What became of a mapped piece of a cold component.

    Attributes:
        component: Its name.
        resident_bytes: Of the file, in memory.
        exclusive_bytes: Of these, in no other mapping.
        owned: The process owns the file or may write it; None where the file cannot be looked at.
    """

    component: str
    resident_bytes: int
    exclusive_bytes: int
    owned: bool | None


@dataclass(frozen=True)
class Cold:
    """Of one component.

    Attributes:
        cold_bytes: The kernel would drop these on the process's advice.
        stuck_bytes: As cold, but they would stay; by reason, all reasons.
    """

    cold_bytes: int
    stuck_bytes: Mapping[str, int]


@dataclass(frozen=True)
class Headroom:
    """Over all processes.

    Attributes:
        room_bytes: To be had without touching any component.
        cold_bytes: To be had from them.
        stuck_bytes: As cold, and not to be had.
        need_bytes: What the next stage will take.
    """

    room_bytes: int
    cold_bytes: int
    stuck_bytes: int
    need_bytes: int


def mapped_resident_bytes(counted: Iterable[tuple[Piece, PageCounts]]) -> int:
    """File pages of the components' mappings that are in memory."""
    return sum(counts.file_bytes for piece, counts in counted if piece.lot.tier is Tier.HOST_MAPPED)


def room_bytes(machine_bytes: int, groups: tuple[Group, ...], mapped_bytes: int) -> int:
    """What can be had without touching any component.

    Args:
        machine_bytes: MemAvailable.
        groups: The control groups that bind the process.
        mapped_bytes: Resident bytes of the components' mappings. A group may not be charged for them (whoever read
            a file first is), so no more is taken off its room than it counts as reclaimable.
    """
    rooms = [
        group.room_bytes - min(mapped_bytes, group.reclaimable_bytes)
        for group in groups
        if group.room_bytes is not None
    ]
    return max(0, min([machine_bytes - mapped_bytes, *rooms]))


def cold_of(component: ComponentClaim, pieces: Iterable[ColdPiece], *, locked_bytes: int) -> Cold:
    """What a component could give back, and what would stay of it.

    Args:
        component: Its claim; nothing of it is cold while it is used, or will be by the next stage.
        pieces: Its mapped pieces.
        locked_bytes: mlock'ed bytes of the process. The kernel does not say which, short of smaps, so all of them
            are taken to be among these: headroom is rather understated.
    """
    stuck = dict.fromkeys(STUCK_REASONS, 0)
    cold = 0
    for piece in pieces if component.is_cold else ():
        if not piece.owned:
            stuck[OTHER if piece.owned is None else NOT_OWNER] += piece.resident_bytes
            continue
        exclusive = min(piece.exclusive_bytes, piece.resident_bytes)
        stuck[SHARED] += piece.resident_bytes - exclusive
        cold += exclusive
    stuck[LOCKED] = min(cold, locked_bytes)
    return Cold(cold - stuck[LOCKED], stuck)
