import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from sojourn.residencyd import logs
from sojourn.residencyd.scanner import Scanner
from sojourn.residencyd.settings import Settings
from sojourn.residencyd.sight import Sight

from tests.residencyd.children import child
from tests.residencyd.published import publish

logger = logging.getLogger("sojourn.residencyd.test")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger("sojourn")
    before = root.handlers, root.level, root.propagate
    yield
    root.handlers, root.level, root.propagate = before


def test_lines_are_json_and_counted_also_below_the_print_level() -> None:
    stream = io.StringIO()
    _, counts = logs.set_up(level="warning", json_lines=True, stream=stream)
    logger.debug("x")
    logger.info("x")
    logger.warning("a %s", "b")
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("it failed")
    first, second = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (first["level"], first["message"], first["logger"]) == ("warning", "a b", "sojourn.residencyd.test")
    assert "ValueError: why" in second["exception"]
    assert dict(counts) == {"debug": 1, "info": 1, "warning": 1, "error": 1, "critical": 0}


def test_lines_for_people() -> None:
    stream = io.StringIO()
    logs.set_up(level="info", json_lines=False, stream=stream)
    logger.info("hello")
    assert stream.getvalue().endswith("INFO     hello\n")


def test_a_change_of_sight_is_told_once(tmp_path: Path) -> None:
    stream = io.StringIO()
    _, counts = logs.set_up(level="info", json_lines=True, stream=stream)
    scanner = Scanner(Settings(map_pattern=str(tmp_path), floor_seconds=0), on_scan=Sight().saw)

    def told() -> list[tuple[str, str]]:
        lines = [json.loads(line) for line in stream.getvalue().splitlines()]
        stream.seek(0)
        stream.truncate()
        return [(line["level"], line["message"][:14]) for line in lines if "source" not in line["message"]]

    for now in range(3):
        scanner.snapshot(now)
    assert told() == [("warning", "blind (no_map)")]
    with child("say()") as it:
        publish(tmp_path, it.pid)
        for now in range(10, 20):
            scanner.snapshot(now)
        assert told() == [("info", f"process {it.pid} is seen"[:14])]
    for now in range(30, 33):
        scanner.snapshot(now)
    assert told() == [("warning", "blind (gone): ")]
    assert dict(counts)["debug"] >= 13


def test_a_source_that_fails_and_works_again_is_told_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    logs.set_up(level="info", json_lines=False, stream=stream)
    broken = Settings(map_pattern=str(tmp_path), floor_seconds=0, proc=tmp_path)
    sight = Sight()
    scanner = Scanner(broken, on_scan=sight.saw)
    scanner.snapshot(1)
    scanner.snapshot(2)
    assert stream.getvalue().count("source meminfo is not usable") == 1
    (tmp_path / "meminfo").write_text("MemTotal: 2 kB\nMemFree: 1 kB\nMemAvailable: 1 kB\n")
    scanner.snapshot(3)
    scanner.snapshot(4)
    assert stream.getvalue().count("source meminfo is usable again") == 1
