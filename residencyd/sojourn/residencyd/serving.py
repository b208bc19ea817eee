"""Puts the sidecar together: one scanner behind /metrics and ResidencyService."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, start_http_server
from sojourn.residencyd.collector import ResidencyCollector
from sojourn.residencyd.devices import load_nvml
from sojourn.residencyd.errors import InvalidSetting
from sojourn.residencyd.scanner import Scanner
from sojourn.residencyd.server import Server
from sojourn.residencyd.settings import Settings
from sojourn.residencyd.sight import Sight

# Set by the image's build.
REVISION_VARIABLE = "SOJOURN_REVISION"


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
    host, port = _split(metrics_address)
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


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise InvalidSetting(f"{address} is no address: give host:port, such as 0.0.0.0:9465")
    return host.strip("[]"), int(port)
