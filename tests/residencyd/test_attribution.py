from sojourn.residencyd.attribution import TierBytes, attribute, pieces_of, unattributed
from sojourn.residencyd.claims import Claim, ComponentClaim, File, Tier, claimed_bytes, host_ranges
from sojourn.residencyd.files import Extent, extents_of
from sojourn.residencyd.kernel.maps import Mapping, MapsTable
from sojourn.residencyd.kernel.pages import PageCounts
from sojourn.residencyd.kernel.process import parse_status
from sojourn.residencyd.kinds import Kind

PAGE = 4096
DISK = (254, 0)
FILE_SYSTEMS = {DISK: "ext4"}

WEIGHTS = Mapping(0x10000, 0x20000, "r--p", 0x3000, DISK, 7, "/models/dit")
HEAP = Mapping(0x20000, 0x30000, "rw-p", 0, (0, 0), 0, "")
PINNED = Mapping(0x40000, 0x50000, "rw-s", 0, (0, 1), 9, "/memfd:sojourn-pinned (deleted)")
DEVICE = Mapping(0x60000, 0x70000, "rw-s", 0, (0, 6), 3, "/dev/nvidia0")
TABLE = MapsTable((WEIGHTS, HEAP, PINNED, DEVICE))


def claim(mapping: Mapping, tier: Tier, file: File | None = None) -> Claim:
    return Claim(mapping.start, mapping.end, tier, file)


def reckon(components, counts=None):
    """Attributes with the pages of each piece given by the mapping it lies in."""
    ranges = host_ranges(components)
    pieces = pieces_of(ranges, TABLE, FILE_SYSTEMS)
    counts = counts or {}
    counted = [(piece, counts.get(piece.mapping, PageCounts())) for piece in pieces]
    return {part.name: part for part in attribute(components, claimed_bytes(ranges), counted)}, counted


def test_each_tier_by_the_kernels_word() -> None:
    dit = ComponentClaim(
        "dit",
        claims=(
            claim(WEIGHTS, Tier.HOST_MAPPED, File(DISK, 7)),
            claim(HEAP, Tier.HOST_PAGEABLE),
            claim(PINNED, Tier.HOST_PINNED),
            Claim(0x7000, 0x7100, Tier.VRAM),
        ),
    )
    counts = {
        WEIGHTS: PageCounts(file_bytes=3 * PAGE),
        HEAP: PageCounts(anonymous_bytes=5 * PAGE, swapped_bytes=PAGE),
        PINNED: PageCounts(file_bytes=16 * PAGE),
    }
    parts, _ = reckon([dit], counts)
    assert parts["dit"].tiers == {
        Tier.VRAM: TierBytes(0x100, 0x100, 0x100),
        Tier.HOST_PINNED: TierBytes(0x10000, 16 * PAGE, 0x10000),
        Tier.HOST_MAPPED: TierBytes(0x10000, 3 * PAGE, 0x10000),
        Tier.HOST_PAGEABLE: TierBytes(0x10000, 5 * PAGE, 0x10000),
    }
    assert parts["dit"].swapped_bytes == PAGE
    assert parts["dit"].resident_bytes == 24 * PAGE
    assert set(parts["dit"].disagreements.values()) == {0}


def test_written_pages_of_a_file_mapping_are_pageable_and_contradict_the_map() -> None:
    dit = ComponentClaim("dit", claims=(claim(WEIGHTS, Tier.HOST_MAPPED),))
    parts, _ = reckon([dit], {WEIGHTS: PageCounts(file_bytes=2 * PAGE, anonymous_bytes=PAGE, swapped_bytes=PAGE)})
    assert parts["dit"].tiers == {
        Tier.HOST_MAPPED: TierBytes(0x10000 - 2 * PAGE, 2 * PAGE, 0x10000),
        Tier.HOST_PAGEABLE: TierBytes(2 * PAGE, PAGE, 0),
    }
    assert parts["dit"].disagreements == {"not_mapped": 0, "other_tier": 2 * PAGE, "other_file": 0}


