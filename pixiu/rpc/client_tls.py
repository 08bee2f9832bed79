"""TLS from clients to their listeners: the trusted authorities, and the client's own certificate if the cluster requires one.

    PIXIU_CA            PEM file of the authorities, or "system" for those that the system trusts
    PIXIU_CERTIFICATE   PEM file with the client's own certificate and its private key

Files are checked again for each new connection.

Source: docs/security.md, "TLS for clients".
"""

from __future__ import annotations

import contextlib
import os
import ssl
from typing import Final, NamedTuple

import grpc

from pixiu.errors import ConfigurationError

CA_VARIABLE: Final = "PIXIU_CA"
CERTIFICATE_VARIABLE: Final = "PIXIU_CERTIFICATE"
SYSTEM: Final = "system"
MAX_PEM: Final = 1 << 20


class _Read(NamedTuple):
    authorities: bytes | None
    own: bytes | None


class ClientTls:
    """Certificates that a client trusts and presents.

    Args:
        ca: a PEM file, or "system".
        certificate: a PEM file; "": none is presented.

    Raises `ConfigurationError` when a file cannot be used.
    """

    def __init__(self, ca: str, certificate: str = "") -> None:
        self._ca, self._certificate = ca, certificate
        self._credentials: grpc.ChannelCredentials | None = None
        self._read: _Read | None = None
        self.generation = 0
        """Increased when the files have changed."""
        self._look()
        self.context()

    def newest(self) -> int:
        """The generation of the current files; if they cannot be read, the previous ones stay in use."""
        with contextlib.suppress(ConfigurationError):
            self._look()
        return self.generation

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a gRPC channel, from the files that were read last."""
        if self._credentials is None:
            assert self._read is not None
            self._credentials = grpc.ssl_channel_credentials(self._read.authorities, self._read.own, self._read.own)
        return self._credentials

    def context(self) -> ssl.SSLContext:
        """Make the TLS context of a connection other than gRPC. Raises `ConfigurationError`."""
        path = self._ca
        try:
            context = ssl.create_default_context(cafile=None if self._ca == SYSTEM else self._ca)
            if self._certificate:
                path = self._certificate
                context.load_cert_chain(path, password=lambda: b"")
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise ConfigurationError(f"{path}: is not a PEM file that TLS can use: {reason}") from None
        return context

    def _look(self) -> None:
        found = _Read(None if self._ca == SYSTEM else _pem(self._ca, CA_VARIABLE), _pem(self._certificate, CERTIFICATE_VARIABLE))
        if found != self._read:
            self._read, self._credentials = found, None
            self.generation += 1


def client_tls(ca: str | None = None, certificate: str | None = None) -> ClientTls | None:
    """Make the TLS of a client from the arguments, or else from the environment; None: no TLS. Raises `ConfigurationError`."""
    ca = os.environ.get(CA_VARIABLE, "") if ca is None else ca
    certificate = os.environ.get(CERTIFICATE_VARIABLE, "") if certificate is None else certificate
    if ca:
        return ClientTls(ca, certificate)
    if certificate:
        raise ConfigurationError(f"a certificate needs TLS: set ca, or {CA_VARIABLE}, to the authority of the cluster")
    return None


def _pem(path: str, variable: str) -> bytes | None:
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            return file.read(MAX_PEM)
    except OSError as error:
        raise ConfigurationError(f"{variable}, {path}: cannot be read: {error.strerror}") from None
