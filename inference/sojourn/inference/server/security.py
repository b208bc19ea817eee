"""Who may call: TLS, client certificates, bearer tokens.

Health stays open, as probes bring no token; everything else, reflection and GetInfo too, asks for one.
"""

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from sojourn.inference.server.config import ConfigError, ServerConfig

_logger = logging.getLogger(__name__)

_HEALTH_PREFIX = f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/"
_SCHEME = "bearer "

# What tells a changed file: time, size, and the inode, which changes when a Kubernetes secret swaps its symlink.
_Stamp = tuple[int, int, int]

# Generic in the stubs, not at run time.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """The credentials of the port; None without TLS.

    Raises:
        ConfigError: A file cannot be read.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    pair = (_read(config.tls_key, "tls_key"), _read(config.tls_cert, "tls_cert"))
    client_ca = _read(config.client_ca, "client_ca") if config.client_ca is not None else None
    return grpc.ssl_server_credentials([pair], root_certificates=client_ca, require_client_auth=client_ca is not None)


def _read(path: Path, setting: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting} {path} cannot be read: {error.strerror}") from error
    if b"-----BEGIN" not in data:
        raise ConfigError(f"{setting} {path} is no PEM file")
    return data


class Tokens:
    """Bearer tokens of a file: one a line, blank lines and lines that begin with # left out.

    Read again whenever the file has changed. An empty file refuses everybody; so does one that can no longer be read.

    Raises:
        ConfigError: The file cannot be read at the start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: _Stamp | None = None
        self._digests: tuple[bytes, ...] = ()
        self._readable = True
        try:
            self._refresh()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"token_file {path} cannot be read: {error}") from error

    def accept(self, token: str) -> bool:
        """Whether the token is one of the file's; takes as long for any of them as for none."""
        try:
            self._refresh()
        except (OSError, UnicodeDecodeError) as error:
            self._close(error)
        digest = _digest(token)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)

    def _refresh(self) -> None:
        stat = self._path.stat()
        stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if stamp == self._stamp:
            return
        lines = (line.strip() for line in self._path.read_text(encoding="utf-8").splitlines())
        self._digests = tuple(_digest(line) for line in lines if line and not line.startswith("#"))
        self._stamp, self._readable = stamp, True

    def _close(self, error: Exception) -> None:
        self._digests, self._stamp = (), None
        if self._readable:  # once for each change of state
            _logger.warning(
                "the token file cannot be read any more; every call is refused", extra={"error": str(error)}
            )
        self._readable = False


def _digest(token: str) -> bytes:
    """Equal lengths, so that comparing tells nothing of a token's length."""
    return hashlib.sha256(token.encode()).digest()


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid token.

    Args:
        tokens: The valid ones.
        refused: Called at each refusal.
    """

    def __init__(self, tokens: Tokens, *, refused: Callable[[], None]) -> None:
        self._tokens = tokens
        self._refused = refused

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Lets the call through, or answers UNAUTHENTICATED in its place."""
        handler = await continuation(details)
        if details.method.startswith(_HEALTH_PREFIX) or self._accepts(details):
            return handler
        self._refused()
        return _refusing(handler)

    def _accepts(self, details: grpc.HandlerCallDetails) -> bool:
        for name, value in details.invocation_metadata or ():
            if name == "authorization" and isinstance(value, str) and value.lower().startswith(_SCHEME):
                return self._tokens.accept(value[len(_SCHEME) :].strip())
        return False


def _refusing(handler: "Handler | None") -> Handler:
    """A handler of the same kind as `handler` that refuses; a method that is not there has none."""

    async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        text = "a valid bearer token is required: send metadata authorization: Bearer <token>"
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)

    streams = (bool(handler and handler.request_streaming), bool(handler and handler.response_streaming))
    make: Callable[..., Handler] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[streams]
    return make(refuse)