def test_a_lying_map_is_found_out_in_bytes() -> None:
    liar = ComponentClaim(
        "liar",
        claims=(
            Claim(0x80000, 0x82000, Tier.HOST_PAGEABLE),
            Claim(0x2F000, 0x31000, Tier.HOST_PAGEABLE),
            claim(WEIGHTS, Tier.HOST_MAPPED, File(DISK, 8)),
            claim(PINNED, Tier.HOST_PAGEABLE),
        ),
    )
    parts, _ = reckon([liar])
    assert parts["liar"].disagreements == {"not_mapped": 0x2000 + 0x1000, "other_tier": 0x10000, "other_file": 0x10000}


def test_a_pinned_claim_that_nothing_bears_out_is_a_disagreement() -> None:
    parts, _ = reckon([ComponentClaim("dit", claims=(claim(HEAP, Tier.HOST_PINNED),))])
    assert list(parts["dit"].tiers) == [Tier.HOST_PINNED, Tier.HOST_PAGEABLE]
    assert parts["dit"].tiers[Tier.HOST_PINNED] == TierBytes(0, 0, 0x10000)
    assert parts["dit"].disagreements["other_tier"] == 0x10000


def test_a_drivers_mapping_is_all_there_though_it_has_no_pages() -> None:
    parts, counted = reckon([ComponentClaim("dit", claims=(claim(DEVICE, Tier.HOST_PINNED),))])
    assert parts["dit"].tiers == {Tier.HOST_PINNED: TierBytes(0x10000, 0x10000, 0x10000)}
    assert counted[0][0].lot.kind is Kind.DRIVER


def test_a_component_without_weights_is_listed_with_nothing() -> None:
    parts, _ = reckon([ComponentClaim("scheduler")])
    assert parts["scheduler"].tiers == {}


def test_components_and_the_rest_make_up_the_whole() -> None:
    status = parse_status(b"RssAnon: 100 kB\nRssFile: 60 kB\nRssShmem: 70 kB\n")
    dit = ComponentClaim("dit", claims=(claim(WEIGHTS, Tier.HOST_MAPPED), claim(HEAP, Tier.HOST_PAGEABLE)))
    vae = ComponentClaim("vae", claims=(claim(PINNED, Tier.HOST_PINNED),))
    counts = {
        WEIGHTS: PageCounts(file_bytes=2 * PAGE, anonymous_bytes=PAGE),
        HEAP: PageCounts(anonymous_bytes=4 * PAGE),
        PINNED: PageCounts(file_bytes=16 * PAGE),
    }
    parts, counted = reckon([dit, vae], counts)
    rest = unattributed(status, counted)
    assert (rest.file_bytes, rest.anonymous_bytes, rest.shared_bytes) == (52 * 1024, 80 * 1024, 6 * 1024)
    claimed = sum(part.resident_bytes for part in parts.values())
    assert claimed + rest.file_bytes + rest.anonymous_bytes + rest.shared_bytes == status.rss_bytes


def test_totals_of_another_moment_do_not_go_below_zero() -> None:
    _, counted = reckon(
        [ComponentClaim("dit", claims=(claim(HEAP, Tier.HOST_PAGEABLE),))], {HEAP: PageCounts(anonymous_bytes=PAGE)}
    )
    assert unattributed(parse_status(b""), counted).anonymous_bytes == 0


def test_a_piece_has_its_place_in_the_file() -> None:
    ranges = host_ranges([ComponentClaim("dit", claims=(Claim(0x12000, 0x13000, Tier.HOST_MAPPED),))])
    piece = pieces_of(ranges, TABLE, FILE_SYSTEMS)[0]
    assert extents_of([piece]) == {("dit", File(DISK, 7)): (Extent(0x5000, 0x1000),)}
