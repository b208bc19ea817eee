"""Component map × mappings × page counts → bytes per component and tier, what is nobody's, and where the map lies.

Pure: what was read is passed in. It goes in two steps, for only the first knows which pages to count:
`pieces_of` cuts claimed ranges along the mappings they meet; `attribute` sums counted pieces up.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sojourn.residencyd.claims import ComponentClaim, Range, Tier
from sojourn.residencyd.kernel import maps
from sojourn.residencyd.kernel.maps import Lookup
from sojourn.residencyd.kernel.pages import PageCounts
from sojourn.residencyd.kernel.process import Status
from sojourn.residencyd.kinds import Kind, kind_of, tier_of

NOT_MAPPED, OTHER_TIER, OTHER_FILE = "not_mapped", "other_tier", "other_file"
DISAGREEMENTS = (NOT_MAPPED, OTHER_TIER, OTHER_FILE)


@dataclass(frozen=True)
class Piece:
    """Part of a claimed range that lies in one mapping.

    Attributes:
        claimed: The range.
        mapping: The mapping.
        kind: What that is.
        tier: What the kernel's word leaves of the claimed tier.
        start: First address of the part.
        end: Address after the last.
    """

    claimed: Range
    mapping: maps.Mapping
    kind: Kind
    tier: Tier
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Length of the part."""
        return self.end - self.start

    @property
    def file_offset(self) -> int:
        """Where in the mapped file it begins."""
        return self.mapping.offset + self.start - self.mapping.start

    @property
    def is_other_file(self) -> bool:
        """Whether the process named another file than the one mapped here."""
        file = self.claimed.file
        return file is not None and (file.device, file.inode) != (self.mapping.device, self.mapping.inode)


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
    return tuple(
        _piece(claimed, mapping, kind_of(mapping, file_systems))
        for claimed in ranges
        for mapping in lookup.overlapping(claimed.start, claimed.end)
    )


def _piece(claimed: Range, mapping: maps.Mapping, kind: Kind) -> Piece:
    return Piece(
        claimed=claimed,
        mapping=mapping,
        kind=kind,
        tier=tier_of(kind, mapping, claimed.tier),
        start=max(claimed.start, mapping.start),
        end=min(claimed.end, mapping.end),
    )


def attribute(
    components: Iterable[ComponentClaim],
    ranges: Sequence[Range],
    counted: Iterable[tuple[Piece, PageCounts]],
) -> tuple[ComponentBytes, ...]:
    """Bytes of each component, in order of name.

    Args:
        components: All that the map lists.
        ranges: Its claims on host memory, see `claims.host_ranges`.
        counted: Every piece of them, and what its pages are.
    """
    components = sorted(components, key=lambda component: component.name)
    sums = {component.name: _Sums() for component in components}
    for claimed in ranges:
        _add_claimed(sums[claimed.component], claimed)
    for piece, counts in counted:
        _add_piece(sums[piece.claimed.component], piece, counts)
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


def _add_claimed(sums: _Sums, claimed: Range) -> None:
    sums.claimed[claimed.tier] = sums.claimed.get(claimed.tier, 0) + claimed.size_bytes
    sums.disagreements[NOT_MAPPED] += claimed.size_bytes  # each piece takes its part off again


def _add_piece(sums: _Sums, piece: Piece, counts: PageCounts) -> None:
    # A written page of a private file mapping has left the file: it is anonymous, and not to be dropped.
    written = counts.anonymous_bytes + counts.swapped_bytes if piece.tier.is_droppable else 0
    sums.add(piece.tier, mapped=piece.size_bytes - written, resident=_resident(piece, counts))
    if written:
        sums.add(Tier.HOST_PAGEABLE, mapped=written, resident=counts.anonymous_bytes)
    sums.swapped += counts.swapped_bytes
    sums.disagreements[NOT_MAPPED] -= piece.size_bytes
    sums.disagreements[OTHER_TIER] += piece.size_bytes if piece.tier is not piece.claimed.tier else written
    sums.disagreements[OTHER_FILE] += piece.size_bytes if piece.is_other_file else 0


def _resident(piece: Piece, counts: PageCounts) -> int:
    """In memory and in the piece's own tier. A driver's mapping has no pages to count and is all there."""
    if piece.kind is Kind.DRIVER:
        return piece.size_bytes
    return counts.file_bytes if piece.tier.is_droppable else counts.resident_bytes


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
    for piece, counts in counted:
        anonymous += counts.anonymous_bytes
        if piece.kind is Kind.FILE:
            file += counts.file_bytes
        else:
            shared += counts.file_bytes
    return Unattributed(
        file_bytes=max(0, status.rss_file_bytes - file),
        anonymous_bytes=max(0, status.rss_anonymous_bytes - anonymous),
        shared_bytes=max(0, status.rss_shared_bytes - shared),
    )
