"""Log lines: JSON, or text for people; and how many there were, by level.

Below the print level lines are counted all the same, so that a rise shows before anybody turns the level up.
"""

import json
import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error", "critical")

_OWN = "sojourn"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """A record as a line."""
        fields = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class LineCounter(logging.Handler):
    """Counts records by level."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._counts = dict.fromkeys(LEVELS, 0)
        self._guard = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Counts one."""
        level = record.levelname.lower()
        with self._guard:
            if level in self._counts:
                self._counts[level] += 1

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Levels and how many records they had, all levels."""
        with self._guard:
            return iter(list(self._counts.items()))


def set_up(*, level: str, json_lines: bool, stream: TextIO = sys.stderr) -> Iterable[tuple[str, int]]:
    """Prints this program's records, and counts them.

    Args:
        level: One of LEVELS; the least that is printed.
        json_lines: JSON rather than text.
        stream: Where to.

    Returns:
        The counts, live.
    """
    printer = logging.StreamHandler(stream)
    printer.setLevel(level.upper())
    text = logging.Formatter("%(asctime)s %(levelname)-8s %(message)s")
    printer.setFormatter(JsonFormatter() if json_lines else text)
    counter = LineCounter()
    logger = logging.getLogger(_OWN)
    logger.handlers = [printer, counter]
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    return counter
