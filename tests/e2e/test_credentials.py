"""TLS with client certificates and bearer tokens, from Secrets, on a node: for clients, and for the operator."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import Client
from tests.e2e.conftest import install
from tests.e2e.node import PORT, STUDIO, SYSTEM, Object, apply, condition, get, kubectl, patch, ready, until
from tests.inference.server.test_security import Authority

pytestmark = pytest.mark.timeout(600)
HOST = f"dsvc-guarded.{STUDIO}.svc.cluster.local"
TOKEN = "for-tests-only-0123456789abcdef"


def secret(name: str, kind: str, **data: str) -> Object:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "type": kind, "stringData": data}


def service() -> Object:
    return {
        "apiVersion": "sojourn.dev/v1alpha1",
        "kind": "DiffusionService",
        "metadata": {"name": "guarded"},
        "spec": {
            "model": {"builtIn": {}},
            "device": "CPU",
            "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}},
            "sharedHostMemory": {"size": "64Mi"},
            "grpc": {
                "tls": {"secretName": "guarded-tls", "clientCa": "Required"},
                "token": {"secretName": "guarded-tokens"},
            },
        },
    }


@pytest.fixture(scope="module")
def credentials(installed: None, neighbour: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A guarded service, and a client with a certificate and a token in /tmp."""
    authority = Authority(tmp_path_factory.mktemp("authority"), "authority", (HOST,))
    certificate, key = authority.issue("server")
    pem = {"tls.crt": certificate.read_text(), "tls.key": key.read_text(), "ca.crt": authority.path.read_text()}
    tls, tokens = secret("guarded-tls", "kubernetes.io/tls", **pem), secret("guarded-tokens", "Opaque", tokens=TOKEN)
    apply(tls, tokens, service(), namespace=STUDIO)
    for path, source in (("ca.pem", authority.path), ("client.pem", certificate), ("client.key", key)):
        neighbour.write(f"/tmp/{path}", Path(source).read_text())
    neighbour.write("/tmp/token", TOKEN)
    neighbour.write("/tmp/other", TOKEN[::-1])
    operators = {"tls.crt": certificate.read_text(), "tls.key": key.read_text(), "ca.crt": authority.path.read_text()}
    apply(secret("operator-client", "kubernetes.io/tls", **operators), namespace=SYSTEM)
    ready(STUDIO, "guarded")
    yield neighbour
    kubectl("-n", STUDIO, "delete", "dsvc", "guarded", "--timeout=120s")
    kubectl("-n", STUDIO, "delete", "secret", "guarded-tls", "guarded-tokens")


CERTIFICATE = ("--tls-ca", "/tmp/ca.pem", "--tls-cert", "/tmp/client.pem", "--tls-key", "/tmp/client.key")
REFUSED = {
    "plain text": ((), "UNAVAILABLE"),
    "no certificate of the client": (("--tls-ca", "/tmp/ca.pem", "--token-file", "/tmp/token"), "UNAVAILABLE"),
    "no token": (CERTIFICATE, "UNAUTHENTICATED"),
    "another token": ((*CERTIFICATE, "--token-file", "/tmp/other"), "UNAUTHENTICATED"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_client_without_its_credentials_is_refused(credentials: Client, case: str) -> None:
    options, code = REFUSED[case]
    assert code in credentials.generate(f"{HOST}:{PORT}", *options, "--timeout", "10", check=False)


def test_a_client_with_certificate_and_token_is_served(credentials: Client) -> None:
    made = json.loads(credentials.generate(f"{HOST}:{PORT}", *CERTIFICATE, "--token-file", "/tmp/token"))
    assert made["files"]


def why_not_asked() -> str:
    """Why the operator does not ask the model itself; empty where it does."""
    said = condition(get(STUDIO, "dsvc", "guarded"), "ResidencyVisible")["message"]
    return str(said.partition("the model itself is not asked: ")[2])


def test_an_operator_without_a_certificate_leaves_health_to_the_probe_and_says_so(credentials: Client) -> None:
    until(lambda: "clients must show a certificate" in why_not_asked(), 60, "why it is not asked")
    ready(STUDIO, "guarded")


def test_an_operator_with_a_certificate_asks_the_model_itself_and_may_read_no_secret(credentials: Client) -> None:
    install("charts/sojourn", "--set", "operator.clientCertificate.secretName=operator-client")
    try:
        until(lambda: "Secret guarded-tokens (Forbidden)" in why_not_asked(), 90, "only the token is missing")
        patch(STUDIO, "dsvc", "guarded", grpc={"token": None})
        until(lambda: not why_not_asked(), 180, "asked")
        ready(STUDIO, "guarded")
        until(lambda: get(STUDIO, "dsvc", "guarded")["status"].get("family") == "minimax-h3", 60, "what GetInfo knows")
        account = f"system:serviceaccount:{SYSTEM}:sojourn-operator"
        for namespace in (SYSTEM, STUDIO):
            assert kubectl("auth", "can-i", "get", "secrets", "-n", namespace, "--as", account, check=False) == "no\n"
    finally:
        install()
