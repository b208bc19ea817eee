"""How the operator may call the model of a service: in plain text, over TLS, with a certificate or a token, or not."""

import base64
import binascii
from dataclasses import dataclass

from sojourn.operator.certificate import ClientCertificate
from sojourn.operator.errors import ApiError, BadConfiguration
from sojourn.operator.kube.client import SECRETS, Kube
from sojourn.operator.resources.diffusion_service import TLS, Grpc, Token


@dataclass(frozen=True)
class Caller:
    """What it takes to call the model.

    Attributes:
        port: gRPC port of the pods.
        roots: certificates to trust as PEM; None for plain text.
        certificate: to show to a model that demands one; None for none.
        token: to send along; None for none.
        shut: why nothing can be asked, health included; empty if it can.
        unnamed: why only health can be asked, which needs no token; empty if all can.
    """

    port: int
    roots: bytes | None = None
    token: str | None = None
    certificate: ClientCertificate | None = None
    shut: str = ""
    unnamed: str = ""


class _Unusable(Exception):
    """A Secret that does not help, with the reason for people."""


async def caller_of(kube: Kube, namespace: str, grpc: Grpc, own: ClientCertificate | None = None) -> Caller:
    """Reads what the service's Secrets hold, as far as the operator may.

    It may read Secrets only where the installation says so (operator.readServiceSecrets); else it trusts the authority
    that comes with its `own` certificate. Where there is neither, health is left to the kubelet's probe; what needs a
    token that it may not read is not asked.
    """
    roots, certificate, token, shut, unnamed = None, None, None, "", ""
    try:
        if grpc.tls:
            certificate = _shown(grpc.tls, own)
            roots = await _roots(kube, namespace, grpc.tls, own)
    except _Unusable as error:
        shut = str(error)
    try:
        token = await _token(kube, namespace, grpc.token) if grpc.token else None
    except _Unusable as error:
        unnamed = str(error)
    return Caller(grpc.port, roots, token, certificate, shut, unnamed)


def _shown(tls: TLS, own: ClientCertificate | None) -> ClientCertificate | None:
    """The certificate to show, to models only that demand one."""
    if tls.client_ca != "Required":
        return None
    if own is None:
        raise _Unusable(
            "clients must show a certificate, and the operator has none; set operator.clientCertificate.secretName in "
            "the operator's chart"
        )
    try:
        own.check()
    except BadConfiguration as error:
        raise _Unusable(str(error)) from error
    return own


async def _roots(kube: Kube, namespace: str, tls: TLS, own: ClientCertificate | None) -> bytes:
    """Whom to trust: the service's Secret says it; where it cannot be read, the operator's own authority."""
    try:
        data = await _read(kube, namespace, tls.secret_name)
    except _Unusable:
        if own is None or (authority := own.authority()) is None:
            raise
        return authority
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
