"""Logging of the process: JSON lines or plain ones to stderr, and a counter of every record by level.

The loggers of this package make DEBUG records always, so that they can be counted; the handler that prints is the one
with the level, which `obey_signals` lets people change while the process runs.
"""

import json
import logging
import signal
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import TextIO

_logger = logging.getLogger(__name__)

PACKAGE = "sojourn"

# Attributes that every record has; the others came in as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, whatever came in `extra`, and the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Makes the line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class HumanFormatter(logging.Formatter):
    """`12:34:56.789 info     sojourn.server  message  key=value`, with the traceback below."""

    def format(self, record: logging.LogRecord) -> str:
        """Makes the line."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        extra = " ".join(f"{name}={value}" for name, value in vars(record).items() if name not in _STANDARD)
        line = f"{time} {record.levelname.lower():8} {record.name}  {record.getMessage()}  {extra}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class CountingHandler(logging.Handler):
    """Tells a counter each record's level, in the words debug, info, warning, error and critical."""

    def __init__(self, count: Callable[[str], None]) -> None:
        super().__init__(logging.NOTSET)
        self._count = count

    def emit(self, record: logging.LogRecord) -> None:
        """Counts a record; levels between two names count as the lower one."""
        standing = max(logging.DEBUG, min(record.levelno // 10 * 10, logging.CRITICAL))
        self._count(logging.getLevelName(standing).lower())


def configure(
    *,
    human: bool = False,
    print_level: int = logging.INFO,
    count: Callable[[str], None] | None = None,
    stream: TextIO | None = None,
) -> logging.Handler:
    """Sets up the root logger; answers the handler that prints, whose level is the print level.

    Args:
        human: Plain lines in place of JSON.
        print_level: Lowest level that is printed.
        count: Called with the level of every record, printed or not.
        stream: Where to print; stderr by default.
    """
    printing = logging.StreamHandler(stream or sys.stderr)
    printing.setFormatter(HumanFormatter() if human else JsonFormatter())
    printing.setLevel(print_level)
    root = logging.getLogger()
    root.handlers = [printing] if count is None else [CountingHandler(count), printing]
    root.setLevel(logging.INFO)
    logging.getLogger(PACKAGE).setLevel(logging.DEBUG)
    logging.captureWarnings(True)
    return printing


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


def adopt_library_loggers() -> None:
    """Brings warnings and errors of diffusers and transformers through the root logger, and their own handlers off.

    Imports both, and torch with them: call it where the model is loaded.
    """
    import diffusers.utils.logging as diffusers_logging
    import transformers.utils.logging as transformers_logging

    for library in (diffusers_logging, transformers_logging):
        library.disable_default_handler()
        library.enable_propagation()
        library.disable_progress_bar()
        library.set_verbosity_warning()
