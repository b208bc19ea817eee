"""Logging of the process: JSON lines or text, every record counted by level, also those that are not printed."""

import json
import logging
import signal
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue

from sojourn.operator.telemetry import Telemetry

_logger = logging.getLogger(__name__)


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class Counting(logging.Handler):
    """Counts records by level."""

    def __init__(self, telemetry: Telemetry) -> None:
        super().__init__(logging.DEBUG)
        self._counters = telemetry.log_lines

    def emit(self, record: logging.LogRecord) -> None:
        """Counts one record."""
        self._counters.labels(record.levelname.lower()).inc()


def configure(*, level: str, as_json: bool) -> logging.Handler:
    """Sets up logging of our own package; of kopf only warnings are of interest. Answers the handler that prints."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.setLevel(level.upper())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    # Made whatever is printed, since they are counted.
    logging.getLogger("sojourn").setLevel(logging.DEBUG)
    return handler


def count(telemetry: Telemetry) -> None:
    """Counts the records of our own package from now on."""
    logging.getLogger("sojourn").addHandler(Counting(telemetry))


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
