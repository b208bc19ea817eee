"""`sojourn serve`: one model behind InferenceService, until SIGTERM."""

import logging
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from sojourn.inference import logs, tracing
from sojourn.inference.adaln.overrides import parse_overrides
from sojourn.inference.adaln.refusals import SettingRefused
from sojourn.inference.adaln.settings import PlanCacheSettings
from sojourn.inference.cli.exits import CommandFailed, Exit
from sojourn.inference.cli.loading import DeviceOption, PrecisionOption, lazily_loaded
from sojourn.inference.cli.placement import (
    OFFLOAD,
    ColdPageAdviceOption,
    DeviceMemoryOption,
    HostMemoryOption,
    NextStageHeadroomOption,
    OffloadOption,
    PinningOption,
    placement,
)
from sojourn.inference.cli.plan_cache import PLANS, FamilyOption
from sojourn.inference.quality.settings import QualitySettingRefused, QualitySettings
from sojourn.inference.server.config import Address, ConfigError, ServerConfig
from sojourn.inference.server.main import run
from sojourn.inference.telemetry import Telemetry

SECURITY, LIMITS, WATCHING = "Security", "Limits", "Watching"
QUALITY = "Quality tiers"
_DEFAULTS = PlanCacheSettings()


class LogFormat(StrEnum):
    """How log lines look."""

    JSON = "json"
    HUMAN = "human"


