"""Clients that must be refused, and those that must not."""

import datetime
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from sojourn.inference.pipeline import Pipeline
from sojourn.inference.server.config import ConfigError
from sojourn.inference.server.security import Tokens

from tests.inference.server.serving import Client, Served, request, serving

UNAUTHENTICATED, UNAVAILABLE = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE


@dataclass
class Authority:
    """Signs certificates for tests, of servers that are called by these names."""

    folder: Path
    name: str
    hosts: tuple[str, ...] = ("localhost",)

    def __post_init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign(self.name, self._key.public_key(), ca=True)
        self.path = self._write(f"{self.name}.pem", self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str) -> tuple[Path, Path]:
        """Paths of a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(name, key.public_key(), ca=False)
        pem = serialization.Encoding.PEM
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return (
            self._write(f"{self.name}-{name}.pem", certificate.public_bytes(pem)),
            self._write(f"{self.name}-{name}.key", private),
        )

    def _sign(self, name: str, public_key: Any, *, ca: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)])
        alternatives = [*map(x509.DNSName, self.hosts), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def _write(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(data)
        return path


def bearer(token: str, scheme: str = "Bearer") -> dict[str, Any]:
    return {"metadata": (("authorization", f"{scheme} {token}"),)}


async def code_of(call: Any) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def secure_code(served: Served, **credentials: Any) -> grpc.StatusCode:
    channel_credentials = grpc.ssl_channel_credentials(**credentials)
    async with grpc.aio.secure_channel(served.target, channel_credentials) as channel:
        return await code_of(Client(channel).info(timeout=5))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


async def test_tls_refuses_plain_and_foreign_clients(pipeline: Pipeline, authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("server")
    other = Authority(tmp_path, "other")
    async with serving(pipeline, tls_cert=cert, tls_key=key) as served:
        assert await secure_code(served, root_certificates=authority.path.read_bytes()) is grpc.StatusCode.OK
        assert await secure_code(served, root_certificates=other.path.read_bytes()) is UNAVAILABLE
        assert await code_of(served.client.info(timeout=5)) is UNAVAILABLE


async def test_mutual_tls_refuses_clients_without_our_certificate(
    pipeline: Pipeline, authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.issue("server")
    other = Authority(tmp_path, "other")

    def client(signer: Authority) -> dict[str, bytes]:
        chain, private = signer.issue("client")
        return {"certificate_chain": chain.read_bytes(), "private_key": private.read_bytes()}

    root = {"root_certificates": authority.path.read_bytes()}
    async with serving(pipeline, tls_cert=cert, tls_key=key, client_ca=authority.path) as served:
        assert await secure_code(served, **root, **client(authority)) is grpc.StatusCode.OK
        assert await secure_code(served, **root) is UNAVAILABLE
        assert await secure_code(served, **root, **client(other)) is UNAVAILABLE


@pytest.mark.parametrize("setting", ["tls_cert", "tls_key", "client_ca"])
async def test_unreadable_tls_file_is_a_start_error(
    pipeline: Pipeline, authority: Authority, tmp_path: Path, setting: str
) -> None:
    cert, key = authority.issue("server")
    settings = {"tls_cert": cert, "tls_key": key, "client_ca": authority.path}
    for bad in (tmp_path / "absent.pem", tmp_path / "empty.pem"):
        (tmp_path / "empty.pem").touch()
        with pytest.raises(ConfigError, match=f"{setting}.*{bad.name}"):
            async with serving(pipeline, **(settings | {setting: bad})):
                pass


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("# first\nalpha\n\n  beta  \n#gamma\n")
    return path


async def test_calls_without_a_valid_token_are_refused(pipeline: Pipeline, tokens: Path) -> None:
    async with serving(pipeline, token_file=tokens) as served:
        for options in (bearer("alpha"), bearer("beta"), bearer("alpha", "bearer")):
            assert await code_of(served.client.info(**options)) is grpc.StatusCode.OK
        wrong = [bearer(token) for token in ("", "alph", "alphaa", "gamma", "#gamma", "# first")]
        refused = [{}, *wrong, bearer("alpha", "Basic"), {"metadata": (("authorization", "alpha"),)}]
        for options in refused:
            assert await code_of(served.client.info(**options)) is UNAUTHENTICATED, options
        assert (await served.client.error(request())).code() is UNAUTHENTICATED
        assert (await served.client.generate(request(), **bearer("beta"))).completed is not None
        count = len(refused) + 1
        assert served.sample("requests_refused_total", reason="unauthenticated") == count
        assert served.sample("requests_total", workflow="unknown", code="UNAUTHENTICATED") == count


async def test_health_stays_open_and_reflection_does_not(pipeline: Pipeline, tokens: Path) -> None:
    async with serving(pipeline, token_file=tokens) as served:
        health = health_pb2_grpc.HealthStub(served.client.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(served.client.channel)
        ask = [reflection_pb2.ServerReflectionRequest(list_services="")]
        assert await code_of(anext(aiter(stub.ServerReflectionInfo(ask)))) is UNAUTHENTICATED
        assert await code_of(anext(aiter(stub.ServerReflectionInfo(ask, **bearer("alpha"))))) is grpc.StatusCode.OK


async def test_unknown_method_is_refused_without_a_token(pipeline: Pipeline, tokens: Path) -> None:
    async with serving(pipeline, token_file=tokens) as served:
        call = served.client.channel.unary_unary("/sojourn.v1.InferenceService/Nothing")
        assert await code_of(call(b"")) is UNAUTHENTICATED
        assert await code_of(call(b"", **bearer("alpha"))) is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text("gamma\n"),
        lambda path: (path.with_suffix(".new").write_text("gamma\n"), path.with_suffix(".new").replace(path)),
    ],
    ids=["written", "renamed"],
)
async def test_tokens_are_read_again_on_change(pipeline: Pipeline, tokens: Path, change: Callable[[Path], Any]) -> None:
    async with serving(pipeline, token_file=tokens) as served:
        assert await code_of(served.client.info(**bearer("alpha"))) is grpc.StatusCode.OK
        change(tokens)
        assert await code_of(served.client.info(**bearer("alpha"))) is UNAUTHENTICATED
        assert await code_of(served.client.info(**bearer("gamma"))) is grpc.StatusCode.OK


def test_empty_file_refuses_everybody(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# none\n\n")
    assert not any(Tokens(path).accept(token) for token in ("", "# none", "none"))


def test_file_that_goes_missing_refuses_everybody_and_warns_once(
    tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = Tokens(tokens)
    text = tokens.read_text()
    tokens.unlink()
    assert not known.accept("alpha")
    assert not known.accept("alpha")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    tokens.write_text(text)
    assert known.accept("alpha")


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_file_that_cannot_be_read_is_a_start_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokens"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="token_file"):
        Tokens(path)


async def test_tokens_and_tls_go_together(pipeline: Pipeline, authority: Authority, tokens: Path) -> None:
    cert, key = authority.issue("server")
    async with serving(pipeline, tls_cert=cert, tls_key=key, token_file=tokens) as served:
        credentials = grpc.ssl_channel_credentials(authority.path.read_bytes())
        async with grpc.aio.secure_channel(served.target, credentials) as channel:
            assert await code_of(Client(channel).info(timeout=5)) is UNAUTHENTICATED
            assert await code_of(Client(channel).info(timeout=5, **bearer("alpha"))) is grpc.StatusCode.OK
