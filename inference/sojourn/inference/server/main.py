"""A server from its start to its end.

The port opens at once and says NOT_SERVING; the model loads in the worker thread, the one that runs it afterwards. A
model that cannot be loaded leaves the port open for a while, so that health, GetInfo and the log can say why.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server
from sojourn.inference import logs
from sojourn.inference.errors import ModelError, SojournError
from sojourn.inference.server.config import Address, ConfigError, ServerConfig
from sojourn.inference.server.engine import Engine
from sojourn.inference.server.health import SERVICE_NAME, Health
from sojourn.inference.server.security import TokenInterceptor, Tokens, server_credentials
from sojourn.inference.server.servicer import InferenceServicer
from sojourn.inference.telemetry import UNKNOWN_WORKFLOW, Telemetry
from sojourn.inference.tracing import NoTraces, Traces
from sojourn.v1 import inference_pb2_grpc as pb_grpc

_logger = logging.getLogger(__name__)

# As `ps` shows it.
PROCESS_NAME = "sojourn"

EXIT_OK = 0
EXIT_MODEL_FAILED = 1
EXIT_CONFIG = 2

# After a wish to stop, a running step is waited for so long before the process ends regardless.
LAST_STEP_SECONDS = 5.0

# Callers without a sign of life for KEEPALIVE_SECONDS + KEEPALIVE_TIMEOUT_SECONDS count as gone: a machine that was
# switched off sends no FIN.
KEEPALIVE_SECONDS = 30
KEEPALIVE_TIMEOUT_SECONDS = 10

Load = Callable[[], Engine]


class Server:
    """One server; to be started, and stopped, once.

    Args:
        config: Settings.
        load: Loads the model; blocks, and runs in the worker thread.
        telemetry: Metrics; a new set by default.
        traces: Begins the traces of calls, and is closed with the server; none by default.
        clock: Seconds of a monotonic clock.

    Attributes:
        port: The gRPC port, from `start` on.
        metrics_port: The exporter's port, from `start` on; 0 without one.
        health: The state.
    """

    def __init__(
        self,
        config: ServerConfig,
        load: Load,
        *,
        telemetry: Telemetry | None = None,
        traces: Traces | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.telemetry = telemetry or Telemetry(model_name=config.model_name, max_waiting=config.max_waiting)
        self._traces = traces or NoTraces()
        self.health = Health(changed=self.telemetry.state)
        self.port = self.metrics_port = 0
        self._load = load
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pipeline")
        self._servicer = InferenceServicer(
            health=self.health,
            telemetry=self.telemetry,
            worker=self._worker,
            clock=clock,
            max_waiting=config.max_waiting,
            stall_seconds=config.stall_seconds,
            model_name=config.model_name,
            traces=self._traces,
        )
        self._grpc = self._build()
        self._loading: asyncio.Task[None] | None = None
        self._exporter: Any = None

    def _build(self) -> grpc.aio.Server:
        interceptors = []
        if self.config.token_file is not None:
            interceptors.append(TokenInterceptor(Tokens(self.config.token_file), refused=self._count_unauthenticated))
        server = grpc.aio.server(interceptors=interceptors, options=_options(self.config))
        pb_grpc.add_InferenceServiceServicer_to_server(self._servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, server)
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflection.enable_server_reflection((SERVICE_NAME, health_name, reflection.SERVICE_NAME), server)
        return server

    def _count_unauthenticated(self) -> None:
        self.telemetry.ended(workflow=UNKNOWN_WORKFLOW, code="UNAUTHENTICATED", refused="unauthenticated")

    async def start(self) -> None:
        """Opens the ports, then begins to load.

        Raises:
            ConfigError: A port cannot be had, or a TLS file cannot be read.
        """
        await self.health.loading()
        self.port = self._bind()
        await self._grpc.start()
        if self.config.metrics_listen is not None:
            self.metrics_port = self._export(self.config.metrics_listen)
        address = Address(host=self.config.listen.host, port=self.port)
        extra = {"address": str(address), "tls": self.config.tls_cert is not None, "metrics_port": self.metrics_port}
        _logger.info("listening", extra=extra)
        self._loading = asyncio.create_task(self._load_model())

    async def loaded(self) -> bool:
        """Waits for the model; answers whether it is served."""
        assert self._loading is not None
        await asyncio.shield(self._loading)
        return self.health.engine is not None

    async def stop(self, *, grace_seconds: float) -> bool:
        """Drains and closes; answers whether the worker thread has come to rest."""
        await self.health.draining()
        _logger.info("draining", extra={"grace_seconds": grace_seconds})
        await self._servicer.drain(grace_seconds=grace_seconds)
        at_rest = await self._servicer.idle(timeout_seconds=LAST_STEP_SECONDS) and self._has_loaded()
        # What is open now are health watches and reflection; they would stay for ever.
        await self._grpc.stop(0)
        self._close()
        return at_rest

    def _has_loaded(self) -> bool:
        if self._loading is None or self._loading.done():
            return True
        self._loading.cancel()
        return False

    def _close(self) -> None:
        self._servicer.shutdown()
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._traces.close()
        if self._exporter is not None:
            server, thread = self._exporter
            server.shutdown()
            server.server_close()
            thread.join()

    def _bind(self) -> int:
        address = str(self.config.listen)
        credentials = server_credentials(self.config)
        try:
            if credentials is None:
                return self._grpc.add_insecure_port(address)
            return self._grpc.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(f"listen address {address} cannot be had; is it in use?") from error

    def _export(self, address: Address) -> int:
        try:
            self._exporter = start_http_server(address.port, addr=address.host, registry=self.telemetry.registry)
        except OSError as error:
            raise ConfigError(f"metrics address {address} cannot be had: {error.strerror}") from error
        port: int = self._exporter[0].server_port
        return port

    async def _load_model(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            engine = await loop.run_in_executor(self._worker, self._load_in_worker)
            await self._serve_engine(engine)
        except Exception as error:
            await self._fail(error)

    async def _serve_engine(self, engine: Engine) -> None:
        seconds = _process_age_seconds()
        self.telemetry.ready(
            seconds=seconds,
            family=engine.family.name,
            dtype=engine.dtype_name,
            device=str(engine.device),
            model_name=engine.model_name,
        )
        await self.health.serving(engine)
        self.health.fingerprint.add_done_callback(lambda known: self.telemetry.fingerprint(known.result()))
        extra = {"model": engine.model_name, "device": str(engine.device), "dtype": engine.dtype_name}
        _logger.info("model loaded", extra=extra | {"seconds_to_ready": round(seconds, 3)})

    def _load_in_worker(self) -> Engine:
        engine = self._load()
        logs.adopt_library_loggers()
        return engine

    async def _fail(self, error: Exception) -> None:
        if isinstance(error, ModelError):
            reason = f"{error.reason}: {error}"
        elif isinstance(error, SojournError):
            reason = str(error)
        else:
            reason = f"LoadFailed: {type(error).__name__}: {error}"
        unforeseen = None if isinstance(error, SojournError) else error
        _logger.error("the model cannot be loaded", exc_info=unforeseen, extra={"reason": reason})
        await self.health.failed(reason)


async def serve(config: ServerConfig, load: Load, *, telemetry: Telemetry | None = None) -> int:
    """Serves until SIGTERM or SIGINT; answers the exit code.

    Args:
        config: Settings.
        load: Loads the model, such as `functools.partial(load_pipeline, path)`.
        telemetry: Metrics; a new set by default.

    Returns:
        0 after a drain, 1 where the model could not be loaded, 2 for a configuration that cannot be served.
    """
    code, _ = await _serve(config, load, telemetry, None)
    return code


def run(
    config: ServerConfig,
    load: Load,
    *,
    telemetry: Telemetry | None = None,
    traces: Traces | None = None,
    printing: logging.Handler | None = None,
) -> int:
    """`serve` for a command line: answers the exit code, or ends the process where a step does not end in time.

    Args:
        config: Settings.
        load: Loads the model.
        telemetry: Metrics; a new set by default.
        traces: Begins the traces of calls; none by default.
        printing: The log handler whose level SIGUSR1 and SIGUSR2 change.
    """
    if printing is not None:
        logs.obey_signals(printing, name=PROCESS_NAME)
    code, at_rest = asyncio.run(_serve(config, load, telemetry, traces))
    if not at_rest:
        # Python would wait for the thread that is still computing.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    return code


async def _serve(
    config: ServerConfig, load: Load, telemetry: Telemetry | None, traces: Traces | None
) -> tuple[int, bool]:
    stopping = _on_signals()
    try:
        server = Server(config, load, telemetry=telemetry, traces=traces)
        await server.start()
    except ConfigError as error:
        _logger.error("cannot start", extra={"reason": str(error)})
        return EXIT_CONFIG, True
    failed = asyncio.create_task(_outlive_failure(server))
    signalled = asyncio.create_task(stopping.wait())
    await asyncio.wait((failed, signalled), return_when=asyncio.FIRST_COMPLETED)
    for task in (failed, signalled):
        task.cancel()
    at_rest = await server.stop(grace_seconds=config.grace_seconds)
    code = EXIT_OK if stopping.is_set() else EXIT_MODEL_FAILED
    _logger.info("stopped", extra={"exit_code": code})
    return code, at_rest


async def _outlive_failure(server: Server) -> None:
    """Ends a while after the model has failed to load; never, when it loads."""
    if await server.loaded():
        await asyncio.Event().wait()
    await asyncio.sleep(server.config.failed_grace_seconds)


def _on_signals() -> asyncio.Event:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        # Without this two servers could share a port, each getting some of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ]


def _process_age_seconds(*, proc: Path = Path("/proc")) -> float:
    """Seconds since the process started, imports included."""
    started_ticks = int((proc / "self" / "stat").read_text().rpartition(")")[2].split()[19])
    uptime = float((proc / "uptime").read_text().split()[0])
    return max(0.0, uptime - started_ticks / os.sysconf("SC_CLK_TCK"))
