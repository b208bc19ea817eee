"""Logging of the process: JSON lines or text, every record counted by level, also those that are not printed."""

import json
import logging
import sys
from datetime import UTC, datetime

from sojourn.operator.telemetry import Telemetry


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


def configure(*, level: str, as_json: bool) -> None:
    """Sets up logging of our own package; of kopf only warnings are of interest."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.setLevel(level.upper())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    # Made whatever is printed, since they are counted.
    logging.getLogger("sojourn").setLevel(logging.DEBUG)


def count(telemetry: Telemetry) -> None:
    """Counts the records of our own package from now on."""
    logging.getLogger("sojourn").addHandler(Counting(telemetry))
