"""The authorities of clients' certificates, for a certificate that TLS has verified at another process.

A gateway passes its clients' certificates on to proxies. TLS has shown to the gateway that a client has the private key; a proxy
checks at least that the authority has issued the certificate. It must have done so directly: the gateway has no intermediate ones.

Source: docs/security.md, "Login tickets".
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from pixiu.errors import NotAuthenticated

READ_S: Final = 1.0
"""Time for which the file is cached, seconds."""


class Authorities:
    """The certificates in the file that `client_ca` names; empty: there is none."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._found: list[x509.Certificate] = []
        self._until = 0.0

    def check(self, der: bytes) -> None:
        """Raise `NotAuthenticated` unless one of the authorities has issued a certificate."""
        try:
            certificate = x509.load_der_x509_certificate(der)
        except ValueError:
            raise NotAuthenticated("the client's certificate cannot be read") from None
        if not any(_issued(authority, certificate) for authority in self._newest()):
            raise NotAuthenticated("no authority in client_ca of the proxies has issued the client's certificate itself")

    def _newest(self) -> list[x509.Certificate]:
        if time.monotonic() >= self._until:
            self._until = time.monotonic() + READ_S
            try:
                self._found = x509.load_pem_x509_certificates(Path(self._path).read_bytes()) if self._path else []
            except (OSError, ValueError):
                self._found = []
        return self._found


def _issued(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
