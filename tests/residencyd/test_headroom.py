from pathlib import Path

import pytest
from sojourn.residencyd.claims import ComponentClaim
from sojourn.residencyd.headroom import ColdPiece, cold_of, room_bytes
from sojourn.residencyd.kernel.cgroups import Group

from tests.residencyd.children import GIB, MIB


def group(limit: int | None, usage: int, reclaimable: int = 0) -> Group:
    return Group(Path("x"), limit, usage, reclaimable, 0)


@pytest.mark.parametrize(
    ("machine", "groups", "mapped", "room"),
    [
        pytest.param(20 * GIB, (), 0, 20 * GIB, id="uncapped: what the machine has"),
        pytest.param(20 * GIB, (group(None, 9 * GIB),), 0, 20 * GIB, id="an uncapped group binds nobody"),
        pytest.param(20 * GIB, (group(16 * GIB, 12 * GIB, 2 * GIB),), 0, 6 * GIB, id="limit - usage + file cache"),
        pytest.param(3 * GIB, (group(16 * GIB, 2 * GIB),), 0, 3 * GIB, id="the machine is tighter"),
        pytest.param(20 * GIB, (group(8 * GIB, 7 * GIB), group(64 * GIB, 64 * GIB)), 0, 0, id="a full ancestor"),
        pytest.param(20 * GIB, (group(16 * GIB, 12 * GIB, 6 * GIB),), 4 * GIB, 6 * GIB, id="hot pages are no room"),
        pytest.param(20 * GIB, (group(16 * GIB, 12 * GIB, GIB),), 4 * GIB, 4 * GIB, id="pages charged to others"),
        pytest.param(3 * GIB, (), 4 * GIB, 0, id="never below zero"),
    ],
)
def test_room(machine: int, groups: tuple[Group, ...], mapped: int, room: int) -> None:
    assert room_bytes(machine, groups, mapped) == room


def piece(resident: int, exclusive: int, owned: bool | None) -> ColdPiece:
    return ColdPiece("dit", resident, exclusive, owned)


def test_what_would_go_and_what_would_stay_and_why() -> None:
    pieces = [piece(8 * MIB, 6 * MIB, True), piece(4 * MIB, 4 * MIB, False), piece(MIB, MIB, None)]
    cold = cold_of(ComponentClaim("dit"), pieces, locked_bytes=MIB)
    assert cold.cold_bytes == 5 * MIB
    assert cold.stuck_bytes == {"not_owner": 4 * MIB, "shared": 2 * MIB, "locked": MIB, "other": MIB}


@pytest.mark.parametrize("needed", [{"needed_now": True}, {"needed_next": True}])
def test_nothing_of_a_needed_component_is_cold(needed: dict[str, bool]) -> None:
    cold = cold_of(ComponentClaim("dit", **needed), [piece(MIB, MIB, True)], locked_bytes=MIB)
    assert cold.cold_bytes == 0
    assert set(cold.stuck_bytes.values()) == {0}


def test_more_locked_than_cold_leaves_nothing() -> None:
    assert cold_of(ComponentClaim("dit"), [piece(MIB, MIB, True)], locked_bytes=GIB).cold_bytes == 0


def test_pages_that_left_between_two_counts_are_not_cold() -> None:
    cold = cold_of(ComponentClaim("dit"), [piece(MIB, 2 * MIB, True)], locked_bytes=0)
    assert cold.cold_bytes == MIB
    assert cold.stuck_bytes["shared"] == 0
