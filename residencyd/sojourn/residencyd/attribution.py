"""Component map × mappings × page counts → bytes per component and tier, what is nobody's, and where the map lies.

Pure: what was read is passed in. It goes in two steps, for only the first knows which pages to count:
`pieces_of` cuts claimed ranges along the mappings they meet; `attribute` sums counted pieces up.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sojourn.residencyd.claims import ComponentClaim, File, Origin, Range, Tier
from sojourn.residencyd.kernel import maps
from sojourn.residencyd.kernel.maps import Lookup
from sojourn.residencyd.kernel.pages import Content, PageCounts
from sojourn.residencyd.kernel.process import Status
from sojourn.residencyd.kinds import Kind, content_of, kind_of, tier_of

NOT_MAPPED, OTHER_TIER, OTHER_FILE = "not_mapped", "other_tier", "other_file"
DISAGREEMENTS = (NOT_MAPPED, OTHER_TIER, OTHER_FILE)


# Compared by identity: there is one for all that is judged alike in a look.
@dataclass(frozen=True, eq=False)
class Lot:
    """What pieces that are judged alike have in common.

    Attributes:
        origin: Who claims them, and how.
        kind: What the mapping is.
        tier: What the kernel's word leaves of the claimed tier.
        content: What its pages can be.
        file: The mapped file; None where there is none.
    """

    origin: Origin
    kind: Kind
    tier: Tier
    content: Content
    file: File | None

    @property
    def component(self) -> str:
        """Name of the component."""
        return self.origin.component

    @property
    def is_other_file(self) -> bool:
        """Whether the process named another file than the one mapped here."""
        return self.origin.file is not None and self.origin.file != self.file


# A tuple, for hundreds are made per look: a frozen dataclass takes three times as long.
class Piece(NamedTuple):
    """Part of a claimed range that lies in one mapping.

    Attributes:
        lot: What it is.
        mapping: The mapping.
        start: First address of the part.
        end: Address after the last.
    """

    lot: Lot
    mapping: maps.Mapping
    start: int
    end: int


@dataclass(frozen=True)
class TierBytes:
    """Bytes of a component in one tier, as the kernel sees it.

    Attributes:
        mapped_bytes: Size of the ranges.
        resident_bytes: Of these, in memory.
        claimed_bytes: What the process claims to have there.
    """

    mapped_bytes: int = 0
    resident_bytes: int = 0
    claimed_bytes: int = 0


@dataclass(frozen=True)
class ComponentBytes:
    """The kernel's word on one component.

    Attributes:
        claim: What the process says.
        tiers: By tier; only those with bytes.
        swapped_bytes: In swap.
        disagreements: Bytes by kind of disagreement, all kinds.
    """

    claim: ComponentClaim
    tiers: Mapping[Tier, TierBytes]
    swapped_bytes: int
    disagreements: Mapping[str, int]

    @property
    def name(self) -> str:
        """Name in the pipeline."""
        return self.claim.name

    @property
    def resident_bytes(self) -> int:
        """In host memory, over all tiers there."""
        return sum(held.resident_bytes for tier, held in self.tiers.items() if tier is not Tier.VRAM)


@dataclass(frozen=True)
class Unattributed:
    """Resident bytes of nobody, by what they are."""

    file_bytes: int = 0
    anonymous_bytes: int = 0
    shared_bytes: int = 0


@dataclass
class _Sums:
    """What is summed up for one component; not shared."""

    mapped: dict[Tier, int] = field(default_factory=dict)
    resident: dict[Tier, int] = field(default_factory=dict)
    claimed: dict[Tier, int] = field(default_factory=dict)
    swapped: int = 0
    disagreements: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DISAGREEMENTS, 0))

    def add(self, tier: Tier, *, mapped: int = 0, resident: int = 0) -> None:
        self.mapped[tier] = self.mapped.get(tier, 0) + mapped
        self.resident[tier] = self.resident.get(tier, 0) + resident

    def tiers(self) -> dict[Tier, TierBytes]:
        return {
            tier: TierBytes(self.mapped.get(tier, 0), self.resident.get(tier, 0), self.claimed.get(tier, 0))
            for tier in Tier
            if self.mapped.get(tier) or self.resident.get(tier) or self.claimed.get(tier)
        }


def pieces_of(
    ranges: Sequence[Range], lookup: Lookup, file_systems: Mapping[tuple[int, int], str]
) -> tuple[Piece, ...]:
    """Cuts claimed ranges along the mappings that they meet, in order. Where nothing is mapped there is no piece."""
    lots: dict[tuple[object, ...], Lot] = {}
    pieces = []
    for origin, start, end in ranges:
        for mapping in lookup.overlapping(start, end):
            alike = (id(origin), mapping.name, mapping.inode, mapping.device, mapping.permissions)
            lot = lots.get(alike)
            if lot is None:
                lot = lots[alike] = lot_of(origin, mapping, file_systems)
            low, high = mapping.start, mapping.end
            pieces.append(Piece(lot, mapping, low if low > start else start, high if high < end else end))
    return tuple(pieces)


def lot_of(origin: Origin, mapping: maps.Mapping, file_systems: Mapping[tuple[int, int], str]) -> Lot:
    """Judges what is claimed by the mapping that it lies in."""
    kind = kind_of(mapping, file_systems)
    return Lot(
        origin=origin,
        kind=kind,
        tier=tier_of(kind, mapping, origin.tier),
        content=content_of(kind, mapping),
        file=File(mapping.device, mapping.inode) if mapping.inode else None,
    )


def _lots(counted: Iterable[tuple[Piece, PageCounts]]) -> dict[Lot, tuple[int, PageCounts]]:
    """Sizes and pages of each lot, summed up."""
    sums: dict[Lot, list[int]] = {}
    for (lot, _, start, end), (file, anonymous, swapped, huge) in counted:
        summed = sums.get(lot)
        if summed is None:
            summed = sums[lot] = [0, 0, 0, 0, 0]
        summed[0] += end - start
        summed[1] += file
        summed[2] += anonymous
        summed[3] += swapped
        summed[4] += huge
    return {lot: (size, PageCounts(*counts)) for lot, (size, *counts) in sums.items()}


def attribute(
    components: Iterable[ComponentClaim],
    claimed_bytes: Mapping[tuple[str, Tier], int],
    counted: Iterable[tuple[Piece, PageCounts]],
) -> tuple[ComponentBytes, ...]:
    """Bytes of each component, in order of name.

    Args:
        components: All that the map lists.
        claimed_bytes: Of host memory, by component and tier; see `claims.claimed_bytes`.
        counted: Every piece of that, and what its pages are.
    """
    components = sorted(components, key=lambda component: component.name)
    sums = {component.name: _Sums() for component in components}
    for (name, tier), size in claimed_bytes.items():
        sums[name].claimed[tier] = size
        sums[name].disagreements[NOT_MAPPED] += size  # each lot takes its part off again
    for lot, (size, counts) in _lots(counted).items():
        _add_lot(sums[lot.component], lot, size, counts)
    for component in components:
        _add_device_memory(sums[component.name], component)
    return tuple(
        ComponentBytes(
            claim=component,
            tiers=sums[component.name].tiers(),
            swapped_bytes=sums[component.name].swapped,
            disagreements=sums[component.name].disagreements,
        )
        for component in components
    )


def _add_lot(sums: _Sums, lot: Lot, size: int, counts: PageCounts) -> None:
    # A written page of a private file mapping has left the file: it is anonymous, and not to be dropped.
    written = counts.anonymous_bytes + counts.swapped_bytes if lot.tier is Tier.HOST_MAPPED else 0
    sums.add(lot.tier, mapped=size - written, resident=_resident(lot, size, counts))
    if written:
        sums.add(Tier.HOST_PAGEABLE, mapped=written, resident=counts.anonymous_bytes)
    sums.swapped += counts.swapped_bytes
    sums.disagreements[NOT_MAPPED] -= size
    sums.disagreements[OTHER_TIER] += size if lot.tier is not lot.origin.tier else written
    sums.disagreements[OTHER_FILE] += size if lot.is_other_file else 0


def _resident(lot: Lot, size: int, counts: PageCounts) -> int:
    """In memory and in the lot's own tier. A driver's mapping has no pages to count and is all there."""
    if lot.kind is Kind.DRIVER:
        return size
    return counts.file_bytes if lot.tier is Tier.HOST_MAPPED else counts.resident_bytes


def _add_device_memory(sums: _Sums, component: ComponentClaim) -> None:
    """Takes the process's word for device memory: there is no other."""
    held = sum(claim.size_bytes for claim in component.claims if claim.tier is Tier.VRAM)
    if held:
        sums.add(Tier.VRAM, mapped=held, resident=held)
        sums.claimed[Tier.VRAM] = held


def unattributed(status: Status, counted: Iterable[tuple[Piece, PageCounts]]) -> Unattributed:
    """What is resident by the kernel's totals and claimed by no component.

    The totals are read at another moment than the pages, so a difference below zero is none.
    """
    file = anonymous = shared = 0
    for lot, (_, counts) in _lots(counted).items():
        anonymous += counts.anonymous_bytes
        if lot.kind is Kind.FILE:
            file += counts.file_bytes
        else:
            shared += counts.file_bytes
    return Unattributed(
        file_bytes=max(0, status.rss_file_bytes - file),
        anonymous_bytes=max(0, status.rss_anonymous_bytes - anonymous),
        shared_bytes=max(0, status.rss_shared_bytes - shared),
    )
