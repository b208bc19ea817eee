"""The operator asks a real inference server: in plain text, over TLS, with and without a token."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from sojourn.inference.errors import ModelError
from sojourn.inference.server.config import Address, ServerConfig
from sojourn.inference.server.engine import Engine
from sojourn.inference.server.main import Server
from sojourn.operator.credentials import Caller, caller_of
from sojourn.operator.kube.access import from_kubeconfig, open_session
from sojourn.operator.kube.client import SECRETS, Kube
from sojourn.operator.observe import summarise
from sojourn.operator.pods import Health, look
from sojourn.operator.resources.diffusion_service import Grpc

from tests.operator.certificates import Certificate, issue
from tests.operator.operators import account_kubeconfig
from tests.operator.served import Model

TOKEN = "s3cret"


def broken() -> Engine:
    raise ModelError("WeightsTruncated", Path("/models/a"), "a.safetensors is too short")


@asynccontextmanager
async def unloadable(**settings: Any) -> AsyncIterator[int]:
    """A server whose model cannot be loaded: it answers, and says so. Yields its port."""
    server = Server(ServerConfig(listen=Address(host="127.0.0.1", port=0), metrics_listen=None, **settings), broken)
    await server.start()
    try:
        await server.loaded()
        yield server.port
    finally:
        await server.stop(grace_seconds=0)


def pod(address: str = "127.0.0.1", name: str = "a", **metadata: str) -> dict[str, Any]:
    return {"metadata": {"name": name, **metadata}, "status": {"podIP": address}}


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return issue(tmp_path / "cert", x509.DNSName("demo.example.org"))


async def test_a_model_that_cannot_be_loaded_says_so_itself() -> None:
    async with unloadable() as port:
        (view,) = await look([pod()], Caller(port))
    assert view.health is Health.NOT_SERVING
    assert view.info
    assert "WeightsTruncated" in summarise([view]).health_message
    assert view.residency is None


async def test_tls_is_spoken_with_whom_the_secret_trusts_whatever_the_certificate_is_called(
    certificate: Certificate, tmp_path: Path
) -> None:
    async with unloadable(tls_cert=certificate.certificate, tls_key=certificate.key) as port:
        for trusted in (certificate.ca, certificate.certificate):
            (view,) = await look([pod()], Caller(port, roots=trusted.read_bytes()))
            assert view.health is Health.NOT_SERVING, trusted
        stranger = issue(tmp_path / "other", x509.DNSName("demo.example.org"))
        (view,) = await look([pod()], Caller(port, roots=stranger.ca.read_bytes()))
        assert view.health is Health.SILENT
        (view,) = await look([pod()], Caller(port))
        assert view.health is Health.SILENT


async def test_without_the_token_health_is_known_and_nothing_else(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN}\n")
    async with unloadable(token_file=tokens) as port:
        (named,) = await look([pod()], Caller(port, token=TOKEN))
        (wrong,) = await look([pod()], Caller(port, token="guess"))
        (unnamed,) = await look([pod()], Caller(port, unnamed="no right"))
    assert [view.health for view in (named, wrong, unnamed)] == [Health.NOT_SERVING] * 3
    assert [view.info is not None for view in (named, wrong, unnamed)] == [True, False, False]


async def test_who_may_not_be_asked_is_not_and_who_ends_is_left_out() -> None:
    (view,) = await look([pod(), pod(name="b", deletionTimestamp="now")], Caller(1, shut="no right"))
    assert view.health is Health.UNASKED
    addressless = {"metadata": {"name": "a"}, "status": {}}
    (view,) = await look([addressless], Caller(1))
    assert view.health is Health.SILENT


async def test_a_served_model_tells_everything(model: Model) -> None:
    (view,) = await look([pod(model.address)], Caller(50051))
    assert view.residency
    told = summarise([view])
    assert (told.serving, told.visible, told.model, told.family) == ("True", True, "h3-digits", "minimax-h3")
    assert told.adaln
    assert [space.name for space in told.spaces] == ["host"]
    assert told.residency
    assert "transformer" in [row.component for row in told.residency.components]


def secret(namespace: str, name: str, **data: bytes) -> dict[str, Any]:
    encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
    return {"metadata": {"name": name, "namespace": namespace}, "data": encoded}


TLS_SPEC = {"tls": {"secretName": "cert"}}
TOKEN_SPEC = {"token": {"secretName": "tokens"}}


async def test_secrets_are_read_as_the_spec_names_them(kube: Kube, namespace: str) -> None:
    await kube.create(SECRETS, secret(namespace, "cert", **{"tls.crt": b"one", "ca.crt": b"two", "tls.key": b"three"}))
    await kube.create(SECRETS, secret(namespace, "tokens", tokens=b"first\nsecond\n"))
    caller = await caller_of(kube, namespace, Grpc.model_validate({**TLS_SPEC, **TOKEN_SPEC, "port": 5000}))
    assert caller == Caller(5000, b"two\none", "first")
    assert await caller_of(kube, namespace, Grpc()) == Caller(50051)


async def test_what_hinders_is_said(kube: Kube, namespace: str, kubeconfig: Path, tmp_path: Path) -> None:
    missing = await caller_of(kube, namespace, Grpc.model_validate({**TLS_SPEC, **TOKEN_SPEC}))
    assert "Secret cert (NotFound)" in missing.shut
    assert "Secret tokens (NotFound)" in missing.unnamed
    await kube.create(SECRETS, secret(namespace, "cert", other=b"x"))
    await kube.create(SECRETS, secret(namespace, "tokens", other=b"x"))
    empty = await caller_of(kube, namespace, Grpc.model_validate({**TLS_SPEC, **TOKEN_SPEC}))
    assert "neither ca.crt nor tls.crt" in empty.shut
    assert "no token under tokens" in empty.unnamed
    mutual = Grpc.model_validate({"tls": {"secretName": "cert", "clientCa": "Required"}})
    assert "the operator has none" in (await caller_of(kube, namespace, mutual)).shut
    for sets, may in (((), False), (("operator.readServiceSecrets=true",), True)):
        access = from_kubeconfig(await account_kubeconfig(kubeconfig, namespace, tmp_path / f"account{may}", *sets))
        async with open_session(access) as session:
            caller = await caller_of(Kube(session, access.server), namespace, Grpc.model_validate(TLS_SPEC))
        assert ("readServiceSecrets" in caller.shut) is not may
