"""Log lines: JSON, or text for people; and how many there were, by level.

Below the print level lines are counted all the same, so that a rise shows before anybody turns the level up.
"""

import json
import logging
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error", "critical")

_OWN = "sojourn"

_logger = logging.getLogger(__name__)


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


def set_up(
    *, level: str, json_lines: bool, stream: TextIO = sys.stderr
) -> tuple[logging.Handler, Iterable[tuple[str, int]]]:
    """Prints this program's records, and counts them.

    Args:
        level: One of LEVELS; the least that is printed.
        json_lines: JSON rather than text.
        stream: Where to.

    Returns:
        The handler that prints, and the counts, live.
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
    return printer, counter


def obey_signals(printing: logging.Handler, *, name: str) -> None:
    """SIGUSR1 prints from DEBUG on, SIGUSR2 from the configured level on again; call it from the main thread.

    A signal, rather than a call: it needs neither a port nor a token, and works while the server's loop hangs. So that
    the process can be found from a shell of its container, it gets a name: `grep -lx NAME /proc/[0-9]*/comm`.

    Args:
        printing: The handler that prints, at its configured level.
        name: Name of the process; the kernel keeps 15 bytes.
    """
    Path("/proc/self/comm").write_text(name)
    wishes: SimpleQueue[int] = SimpleQueue()
    # In a handler of signals only what takes no lock is safe: logging takes several.
    signal.signal(signal.SIGUSR1, lambda *_: wishes.put(logging.DEBUG))
    signal.signal(signal.SIGUSR2, lambda *_, level=printing.level: wishes.put(level))
    threading.Thread(target=_obey, args=(printing, wishes), name="log-level", daemon=True).start()


def _obey(printing: logging.Handler, wishes: "SimpleQueue[int]") -> None:
    while True:
        level = wishes.get()
        printing.setLevel(level)
        _logger.info("printing from level %s on", logging.getLevelName(level).lower())
