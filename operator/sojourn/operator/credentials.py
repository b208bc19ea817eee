"""How the operator may call the model of a service: in plain text, over TLS, with a token, or not at all."""

import base64
import binascii
from dataclasses import dataclass

from sojourn.operator.errors import ApiError
from sojourn.operator.kube.client import SECRETS, Kube
from sojourn.operator.resources.diffusion_service import TLS, Grpc, Token


@dataclass(frozen=True)
class Caller:
    """What it takes to call the model.

    Attributes:
        port: gRPC port of the pods.
        roots: certificates to trust as PEM; None for plain text.
        token: to send along; None for none.
        shut: why nothing can be asked, health included; empty if it can.
        unnamed: why only health can be asked, which needs no token; empty if all can.
    """

    port: int
    roots: bytes | None = None
    token: str | None = None
    shut: str = ""
    unnamed: str = ""


class _Unusable(Exception):
    """A Secret that does not help, with the reason for people."""


async def caller_of(kube: Kube, namespace: str, grpc: Grpc) -> Caller:
    """Reads what the service's Secrets hold, as far as the operator may.

    It may read Secrets only where the installation says so (operator.readServiceSecrets); else health is left to the
    kubelet's probe, and what needs a token is not asked.
    """
    roots, token, shut, unnamed = None, None, "", ""
    try:
        roots = await _roots(kube, namespace, grpc.tls) if grpc.tls else None
    except _Unusable as error:
        shut = str(error)
    try:
        token = await _token(kube, namespace, grpc.token) if grpc.token else None
    except _Unusable as error:
        unnamed = str(error)
    return Caller(grpc.port, roots, token, shut, unnamed)


async def _roots(kube: Kube, namespace: str, tls: TLS) -> bytes:
    if tls.client_ca == "Required":
        raise _Unusable("clients must show a certificate, and the operator has none")
    data = await _read(kube, namespace, tls.secret_name)
    found = [data[key] for key in ("ca.crt", "tls.crt") if data.get(key)]
    if not found:
        raise _Unusable(f"Secret {tls.secret_name} holds neither ca.crt nor tls.crt")
    return b"\n".join(found)


async def _token(kube: Kube, namespace: str, token: Token) -> str:
    data = await _read(kube, namespace, token.secret_name)
    lines = data.get(token.key, b"").decode(errors="replace").split()
    if not lines:
        raise _Unusable(f"Secret {token.secret_name} has no token under {token.key}")
    return lines[0]


async def _read(kube: Kube, namespace: str, name: str) -> dict[str, bytes]:
    try:
        body = await kube.get(SECRETS, namespace, name)
        return {key: base64.b64decode(value) for key, value in (body.get("data") or {}).items()}
    except ApiError as error:
        cure = "; set operator.readServiceSecrets in the operator's chart" if error.status == 403 else ""
        raise _Unusable(f"the operator cannot read Secret {name} ({error.reason}){cure}") from error
    except binascii.Error as error:
        raise _Unusable(f"Secret {name} is no base64") from error
