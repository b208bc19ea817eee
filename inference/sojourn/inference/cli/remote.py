"""The client side of InferenceService for the command line."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from sojourn.inference.cli.exits import CommandFailed, Exit
from sojourn.v1 import inference_pb2 as pb
from sojourn.v1 import inference_pb2_grpc as rpc


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where a server is and how to be let in.

    Attributes:
        address: host:port.
        tls_ca: Certificates that the server's must be signed by; None for a plain connection.
        tls_cert, tls_key: The client's own pair, for servers that ask for one.
        token: Bearer token; sent only over TLS, or to a loopback address.
    """

    address: str
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token: str | None = None

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """A channel to it, closed at the end."""
        with self._open() as channel:
            yield channel

    def _open(self) -> grpc.Channel:
        if self.tls_ca is None:
            return grpc.insecure_channel(self.address)
        credentials = grpc.ssl_channel_credentials(
            self.tls_ca.read_bytes(),
            self.tls_key.read_bytes() if self.tls_key else None,
            self.tls_cert.read_bytes() if self.tls_cert else None,
        )
        return grpc.secure_channel(self.address, credentials)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of a call to it."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


@contextmanager
def stream(
    server: Server, request: pb.GenerateRequest, timeout: float | None
) -> Iterator[Iterator[pb.GenerateResponse]]:
    """The responses to `request`; leaving the context cancels what still runs.

    Args:
        server: Whom to ask.
        request: What for.
        timeout: Deadline of the call in seconds; None for none.

    Raises:
        CommandFailed: The server refused or failed; the message is the server's.
    """
    with server.channel() as channel:
        call = rpc.InferenceServiceStub(channel).Generate(request, timeout=timeout, metadata=server.metadata())
        try:
            yield call
        except grpc.RpcError as error:
            raise failure(server, error) from None
        finally:
            call.cancel()


def failure(server: Server, error: grpc.RpcError) -> CommandFailed:
    """One line for what a server answered instead of a result."""
    code, details = error.code(), error.details()
    return CommandFailed(f"{server.address}: {code.name}: {details}", Exit.of_code(code))