class LogLevel(StrEnum):
    """The lowest level that is printed; lower ones are still counted."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def serve(
    model: Annotated[Path, typer.Option(help="Model folder in the diffusers modular layout.", show_default=False)],
    listen: Annotated[str, typer.Option(help="HOST:PORT for gRPC; port 0 takes a free one.")] = "127.0.0.1:50051",
    device: DeviceOption = "auto",
    dtype: PrecisionOption = "bfloat16",
    model_name: Annotated[
        str | None, typer.Option(help="Name to serve it under; the folder's own by default.", show_default=False)
    ] = None,
    fingerprint_cache: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps the digests of weight files between starts.", show_default=False),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait beside the running one.", rich_help_panel=LIMITS)
    ] = ServerConfig.max_waiting,
    max_message_bytes: Annotated[
        int, typer.Option(help="Largest request, pictures included.", rich_help_panel=LIMITS)
    ] = ServerConfig.max_message_bytes,
    stall_seconds: Annotated[
        float, typer.Option(help="A reader that takes nothing for so long loses its call.", rich_help_panel=LIMITS)
    ] = ServerConfig.stall_seconds,
    grace_seconds: Annotated[
        float, typer.Option(help="Time that a running request gets after SIGTERM.", rich_help_panel=LIMITS)
    ] = ServerConfig.grace_seconds,
    failed_grace_seconds: Annotated[
        float, typer.Option(help="Time to be asked why, after a model failed to load.", rich_help_panel=LIMITS)
    ] = ServerConfig.failed_grace_seconds,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM certificate chain; turns TLS on.", rich_help_panel=SECURITY)
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of --tls-cert.", rich_help_panel=SECURITY)] = None,
    client_ca: Annotated[
        Path | None,
        typer.Option(help="PEM certificates; clients must show one signed by them.", rich_help_panel=SECURITY),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="Bearer tokens, one a line; read again when changed.", rich_help_panel=SECURITY),
    ] = None,
    allow_insecure: Annotated[
        bool,
        typer.Option("--allow-insecure", help="Listen beyond loopback without TLS.", rich_help_panel=SECURITY),
    ] = False,
    adaln_cache: Annotated[
        str,
        typer.Option(
            help="Whether to keep modulation rows instead of their weights: on, off or auto, which is on where "
            "rows cost less.",
            metavar="MODE",
            rich_help_panel=PLANS,
        ),
    ] = _DEFAULTS.mode.value,
    adaln_plans: Annotated[
        int,
        typer.Option(help="Plans held on the device; a request of N steps needs N - 1.", rich_help_panel=PLANS),
    ] = _DEFAULTS.plans,
    adaln_plan_width: Annotated[
        int,
        typer.Option(help="Rows of a plan: t2va needs 2, fl2va 3, ref2va 4.", rich_help_panel=PLANS),
    ] = _DEFAULTS.width,
    adaln_host_bytes: Annotated[
        int, typer.Option(help="Host memory for rows of recent requests; 0 for none.", rich_help_panel=PLANS)
    ] = _DEFAULTS.host_bytes,
    adaln_store: Annotated[
        Path | None,
        typer.Option(help="Folder of rows that the processes of a node share.", rich_help_panel=PLANS),
    ] = None,
    adaln_store_bytes: Annotated[
        int, typer.Option(help="Size cap of that folder; the oldest files go first.", rich_help_panel=PLANS)
    ] = _DEFAULTS.store_bytes,
    adaln_precision: Annotated[
        str,
        typer.Option(
            help="How rows are computed: match (bit-identical to resident weights) or fp32.",
            metavar="HOW",
            rich_help_panel=PLANS,
        ),
    ] = _DEFAULTS.precision.value,
    adaln_family: FamilyOption = None,
    device_memory: DeviceMemoryOption = None,
    host_memory: HostMemoryOption = None,
    offload: OffloadOption = None,
    pinning: PinningOption = "auto",
    cold_page_advice: ColdPageAdviceOption = "auto",
    next_stage_headroom: NextStageHeadroomOption = None,
    component_map: Annotated[
        Path | None,
        typer.Option(
            help="File to publish the component map in, for residencyd.",
            envvar="SOJOURN_COMPONENT_MAP",
            show_envvar=True,
            rich_help_panel=OFFLOAD,
        ),
    ] = None,
    fusions: Annotated[
        str,
        typer.Option(
            help="Fused kernels of tiers extra-high and high: auto (where they are measured to be faster at load), on "
            "(wherever they run) or off.",
            metavar="MODE",
            rich_help_panel=QUALITY,
        ),
    ] = QualitySettings.fusions.value,
    step_cache_table: Annotated[
        Path | None,
        typer.Option(
            help="File of measured errors, made by bench/step_cache.py; tier high is served for the checkpoints in it.",
            rich_help_panel=QUALITY,
        ),
    ] = None,
    metrics_listen: Annotated[
        str, typer.Option(help="HOST:PORT for Prometheus; 'off' for none.", rich_help_panel=WATCHING)
    ] = str(ServerConfig.metrics_listen),
    log_format: Annotated[
        LogFormat, typer.Option(help="How log lines look.", rich_help_panel=WATCHING)
    ] = LogFormat.JSON,
    log_level: Annotated[
        LogLevel, typer.Option(help="Lowest level to print.", rich_help_panel=WATCHING)
    ] = LogLevel.INFO,
) -> None:
    """Serve a model over gRPC until SIGTERM.

    Health (grpc.health.v1) and reflection are on the same port. The port opens at once; health says SERVING when the
    model is loaded. A model that cannot be loaded is told by health, GetInfo and the log, and the process exits 1.
    SIGUSR1 prints from DEBUG on, SIGUSR2 from --log-level again. OTEL_EXPORTER_OTLP_ENDPOINT turns traces on.
    """
    try:
        config = ServerConfig(
            model_name=model_name or model.resolve().name,
            listen=Address.parse(listen),
            metrics_listen=None if metrics_listen == "off" else Address.parse(metrics_listen),
            allow_insecure=allow_insecure,
            max_waiting=max_waiting,
            max_message_bytes=max_message_bytes,
            stall_seconds=stall_seconds,
            grace_seconds=grace_seconds,
            failed_grace_seconds=failed_grace_seconds,
            tls_cert=tls_cert,
            tls_key=tls_key,
            client_ca=client_ca,
            token_file=token_file,
        )
        plans = PlanCacheSettings(
            mode=adaln_cache,  # type: ignore[arg-type]
            plans=adaln_plans,
            width=adaln_plan_width,
            host_bytes=adaln_host_bytes,
            store=adaln_store,
            store_bytes=adaln_store_bytes,
            precision=adaln_precision,  # type: ignore[arg-type]
            families=parse_overrides(adaln_family or []),
        )
        quality = QualitySettings(fusions=fusions, table=step_cache_table)  # type: ignore[arg-type]
        traces = tracing.from_environment(os.environ)
    except (ConfigError, SettingRefused, QualitySettingRefused, tracing.TracingUnavailable, ValueError) as error:
        raise CommandFailed(str(error), Exit.INVALID) from None
    placed = placement(
        device_memory=device_memory,
        host_memory=host_memory,
        offload=offload,
        pinning=pinning,
        cold_page_advice=cold_page_advice,
        next_stage_headroom=next_stage_headroom,
        component_map=component_map,
    )
    telemetry = Telemetry(model_name=config.model_name, max_waiting=config.max_waiting)
    printing = logs.configure(
        human=log_format is LogFormat.HUMAN,
        print_level=logging.getLevelNamesMapping()[log_level.upper()],
        count=telemetry.log_line,
    )
    load = lazily_loaded(
        model,
        device=device,
        dtype=dtype,
        model_name=config.model_name,
        fingerprint_cache=fingerprint_cache,
        plan_settings=plans,
        plan_observer=telemetry.plan_cache,
        offload=placed,
        offload_observer=telemetry.offload,
        quality_settings=quality,
        quality_observer=telemetry.quality,
    )
    sys.exit(run(config, load, telemetry=telemetry, traces=traces, printing=printing))
