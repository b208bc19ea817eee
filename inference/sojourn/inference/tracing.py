"""OpenTelemetry traces of Generate: off by default, set up by the standard environment variables.

On where `OTEL_TRACES_EXPORTER` is `otlp`, or where an OTLP endpoint is named; `OTEL_SDK_DISABLED=true` is off in any
case. Everything else (endpoint, headers, protocol, sampler, service name, resource attributes, batch sizes) is read by
OpenTelemetry itself.

A call is one span, a child of the caller's where its metadata carry `traceparent`. Below it are `queued` and one span
for each use of a stage; a denoising step is an event of its stage.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from sojourn.inference.errors import SojournError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

SERVICE_NAME = "sojourn"
METHOD = "sojourn.v1.InferenceService/Generate"
NANOSECONDS = 1_000_000_000

# Codes that are the server's fault, by OpenTelemetry's conventions for gRPC servers.
FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})

Attributes = Mapping[str, str | int | float | bool]
Metadata = Sequence[tuple[str, str | bytes]]


class TracingUnavailable(SojournError):
    """The environment asks for traces and they cannot be made; the message says what to install or change."""


class CallTrace(Protocol):
    """What is told of one call. All times are Unix seconds."""

    @property
    def exemplar(self) -> dict[str, str] | None:
        """What ties a sample of a histogram to this trace; None without one."""

    def describe(self, attributes: Attributes) -> None:
        """Facts about the call."""

    def began(self, stage: str, *, at: float) -> None:
        """A stage has begun, and the one before it has ended."""

    def stepped(self, step: int, *, steps: int, seconds: float, at: float) -> None:
        """A step of the present stage has ended."""

    def paused(self, *, at: float) -> None:
        """The present stage has ended, and none follows yet."""

    def ended(self, code: str, *, message: str) -> None:
        """The call has ended with a gRPC code."""


class Silent:
    """The trace of a process without traces."""

    @property
    def exemplar(self) -> dict[str, str] | None:
        """None."""
        return None

    def describe(self, attributes: Attributes) -> None:
        """Ignored."""

    def began(self, stage: str, *, at: float) -> None:
        """Ignored."""

    def stepped(self, step: int, *, steps: int, seconds: float, at: float) -> None:
        """Ignored."""

    def paused(self, *, at: float) -> None:
        """Ignored."""

    def ended(self, code: str, *, message: str) -> None:
        """Ignored."""


class Traces(Protocol):
    """Begins the traces of calls."""

    def call(self, metadata: Metadata) -> CallTrace:
        """A call has come in, with these metadata."""

    def close(self) -> None:
        """Sends what has not been sent."""


class NoTraces:
    """Of a process without traces."""

    def call(self, metadata: Metadata) -> CallTrace:
        """One that ignores everything."""
        return _SILENT

    def close(self) -> None:
        """Nothing is kept."""


_SILENT = Silent()


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for traces.

    Raises:
        TracingUnavailable: It asks for an exporter other than OTLP.
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "")
    if exporter not in ("", "none", "otlp"):
        raise TracingUnavailable(f"OTEL_TRACES_EXPORTER is {exporter!r}; takes otlp or none")
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return exporter == "otlp" or (exporter == "" and any(environment.get(name) for name in endpoints))


def from_environment(environment: Mapping[str, str]) -> Traces:
    """What the environment asks for.

    Raises:
        TracingUnavailable: It asks for traces and the packages are missing, or for a protocol that is none.
    """
    if not wanted(environment):
        return NoTraces()
    try:
        return OpenTelemetryTraces(_provider(environment))
    except ImportError as error:
        raise TracingUnavailable(
            f"OTEL_* variables ask for traces and {error.name} is not installed: pip install 'sojourn[tracing]', or "
            "set OTEL_SDK_DISABLED=true"
        ) from error


def _provider(environment: Mapping[str, str]) -> "TracerProvider":
    from opentelemetry.sdk.resources import SERVICE_NAME as NAME_ATTRIBUTE
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # The environment's attributes come second: they win.
    named = Resource({NAME_ATTRIBUTE: SERVICE_NAME}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=Resource.create().merge(named))
    provider.add_span_processor(BatchSpanProcessor(_exporter(environment)))
    return provider


def _exporter(environment: Mapping[str, str]) -> "SpanExporter":
    common = environment.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", common)
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

        return OverGrpc()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

        return OverHttp()
    raise TracingUnavailable(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; takes grpc or http/protobuf")


class OpenTelemetryTraces:
    """Traces by OpenTelemetry.

    Args:
        provider: Makes spans and sends them.
    """

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("sojourn.inference")

    def call(self, metadata: Metadata) -> CallTrace:
        """A span of the call, below the caller's."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        service, method = METHOD.split("/")
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        span = self._tracer.start_span(
            METHOD,
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": method},
        )
        return _OpenTelemetryCall(self._tracer, span)

    def close(self) -> None:
        """Sends what has not been sent, and ends the sender."""
        self._provider.shutdown()


class _OpenTelemetryCall:
    """The spans of one call."""

    def __init__(self, tracer: "Tracer", span: "Span") -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer, self._span = tracer, span
        self._below = set_span_in_context(span)
        self._stage: Span | None = None

    @property
    def exemplar(self) -> dict[str, str] | None:
        """The trace's id, where it is kept."""
        context = self._span.get_span_context()
        return {"trace_id": f"{context.trace_id:032x}"} if context.trace_flags.sampled else None

    def describe(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def began(self, stage: str, *, at: float) -> None:
        self.paused(at=at)
        self._stage = self._tracer.start_span(stage, context=self._below, start_time=_nanoseconds(at))

    def stepped(self, step: int, *, steps: int, seconds: float, at: float) -> None:
        if self._stage is not None:
            attributes = {"sojourn.step": step, "sojourn.steps": steps, "sojourn.step_seconds": seconds}
            self._stage.add_event("step", attributes, timestamp=_nanoseconds(at))

    def paused(self, *, at: float) -> None:
        if self._stage is not None:
            self._stage.end(_nanoseconds(at))
            self._stage = None

    def ended(self, code: str, *, message: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        if self._stage is not None:
            self._stage.end()
            self._stage = None
        self._span.set_attribute("rpc.response.status_code", code)
        if code in FAULTS:
            self._span.set_status(Status(StatusCode.ERROR, message))
        self._span.end()


def _nanoseconds(seconds: float) -> int:
    return int(seconds * NANOSECONDS)
