"""Settings are judged when they are made."""

from pathlib import Path
from typing import Any

import pytest
from sojourn.inference.server.config import Address, ConfigError, ServerConfig

PEM = {"tls_cert": Path("cert.pem"), "tls_key": Path("key.pem")}


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:50051", "127.0.0.1", 50051), ("[::1]:0", "::1", 0), ("localhost:1", "localhost", 1)],
)
def test_addresses_are_read_and_written(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, str(address)) == (host, port, text)


@pytest.mark.parametrize("text", ["", "50051", ":50051", "host", "host:", "host:x", "host:65536", "::1:50051", "h:-1"])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        Address.parse(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "::ffff:127.0.0.1"])
def test_loopback_needs_no_tls(host: str) -> None:
    ServerConfig(listen=Address(host=host, port=1))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "::ffff:10.0.0.1"])
def test_other_addresses_need_tls_or_leave(host: str) -> None:
    listen = Address(host=host, port=1)
    with pytest.raises(ConfigError, match="TLS is off"):
        ServerConfig(listen=listen)
    ServerConfig(listen=listen, allow_insecure=True)
    ServerConfig(listen=listen, **PEM)


def test_default_listens_on_loopback() -> None:
    assert str(ServerConfig().listen) == "127.0.0.1:50051"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tls_cert": Path("c")}, "go together"),
        ({"tls_key": Path("k")}, "go together"),
        ({"client_ca": Path("ca")}, "needs tls_cert"),
        ({"max_waiting": -1}, "max_waiting is -1"),
        ({"grace_seconds": -1.0}, "grace_seconds is -1"),
        ({"failed_grace_seconds": float("nan")}, "failed_grace_seconds is nan"),
        ({"stall_seconds": 0.0}, "stall_seconds is 0"),
        ({"max_message_bytes": 0}, "max_message_bytes is 0"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ServerConfig(**settings)
