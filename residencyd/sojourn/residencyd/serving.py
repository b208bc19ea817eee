"""Puts the sidecar together: one scanner behind /metrics and ResidencyService.

    python -m sojourn.residencyd.serving '{"map_pattern": "/run/sojourn", ...}'

The command line checks its options and then becomes this, by an exec: its own libraries are 9 MB of memory that a
sidecar would hold for as long as the pod lives.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, start_http_server
from sojourn.residencyd import logs
from sojourn.residencyd.collector import ResidencyCollector
from sojourn.residencyd.devices import load_nvml
from sojourn.residencyd.errors import InvalidSetting
from sojourn.residencyd.scanner import Scanner
from sojourn.residencyd.server import Server
from sojourn.residencyd.settings import Settings
from sojourn.residencyd.sight import Sight

# Set by the image's build.
REVISION_VARIABLE = "SOJOURN_REVISION"


logger = logging.getLogger("sojourn.residencyd")


@dataclass(frozen=True)
class Options:
    """All of `residencyd serve`; paths are text, so that it can be written as JSON.

    Attributes:
        map_pattern: See `Settings`, as all that have its names.
        metrics_address: Host and port of /metrics; port 0 takes a free one.
        grpc_address: Likewise of ResidencyService.
        log_level: The least that is printed.
        log_text: Lines for people, not JSON.
        grace_seconds: For running calls at the end.
    """

    map_pattern: str
    proc: str
    cgroup_root: str | None
    floor_seconds: float
    deep_share: float
    host_pids: bool
    metrics_address: str
    grpc_address: str
    log_level: str
    log_text: bool
    grace_seconds: float

    @property
    def settings(self) -> Settings:
        """What the scanner is to look at."""
        return Settings(
            map_pattern=self.map_pattern,
            proc=Path(self.proc),
            cgroup_root=Path(self.cgroup_root) if self.cgroup_root else None,
            floor_seconds=self.floor_seconds,
            deep_share=self.deep_share,
            host_pids=self.host_pids,
        )


@dataclass(frozen=True)
class Ports:
    """That were taken."""

    metrics: int
    grpc: int


def version() -> str:
    """Of the installed distribution; "unknown" when run from a checkout that is not installed."""
    try:
        return metadata.version("sojourn")
    except metadata.PackageNotFoundError:
        return "unknown"


def registry_of(scanner: Scanner, lines: Iterable[tuple[str, int]]) -> CollectorRegistry:
    """All metrics of the process. The garbage collector's are left out: they say nothing here."""
    registry = CollectorRegistry()
    revision = os.environ.get(REVISION_VARIABLE, "unknown")
    registry.register(ResidencyCollector(scanner, lines=lambda: lines, version=version(), revision=revision))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


@contextlib.contextmanager
def running(
    settings: Settings,
    *,
    metrics_address: str,
    grpc_address: str,
    lines: Iterable[tuple[str, int]] = (),
    grace_seconds: float = 5.0,
    nvml: Any | None = None,
) -> Iterator[Ports]:
    """Serves while the block runs.

    Args:
        settings: What to look at.
        metrics_address: Host and port of /metrics; port 0 takes a free one.
        grpc_address: Likewise of ResidencyService.
        lines: Log records by level, live.
        grace_seconds: For running calls at the end.
        nvml: See `devices.load_nvml`, which is asked if this is None.

    Raises:
        InvalidSetting: An address cannot be listened on.
    """
    scanner = Scanner(settings, nvml=nvml or load_nvml(), on_scan=Sight().saw)
    try:
        server = Server(scanner, grpc_address)
    except RuntimeError as error:
        raise InvalidSetting(f"cannot listen on {grpc_address}: {error}") from error
    host, port = split_address(metrics_address)
    try:
        http, thread = start_http_server(port, host, registry=registry_of(scanner, lines))
    except OSError as error:
        raise InvalidSetting(f"cannot listen on {metrics_address}: {error.strerror}") from error
    server.start()
    try:
        yield Ports(metrics=http.server_port, grpc=server.port)
    finally:
        server.stop(grace_seconds=grace_seconds)
        http.shutdown()
        http.server_close()
        thread.join()


def split_address(address: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        InvalidSetting: It is no address.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise InvalidSetting(f"{address} is no address: give host:port, such as 0.0.0.0:9465")
    return host.strip("[]"), int(port)


def serve(options: Options) -> None:
    """Serves until a signal says to end.

    Raises:
        InvalidSetting: An address cannot be listened on.
    """
    printer, lines = logs.set_up(level=options.log_level, json_lines=not options.log_text)
    logs.obey_signals(printer, name="residencyd")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with running(
        options.settings,
        metrics_address=options.metrics_address,
        grpc_address=options.grpc_address,
        lines=lines,
        grace_seconds=options.grace_seconds,
    ) as ports:
        logger.info("metrics on port %d, ResidencyService on port %d", ports.metrics, ports.grpc)
        ended.wait()
        logger.info("shutting down")


if __name__ == "__main__":
    try:
        serve(Options(**json.loads(sys.argv[1])))
    except InvalidSetting as error:
        sys.exit(f"residencyd: {error}")
