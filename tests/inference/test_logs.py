"""JSON lines, plain lines, and a count of everything by level."""

import io
import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from sojourn.inference import logs

Configure = Callable[..., tuple[io.StringIO, Counter[str], logging.Handler]]


@pytest.fixture
def configure() -> Iterator[Configure]:
    root, ours = logging.getLogger(), logging.getLogger(logs.PACKAGE)
    handlers, levels = root.handlers, (root.level, ours.level)

    def make(**settings: object) -> tuple[io.StringIO, Counter[str], logging.Handler]:
        stream, counted = io.StringIO(), Counter[str]()
        printing = logs.configure(stream=stream, count=lambda level: counted.update([level]), **settings)  # type: ignore[arg-type]
        return stream, counted, printing

    yield make
    root.handlers = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    logging.captureWarnings(False)


def test_lines_are_json(configure: Configure) -> None:
    stream, _, _ = configure()
    logging.getLogger("sojourn.x").info("loaded %s", "ä\n", extra={"device": "cpu"})
    (line,) = stream.getvalue().splitlines()
    told = json.loads(line)
    assert told.pop("time").endswith("+00:00")
    assert told == {"level": "info", "logger": "sojourn.x", "message": "loaded ä\n", "device": "cpu"}


def test_tracebacks_stay_on_their_line(configure: Configure) -> None:
    stream, _, _ = configure()
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("sojourn.x").exception("failed", extra={"odd": object()})
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: no" in json.loads(line)["exception"]


def test_human_lines_have_the_same_parts(configure: Configure) -> None:
    stream, _, _ = configure(human=True)
    logging.getLogger("sojourn.x").warning("slow", extra={"seconds": 3})
    assert stream.getvalue().split(" ", 1)[1] == "warning  sojourn.x  slow  seconds=3\n"


def test_records_below_the_print_level_are_counted(configure: Configure) -> None:
    stream, counted, _ = configure()
    ours = logging.getLogger("sojourn.x")
    for say in (ours.debug, ours.debug, ours.info, ours.warning, ours.error, ours.critical):
        say("x")
    ours.log(25, "between")
    assert counted == {"debug": 2, "info": 2, "warning": 1, "error": 1, "critical": 1}
    assert len(stream.getvalue().splitlines()) == 5


def test_print_level_changes_without_a_restart(configure: Configure) -> None:
    stream, _, printing = configure()
    logging.getLogger("sojourn.x").debug("unseen")
    printing.setLevel(logging.DEBUG)
    logging.getLogger("sojourn.x").debug("seen")
    assert "unseen" not in stream.getvalue()
    assert "seen" in stream.getvalue()


def test_python_warnings_come_through(configure: Configure) -> None:
    stream, counted, _ = configure()
    warnings.warn("odd", stacklevel=1)
    assert json.loads(stream.getvalue())["logger"] == "py.warnings"
    assert counted["warning"] == 1


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
def test_library_warnings_come_through_once(
    configure: Configure, library: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stream, counted, _ = configure()
    logs.adopt_library_loggers()
    logging.getLogger(f"{library}.models").warning("odd")
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["odd"]
    assert counted["warning"] == 1
    sys.stderr.flush()
    assert capsys.readouterr().err == ""
