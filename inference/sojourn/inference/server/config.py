"""What can be set of a server, judged at construction."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path


class ConfigError(ValueError):
    """The configuration cannot be served; the message says which value and what to change."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where to listen: a host and a port, 0 for any free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Reads `host:port`, with an IPv6 host in brackets.

        Raises:
            ConfigError: It is neither.
        """
        host, colon, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if not colon or not host or (":" in host and not bracketed) or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"{text!r} is no address; takes host:port, such as 127.0.0.1:50051 or [::1]:50051")
        return cls(host=host.strip("[]"), port=int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. A name other than localhost may resolve to anything."""
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return self.host == "localhost"
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of a server.

    Attributes:
        model_name: What GetInfo and metrics call the model until it is loaded.
        listen: Address of the gRPC port. Without TLS it must be a loopback address, unless `allow_insecure`.
        metrics_listen: Address of the Prometheus exporter, which is plain HTTP; None for no exporter.
        allow_insecure: Take a non-loopback `listen` without TLS, for instance behind a mesh that encrypts.
        max_waiting: Places in the queue beside the running request.
        max_message_bytes: Largest request taken; a larger one gets RESOURCE_EXHAUSTED from gRPC itself.
        stall_seconds: A reader that takes nothing for so long loses its call.
        grace_seconds: How long a running request may go on after SIGTERM.
        failed_grace_seconds: How long a process whose model failed to load stays up to be asked why.
        tls_cert, tls_key: PEM files; TLS is on when they are given, always together.
        client_ca: PEM file; with it clients must show a certificate that it has signed.
        token_file: Bearer tokens, one a line; without it callers need none.
    """

    model_name: str = ""
    listen: Address = Address(host="127.0.0.1", port=50051)
    metrics_listen: Address | None = Address(host="127.0.0.1", port=9464)
    allow_insecure: bool = False
    max_waiting: int = 16
    max_message_bytes: int = 256 * 2**20
    stall_seconds: float = 60.0
    grace_seconds: float = 25.0
    failed_grace_seconds: float = 30.0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    token_file: Path | None = None

    def __post_init__(self) -> None:
        """Judges the values together.

        Raises:
            ConfigError: With the value at fault.
        """
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key go together; one of them is missing")
        if self.client_ca is not None and self.tls_cert is None:
            raise ConfigError("client_ca needs tls_cert and tls_key")
        if self.tls_cert is None and not self.listen.is_loopback and not self.allow_insecure:
            raise ConfigError(
                f"{self.listen} can be reached from other machines and TLS is off; give tls_cert and tls_key, "
                "listen on 127.0.0.1, or allow it with allow_insecure"
            )
        self._judge_numbers()

    def _judge_numbers(self) -> None:
        for name, low in (
            ("max_waiting", 0),
            ("max_message_bytes", 1),
            ("stall_seconds", 0.001),
            ("grace_seconds", 0),
            ("failed_grace_seconds", 0),
        ):
            if not getattr(self, name) >= low:
                raise ConfigError(f"{name} is {getattr(self, name)}; takes {low:g} or more")
