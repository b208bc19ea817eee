"""The operator asks models that demand a certificate of their clients, with one of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from sojourn.operator.certificate import ClientCertificate
from sojourn.operator.credentials import Caller, caller_of
from sojourn.operator.errors import BadConfiguration
from sojourn.operator.kube.client import SECRETS, Kube
from sojourn.operator.pods import Health, look
from sojourn.operator.resources.diffusion_service import Grpc

from tests.operator.certificates import Certificate, issue
from tests.operator.test_pods import pod, secret, unloadable

MUTUAL = Grpc.model_validate({"tls": {"secretName": "cert", "clientCa": "Required"}})
ONE_SIDED = Grpc.model_validate({"tls": {"secretName": "cert"}})


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return issue(tmp_path / "cert", x509.DNSName("demo.example.org"))


@pytest.fixture
def stranger(tmp_path: Path) -> Certificate:
    return issue(tmp_path / "other", x509.DNSName("demo.example.org"))


async def test_who_shows_the_right_certificate_is_answered(certificate: Certificate, stranger: Certificate) -> None:
    """NOT_SERVING is an answer: that model cannot be loaded. Whom it does not know it leaves in silence."""
    given = {"tls_cert": certificate.certificate, "tls_key": certificate.key, "client_ca": certificate.ca}
    found = {}
    async with unloadable(**given) as port:
        for name, own in {"ours": certificate, "another's": stranger, "none": None}.items():
            shown = ClientCertificate(own.folder) if own else None
            (view,) = await look([pod()], Caller(port, certificate.ca.read_bytes(), certificate=shown))
            found[name] = view.health, view.info is not None
    silent = (Health.SILENT, False)
    assert found == {"ours": (Health.NOT_SERVING, True), "another's": silent, "none": silent}


async def test_a_certificate_is_taken_anew_when_its_files_change(
    certificate: Certificate, stranger: Certificate
) -> None:
    """As the kubelet replaces them."""
    given = {"tls_cert": certificate.certificate, "tls_key": certificate.key, "client_ca": certificate.ca}
    trusted, own = certificate.ca.read_bytes(), ClientCertificate(stranger.folder)
    async with unloadable(**given) as port:
        (before,) = await look([pod()], Caller(port, trusted, certificate=own))
        for source, target in ((certificate.certificate, own.chain), (certificate.key, own.key)):
            target.write_bytes(source.read_bytes())
        (after,) = await look([pod()], Caller(port, trusted, certificate=own))
    assert (before.health, after.health) == (Health.SILENT, Health.NOT_SERVING)


async def test_it_is_shown_to_those_only_that_demand_it_and_its_authority_stands_in_for_a_secret(
    kube: Kube, namespace: str, certificate: Certificate
) -> None:
    own, authority = ClientCertificate(certificate.folder), certificate.ca.read_bytes()
    assert await caller_of(kube, namespace, MUTUAL, own) == Caller(50051, authority, certificate=own)
    assert await caller_of(kube, namespace, ONE_SIDED, own) == Caller(50051, authority)
    await kube.create(SECRETS, secret(namespace, "cert", **{"ca.crt": b"theirs"}))
    assert await caller_of(kube, namespace, MUTUAL, own) == Caller(50051, b"theirs", certificate=own)
    certificate.key.unlink()
    assert "tls.key" in (await caller_of(kube, namespace, MUTUAL, own)).shut
    assert "clientCertificate.secretName" in (await caller_of(kube, namespace, MUTUAL)).shut


@pytest.mark.parametrize("spoil", ["missing", "key of another", "no certificate", "no authority"])
def test_a_certificate_of_no_use_is_refused_at_start(
    certificate: Certificate, stranger: Certificate, tmp_path: Path, spoil: str
) -> None:
    ClientCertificate(certificate.folder).check()
    match spoil:
        case "missing":
            certificate.certificate.unlink()
        case "key of another":
            certificate.key.write_bytes(stranger.key.read_bytes())
        case "no certificate":
            certificate.certificate.write_text("hello")
        case "no authority":
            certificate.ca.write_text("hello")
    with pytest.raises(BadConfiguration, match=r"takes tls\.crt and its tls\.key"):
        ClientCertificate(certificate.folder).check()


def test_the_process_says_so_and_ends(tmp_path: Path) -> None:
    kubeconfig, defaults = tmp_path / "kubeconfig", tmp_path / "defaults.yaml"
    kubeconfig.write_text(
        '{"current-context":"a","clusters":[{"name":"a","cluster":{"server":"http://127.0.0.1:1"}}],'
        '"users":[{"name":"a","user":{}}],"contexts":[{"name":"a","context":{"cluster":"a","user":"a"}}]}'
    )
    defaults.write_text('{"inferenceImage": "a", "residencydImage": "b"}')
    command = [sys.executable, "-m", "sojourn.operator", "run", f"--defaults={defaults}", f"--chart={tmp_path}"]
    command.append(f"--client-certificate={tmp_path / 'nowhere'}")
    done = subprocess.run(command, capture_output=True, text=True, env={"KUBECONFIG": str(kubeconfig)} | _path())
    assert done.returncode == 2
    assert f"the client certificate in {tmp_path / 'nowhere'} cannot be used" in done.stderr


def _path() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(sys.path)}
