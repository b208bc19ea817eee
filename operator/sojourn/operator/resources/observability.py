"""What the processes of a service tell besides metrics: log lines and traces."""

from typing import Annotated, Literal

from pydantic import Field
from sojourn.operator.resources.base import Model, ObjectName, SecretKey
from sojourn.operator.resources.peer import Peer

# The port has to be there: the NetworkPolicy lets the pods out to it alone.
Endpoint = Annotated[
    str,
    Field(max_length=512, pattern=r"^https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}(/[^\s]*)?$"),
]


class Logging(Model):
    """Log lines of both processes, on standard error."""

    level: Literal["Debug", "Info", "Warning", "Error"] = Field(
        default="Info", description="Lowest level that is printed; lower ones are still counted."
    )
    format: Literal["JSON", "Text"] = Field(default="JSON", description="JSON, or lines for people.")


class TracingHeaders(Model):
    """Headers of every export, such as a collector's credentials."""

    secret_name: ObjectName = Field(description="Secret that holds them.")
    key: SecretKey = Field(
        default="headers", description="Key in the Secret; its value is NAME=VALUE, several separated by commas."
    )


class Tracing(Model):
    """Where traces go, by the environment variables of OpenTelemetry."""

    endpoint: Endpoint = Field(
        description="Address of an OTLP collector with its port, such as http://collector.tracing:4318. The port is "
        "that of the collector's pods too: the pods' NetworkPolicy opens it, and DNS."
    )
    protocol: Literal["HTTP", "GRPC"] = Field(default="HTTP", description="HTTP: protobuf over HTTP.")
    sample_percent: Annotated[int, Field(ge=0, le=100)] = Field(
        default=100, description="Calls that are traced, of those whose caller does not decide."
    )
    headers: TracingHeaders | None = Field(default=None, description="Left out: none.")
    collector: Peer | None = Field(
        default=None, description="Pods of the collector, to open the NetworkPolicy to them alone. Left out: to all."
    )
