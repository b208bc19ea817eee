"""Settings and the table of measured errors are judged where they are read."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from sojourn.inference.quality import measured
from sojourn.inference.quality.settings import Fusions, QualitySettingRefused, QualitySettings

from tests.inference.quality.conftest import entry


def test_settings_are_judged_at_construction(tmp_path: Path) -> None:
    assert QualitySettings(fusions="on").fusions is Fusions.ON  # type: ignore[arg-type]
    with pytest.raises(QualitySettingRefused, match="--fusions is 'fast': must be one of auto, on, off"):
        QualitySettings(fusions="fast")  # type: ignore[arg-type]
    with pytest.raises(QualitySettingRefused, match=r"--step-cache-table is .*: there is no such file"):
        QualitySettings(table=tmp_path / "absent.json")


def test_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    entries = [entry("b" * 64, dtype="float32"), entry("a" * 64)]
    measured.write_table(tmp_path / "table.json", entries)
    assert set(measured.read_table(tmp_path / "table.json")) == set(entries)


def test_entry_of_a_checkpoint_and_dtype_is_found_and_a_later_table_wins() -> None:
    table = [entry("a"), entry("a", dtype="float32"), entry("b"), entry("a", threshold=0.7)]
    found = measured.find(table, fingerprint="a", dtype="bfloat16")
    assert found is not None
    assert found.threshold == 0.7
    assert measured.find(table, fingerprint="c", dtype="bfloat16") is None
    assert measured.find(table, fingerprint="", dtype="bfloat16") is None


@pytest.mark.parametrize(
    "content",
    ["{", "[1]", json.dumps([{"fingerprint": "a"}]), json.dumps([asdict(entry("a")) | {"more": 1}])],
    ids=["no JSON", "no entries", "too little", "too much"],
)
def test_unreadable_table_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "table.json").write_text(content)
    with pytest.raises(measured.TableUnreadable, match=r"table\.json: no table of measured errors"):
        measured.read_table(tmp_path / "table.json")


def test_shipped_table_is_readable_and_says_where_its_numbers_are_from() -> None:
    for shipped in measured.read_table(measured.SHIPPED):
        assert len(shipped.fingerprint) == 64
        assert "bench/step_cache.py" in shipped.provenance
        assert shipped.min_steps <= shipped.max_steps
        assert 0 < shipped.skipped_share < 1


@pytest.mark.parametrize(
    ("asked", "obstacle"),
    [
        ({"workflow": "t2va", "steps": 3}, None),
        ({"workflow": "t2va", "steps": 20}, None),
        ({"workflow": "t2va", "steps": 2}, "from 3 to 20 steps, not for 2"),
        ({"workflow": "t2va", "steps": 21}, "from 3 to 20 steps, not for 21"),
        ({"workflow": "ref2va", "steps": 5}, "for t2va, not for ref2va"),
    ],
)
def test_outside_of_what_was_measured_is_refused(asked: dict[str, Any], obstacle: str | None) -> None:
    found = entry("a").obstacle(**asked)
    assert (found is None) == (obstacle is None)
    assert obstacle is None or obstacle in str(found)
