"""sojourn-operator: the command line."""

import asyncio
import gc
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from sojourn.operator import defaults as defaulting
from sojourn.operator import logs, process
from sojourn.operator.admission import WebhookSettings
from sojourn.operator.certificate import ClientCertificate
from sojourn.operator.clock import Clock
from sojourn.operator.errors import BadConfiguration
from sojourn.operator.helm import HelmSettings
from sojourn.operator.kube.access import find
from sojourn.operator.queueing import Backoff
from sojourn.operator.reconcile import Pace

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class Driver(StrEnum):
    """Where release records are kept."""

    CONFIGMAP = "configmap"
    SECRET = "secret"


class LogFormat(StrEnum):
    """How log lines look."""

    JSON = "json"
    TEXT = "text"


@app.callback()
def root() -> None:
    """Turns DiffusionServices into running pods."""


@app.command()
def run(
    context: typer.Context,
    chart: Annotated[Path, typer.Option(help="Folder of the chart of a service.")] = Path("/charts/sojourn-service"),
    defaults: Annotated[Path, typer.Option(help="File with the settings of the installation.")] = Path(
        "/etc/sojourn/defaults.yaml"
    ),
    namespace: Annotated[
        list[str] | None, typer.Option(help="Namespace to look after, repeatable. Default: all.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Passes at once.")] = 8,
    helm: Annotated[str, typer.Option(help="The helm program.")] = "helm",
    helm_timeout: Annotated[
        int, typer.Option(min=1, max=3600, help="Seconds that helm may take; locks older than that are stale.")
    ] = 60,
    helm_concurrency: Annotated[int, typer.Option(min=1, max=32, help="Helm processes at once.")] = 6,
    helm_driver: Annotated[
        Driver, typer.Option(help="Where release records are kept. configmap needs no right on Secrets.")
    ] = Driver.CONFIGMAP,
    scratch: Annotated[Path, typer.Option(help="Writable folder for helm's caches.")] = Path("/tmp/helm"),
    resync_seconds: Annotated[
        float, typer.Option(min=1, help="Shortest time between two whole listings; the longest is twice that.")
    ] = 300.0,
    observe_seconds: Annotated[
        float, typer.Option(min=1, help="Between two looks at the figures of pods that serve.")
    ] = 30.0,
    unready_seconds: Annotated[
        float, typer.Option(min=0.5, help="Between two looks at pods that do not serve yet.")
    ] = 10.0,
    refused_seconds: Annotated[
        float,
        typer.Option(min=1, help="Before a refused manifest is tried again; doubled each time, up to 6 times this."),
    ] = 600.0,
    listen: Annotated[str, typer.Option(help="Address and port of /healthz and /metrics.")] = "0.0.0.0:8080",
    webhook_listen: Annotated[
        str, typer.Option(help="Address and port of the validating webhook. Empty: there is none.")
    ] = "",
    webhook_certificates: Annotated[Path, typer.Option(help="Folder with its tls.crt and tls.key.")] = Path(
        "/etc/sojourn/webhook"
    ),
    client_certificate: Annotated[
        Path | None,
        typer.Option(help="Folder with tls.crt, tls.key and maybe ca.crt, for models that demand a certificate."),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[LogFormat, typer.Option(help="json or text.")] = LogFormat.TEXT,
) -> None:
    """Runs the operator until SIGTERM."""
    printing = logs.configure(level=log_level, as_json=log_format is LogFormat.JSON)
    logs.obey_signals(printing, name="sojourn-operator")
    try:
        settings = process.Settings(
            namespaces=tuple(namespace or ()),
            workers=workers,
            resync_seconds=(resync_seconds, 2 * resync_seconds),
            listen=_address(listen),
            helm=HelmSettings(
                program=helm,
                chart=chart,
                scratch=scratch,
                driver=helm_driver.value,
                timeout_seconds=helm_timeout,
                concurrency=helm_concurrency,
            ),
            pace=Pace(
                unready_seconds=unready_seconds,
                observe_seconds=observe_seconds,
                refused_seconds=refused_seconds,
                refused_cap_seconds=6 * refused_seconds,
            ),
            backoff=Backoff(),
            webhook=WebhookSettings(_address(webhook_listen), webhook_certificates) if webhook_listen else None,
            certificate=ClientCertificate(client_certificate) if client_certificate else None,
            # Whoever calls the command as a function may bring a clock; from a shell it is the machine's.
            clock=context.obj or Clock(),
        )
        _spare_the_collector()
        asyncio.run(process.run(settings, find(os.environ), defaulting.load(defaults)))
    except (BadConfiguration, ValueError) as error:
        print(f"sojourn-operator: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


def _spare_the_collector() -> None:
    """Imports stay for good and are not looked through; young objects are looked through by the ten thousand."""
    gc.freeze()
    gc.set_threshold(10_000)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def main() -> None:
    """Entry point of the distribution."""
    app()
