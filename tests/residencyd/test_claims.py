from pathlib import Path

import pytest
from sojourn.residencyd.claims import (
    Claim,
    ComponentClaim,
    File,
    Origin,
    Range,
    Tier,
    from_message,
    host_ranges,
    parse_file,
    read_map,
)
from sojourn.residencyd.errors import MapMissing, MapSchemaUnknown, MapTorn
from sojourn.v1 import residency_pb2 as pb

from tests.residencyd.published import MAPPED, VRAM, component, message, publish, sealed, storage

PATH = Path("model.pb")
FILE = File((254, 0), 7)


def mapped(start: int, end: int, file: File | None = FILE) -> Claim:
    return Claim(start, end, Tier.HOST_MAPPED, file)


def ranges(**components: tuple[Claim, ...]) -> list[tuple[str, int, int]]:
    made = [ComponentClaim(name, claims=claims) for name, claims in components.items()]
    return [(found.origin.component, found.start, found.end) for found in host_ranges(made, page_bytes=16)]


def test_neighbouring_tensors_of_a_file_are_one_range_of_whole_pages() -> None:
    assert ranges(dit=(mapped(20, 40), mapped(40, 100))) == [("dit", 16, 112)]


def test_a_page_belongs_to_one_component() -> None:
    assert ranges(dit=(mapped(0, 20),), vae=(mapped(20, 40),)) == [("dit", 0, 32), ("vae", 32, 48)]
    assert ranges(dit=(mapped(0, 64),), vae=(mapped(16, 48),)) == [("dit", 0, 64)]


def test_what_is_claimed_differently_stays_apart() -> None:
    pageable = Claim(32, 64, Tier.HOST_PAGEABLE)
    assert ranges(dit=(mapped(0, 32), pageable)) == [("dit", 0, 32), ("dit", 32, 64)]
    assert ranges(dit=(mapped(0, 32), mapped(32, 64, File((254, 0), 8)))) == [("dit", 0, 32), ("dit", 32, 64)]


def test_ranges_that_are_claimed_alike_share_their_origin() -> None:
    first, second, third = host_ranges(
        [ComponentClaim("dit", claims=(mapped(0, 16), mapped(64, 80), mapped(96, 99, None)))], page_bytes=16
    )
    assert first.origin is second.origin
    assert third.origin is not first.origin


def test_a_tied_storage_counts_once() -> None:
    assert ranges(dit=(mapped(0, 64), mapped(0, 64), mapped(16, 32))) == [("dit", 0, 64)]


def test_device_memory_and_nothing_are_in_no_range() -> None:
    assert ranges(dit=(Claim(0, 64, Tier.VRAM), mapped(100, 100))) == []


def test_a_component_is_cold_only_if_nobody_needs_it() -> None:
    assert ComponentClaim("dit").is_cold
    assert not ComponentClaim("dit", needed_now=True).is_cold
    assert not ComponentClaim("dit", needed_next=True).is_cold
    in_use = ComponentClaim("dit", claims=(Claim(0, 1, Tier.VRAM, in_use=True),))
    assert in_use.in_use
    assert not in_use.is_cold


def test_a_map_survives_the_way_through_a_file() -> None:
    dit = component("dit", storage(4096, 100, MAPPED, inode=7, device_major=254), storage(1, 2, VRAM, in_use=True))
    claim = parse_file(PATH, sealed(message(9, [dit], start_ticks=5, next_stage_need_bytes=3)))
    assert (claim.pid, claim.start_ticks, claim.generation, claim.next_stage_need_bytes) == (9, 5, 1, 3)
    assert claim.components[0].claims == (mapped(4096, 4196), Claim(1, 3, Tier.VRAM, in_use=True))
    assert host_ranges(claim.components) == (Range(Origin("dit", Tier.HOST_MAPPED, FILE), 4096, 8192),)


@pytest.mark.parametrize("cut", [0, 1, 5, 20, -1])
def test_a_cut_map_is_torn(cut: int) -> None:
    content = sealed(message(9, [component("dit", storage(0, 10, MAPPED))], start_ticks=5))
    with pytest.raises(MapTorn):
        parse_file(PATH, content[:cut])


def test_a_map_cut_at_a_fields_end_is_torn_too() -> None:
    whole = pb.ComponentMapFile.FromString(sealed(message(9, [], start_ticks=5)))
    for field in ("crc32", "component_map"):
        part = pb.ComponentMapFile()
        setattr(part, field, getattr(whole, field))
        with pytest.raises(MapTorn):
            parse_file(PATH, part.SerializeToString())


@pytest.mark.parametrize("content", [b"hello", b"\0" * 100, b'{"pid": 1}'])
def test_another_file_is_torn(content: bytes) -> None:
    with pytest.raises(MapTorn):
        parse_file(PATH, content)


def test_a_component_that_is_listed_twice_makes_no_sense() -> None:
    with pytest.raises(MapTorn, match="listed twice: dit"):
        parse_file(PATH, sealed(message(9, [component("dit"), component("vae"), component("dit")], start_ticks=5)))


@pytest.mark.parametrize("version", [0, 2])
def test_another_version_is_told_so(version: int) -> None:
    with pytest.raises(MapSchemaUnknown, match="same release"):
        parse_file(PATH, sealed(message(9, [], start_ticks=5, schema_version=version)))


def test_an_unknown_tier_is_another_version() -> None:
    with pytest.raises(MapSchemaUnknown, match="tier"):
        parse_file(PATH, sealed(message(9, [component("dit", storage(0, 1, pb.TIER_UNSPECIFIED))], start_ticks=5)))


def test_a_missing_map_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(MapMissing, match="volume shared"):
        read_map(tmp_path / "model.pb")


def test_a_huge_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = publish(tmp_path, 9, start_ticks=5)
    monkeypatch.setattr("sojourn.residencyd.claims.MAP_BYTES_LIMIT", 10)
    with pytest.raises(MapTorn, match="more than 10 bytes"):
        read_map(path)


def test_a_claim_beyond_the_address_space_is_cut() -> None:
    claim = from_message(message(9, [component("dit", storage(2**64 - 4096, 2**63, MAPPED))], start_ticks=5))
    assert host_ranges(claim.components) == ()
    wide = from_message(message(9, [component("dit", storage(0, 2**64 - 1, MAPPED))], start_ticks=5))
    assert host_ranges(wide.components)[0].end < 2**64
