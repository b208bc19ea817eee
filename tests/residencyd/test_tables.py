import io
from pathlib import Path

import pytest
from rich.console import Console
from sojourn.residencyd import tables
from sojourn.residencyd.claims import Tier
from sojourn.residencyd.grouping import FileGroup, ProcessGroups
from sojourn.residencyd.scanner import Scanner
from sojourn.residencyd.settings import Settings
from sojourn.residencyd.tables import Row, bar, shortened, size, sparkline

from tests.residencyd.children import MIB, child, filled
from tests.residencyd.published import MAPPED, PINNED, component, publish, storage


def drawn(what: object, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(what)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (4096, "4.00 KiB"),
        (52 << 10, "52.0 KiB"),
        (999 << 10, "999 KiB"),
        (22_720_376_832, "21.2 GiB"),
        (5 << 40, "5.00 TiB"),
        (5 << 60, "5242880 TiB"),
        (-4096, "-4.00 KiB"),
    ],
)
def test_sizes_have_three_digits(count: int, text: str) -> None:
    assert size(count) == text


def test_bars_are_exact_to_an_eighth_and_a_little_is_never_nothing() -> None:
    assert bar(0, 8, width=4) == "    "
    assert bar(8, 8, width=4) == "████"
    assert bar(4, 8, width=4) == "██  "
    assert bar(3, 8, width=4) == "█▌  "
    assert bar(1, 1_000_000, width=4) == "▏   "
    assert bar(99, 8, width=4) == "████"
    assert bar(1, 0, width=4) == "    "


def test_a_line_goes_where_the_values_go() -> None:
    assert sparkline([]) == ""
    assert sparkline([5, 5]) == "▄▄"
    assert sparkline([0, 7, 3.5, 7]) == "▁█▅█"


def test_a_long_name_loses_its_middle() -> None:
    assert shortened("short", 18) == "short"
    assert (
        shortened("/models/a/very/long/way/dit.safetensors", 24)
        == "/models…it.safetensors"[:7] + "…/dit.safetensors"[-17:]
    )
    assert len(shortened("x" * 100, 24)) == 24
    assert shortened("new\nline", 24) == "new\\nline"


@pytest.mark.parametrize("width", [80, 160])
def test_a_process_fits_the_terminal(width: int) -> None:
    groups = [
        FileGroup(
            f"/models/some/folder/with/a/long/name/part-{n:05}.safetensors", Tier.HOST_MAPPED, 1, n, n, 5, 9, True
        )
        for n in range(30)
    ]
    text = drawn(tables.process(ProcessGroups(7, "python", 100, tuple(groups)), limit=3, width=width), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "27 more" in text
    assert "swapped" in text
    assert "deleted" in text
    assert "host_mapped" in text
    assert "▄" not in text, "one look makes no line"


def test_a_snapshot_shows_tiers_cold_bytes_disagreement_and_headroom(tmp_path: Path) -> None:
    path = filled(tmp_path / "weights", 2 * MIB)
    source = "f = os.open(path, os.O_RDONLY); a = map_(2 << 20, R, PRIVATE, f); read(a, 2 << 20); say(address=a)"
    with child(source, path=str(path)) as it:
        parts = (storage(it["address"], MIB, MAPPED), storage(it["address"] + MIB, MIB, PINNED))
        publish(tmp_path, it.pid, component("dit", *parts))
        snapshot = Scanner(Settings(map_pattern=str(tmp_path))).snapshot(1.0)
    text = drawn(tables.residency(snapshot, width=160, history=[1.0, 2.0]), 160)
    assert f"process {it.pid}" in text
    assert "cold 2.00 MiB" in text
    assert "disagrees by 1.00 MiB: other_tier" in text
    assert "headroom  room" in text
    assert "enough" in text
    assert "[anonymous]" in text
    assert "▁█" in text


def test_a_blind_snapshot_says_why(tmp_path: Path) -> None:
    snapshot = Scanner(Settings(map_pattern=str(tmp_path))).snapshot(1.0)
    assert "blind (no_map)" in drawn(tables.residency(snapshot, width=80), 80)


def test_rows_are_in_order_of_what_is_in_memory() -> None:
    rows = [Row("a", Tier.VRAM, 1, 1), Row("b", None, None, 5)]
    text = drawn(tables.table(rows, title="t", width=80), 80)
    assert "swapped" not in text
    assert text.index("a ") < text.index("b ")
