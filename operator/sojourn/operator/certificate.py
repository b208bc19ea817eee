"""The operator's own certificate, which it shows to models that demand one of their clients.

It comes as files, from one Secret of the operator's namespace that the installation mounts: no right to read Secrets
is needed for it.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from sojourn.operator.errors import BadConfiguration


@dataclass(frozen=True)
class ClientCertificate:
    """A folder like a Secret of type kubernetes.io/tls: tls.crt, tls.key and maybe ca.crt, read anew at each use.

    Attributes:
        folder: where they lie; the kubelet replaces them when the Secret changes.
    """

    folder: Path

    @property
    def chain(self) -> Path:
        """The certificate, as PEM."""
        return self.folder / "tls.crt"

    @property
    def key(self) -> Path:
        """Its key, as PEM."""
        return self.folder / "tls.key"

    def authority(self) -> bytes | None:
        """Whom the operator trusts where it may not read a service's Secret, as PEM; None where nobody is named."""
        try:
            return (self.folder / "ca.crt").read_bytes()
        except OSError:
            return None

    def check(self) -> None:
        """Whether the files are there and belong together.

        Raises:
            BadConfiguration: with what to change.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_cert_chain(self.chain, self.key)
            if (authority := self.authority()) is not None:
                context.load_verify_locations(cadata=authority.decode())
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise BadConfiguration(
                f"the client certificate in {self.folder} cannot be used: {error}; it takes tls.crt and its tls.key, "
                "and ca.crt if the operator is to trust an authority by it"
            ) from error
