"""Certificates for tests, each signed by an authority of its own."""

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificate:
    """Files as a Secret of type kubernetes.io/tls holds them."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def certificate(self) -> Path:
        return self.folder / "tls.crt"

    @property
    def key(self) -> Path:
        return self.folder / "tls.key"


def issue(folder: Path, *names: x509.GeneralName) -> Certificate:
    """A certificate for these names and the authority that has signed it."""
    folder.mkdir(parents=True, exist_ok=True)
    authority, leaf = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    made = Certificate(folder)
    pem = serialization.Encoding.PEM
    made.ca.write_bytes(_signed("authority", authority, authority, names, ca=True).public_bytes(pem))
    made.certificate.write_bytes(_signed("leaf", leaf, authority, names, ca=False).public_bytes(pem))
    plain = serialization.NoEncryption()
    made.key.write_bytes(leaf.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return made


def _signed(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    authority: ec.EllipticCurvePrivateKey,
    names: tuple[x509.GeneralName, ...],
    *,
    ca: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(authority, hashes.SHA256())
    )
