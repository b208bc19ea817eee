"""Where the API server is and how to prove who one is: in a pod, or by a kubeconfig."""

import base64
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from sojourn.operator.errors import BadConfiguration

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# kopf's watches and our own calls share it. Without a limit 500 first passes open 500 connections, and their memory
# is never given back (156 against 55 MiB).
MAX_CONNECTIONS = 24


@dataclass(frozen=True)
class Access:
    """How to reach one API server.

    Attributes:
        server: address with scheme and port.
        ca: certificate authority as PEM; None trusts the machine's.
        token: bearer token, or
        token_file: file to read it from at every request, since it is rotated.
        client_certificate: certificate and key as PEM.
    """

    server: str
    ca: str | None = None
    token: str | None = None
    token_file: Path | None = None
    client_certificate: tuple[str, str] | None = None

    def bearer(self) -> str | None:
        """The token to send now."""
        return self.token_file.read_text().strip() if self.token_file else self.token


def find(environ: Mapping[str, str], service_account: Path = SERVICE_ACCOUNT) -> Access:
    """KUBECONFIG where it is set, else the pod's service account.

    Raises:
        BadConfiguration: neither is there.
    """
    if path := environ.get("KUBECONFIG"):
        return from_kubeconfig(Path(path))
    if (host := environ.get("KUBERNETES_SERVICE_HOST")) and (service_account / "token").exists():
        host = f"[{host}]" if ":" in host else host
        return Access(
            server=f"https://{host}:{environ.get('KUBERNETES_SERVICE_PORT', '443')}",
            ca=(service_account / "ca.crt").read_text(),
            token_file=service_account / "token",
        )
    raise BadConfiguration("no API server: set KUBECONFIG, or run in a pod with a service account token")


def from_kubeconfig(path: Path) -> Access:
    """The current context of a kubeconfig file. Programs that fetch tokens (exec) are not run.

    Raises:
        BadConfiguration: the file lacks something.
    """
    try:
        config = yaml.safe_load(path.read_text())
        context = _named(config["contexts"], config["current-context"])["context"]
        cluster = _named(config["clusters"], context["cluster"])["cluster"]
        user = _named(config["users"], context["user"])["user"]
        server = str(cluster["server"]).rstrip("/")
    except (OSError, KeyError, TypeError, StopIteration, yaml.YAMLError) as error:
        raise BadConfiguration(f"{path} is no usable kubeconfig: {error!r}") from error
    certificate, key = _pem(user, "client-certificate"), _pem(user, "client-key")
    return Access(
        server=server,
        ca=_pem(cluster, "certificate-authority"),
        token=user.get("token"),
        token_file=Path(user["tokenFile"]) if "tokenFile" in user else None,
        client_certificate=(certificate, key) if certificate and key else None,
    )


def _named(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(item for item in items if item["name"] == name)


def _pem(holder: Mapping[str, Any], key: str) -> str | None:
    if f"{key}-data" in holder:
        return base64.b64decode(holder[f"{key}-data"]).decode()
    return Path(holder[key]).read_text() if key in holder else None


def open_connector(access: Access) -> aiohttp.TCPConnector:
    """Connections to the API server, to be shared by sessions. Needs a running event loop."""
    return aiohttp.TCPConnector(limit=MAX_CONNECTIONS, ssl=_tls(access))


def open_session(
    access: Access, connector: aiohttp.TCPConnector | None = None, *, request_timeout_seconds: float = 30
) -> aiohttp.ClientSession:
    """A session that proves who it is. kopf sets longer timeouts of its own for watches.

    Args:
        access: where and who.
        connector: connections that outlive the session; None for ones of its own.
        request_timeout_seconds: for a whole request.
    """

    async def authorise(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        if bearer := access.bearer():
            request.headers["Authorization"] = f"Bearer {bearer}"
        return await handler(request)

    return aiohttp.ClientSession(
        connector=connector or open_connector(access),
        connector_owner=connector is None,
        timeout=aiohttp.ClientTimeout(total=request_timeout_seconds),
        headers={"User-Agent": "sojourn-operator"},
        middlewares=(authorise,),
    )


def _tls(access: Access) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=access.ca)
    if access.client_certificate:
        # The standard library loads client certificates from files only.
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as both:
            both.write("\n".join(access.client_certificate))
            both.flush()
            context.load_cert_chain(both.name)
    return context
