"""TLS at the clients' listeners: the certificate that a gateway or proxy shows, and the authorities of clients' certificates.

    tls_certificate   certificate and chain, PEM; with the private key unless tls_key has it
    client_ca         authorities of clients' certificates, PEM

The files are checked for each new connection, and read once nobody has written them for a second. If they are unusable, the former
content stays in use (`problem`); existing connections stay. Python's gRPC either demands a certificate or does not ask for one:
where none is demanded, only MQTT asks.

Source: docs/security.md, "TLS for clients".
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import grpc

from pixiu.errors import ConfigurationError
from pixiu.rpc.tls import stands_still

MAX_PEM: Final = 1 << 20
CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Ciphers of TLS 1.2; those of TLS 1.3 are all good."""


class _Files(NamedTuple):
    """Contents of the files, and the context made from them."""

    stamps: tuple[tuple[int, int, int], ...]
    certificate: bytes
    key: bytes
    authorities: bytes
    context: ssl.SSLContext


class ListenerTls:
    """TLS of a process's client listeners. Raises `ConfigurationError` when the files are unusable.

    Args:
        certificate, key: see the module; key "": it is in the certificate's file. client_ca: "": nobody is asked for a certificate.
        required: True if every client must have one.
    """

    def __init__(self, certificate: str, key: str = "", client_ca: str = "", *, required: bool = False) -> None:
        self._paths = {"tls_certificate": Path(certificate), "tls_key": Path(key or certificate)}
        if client_ca:
            self._paths["client_ca"] = Path(client_ca)
        self._required = required
        self._lock = threading.Lock()
        self.problem = ""
        """Reason why the present files are not used; empty if they are."""
        self._files = self._read()

    @property
    def asks(self) -> bool:
        """True if clients may show a certificate."""
        return "client_ca" in self._paths

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection, other than gRPC's."""
        return self._newest().context

    def server_credentials(self, begins: Callable[[], None] = lambda: None) -> grpc.ServerCredentials:
        """Return credentials for a gRPC server, which reads them again for every connection. begins: called then, in gRPC's
        threads."""
        seen = self._newest()

        def newest() -> grpc.ServerCertificateConfiguration | None:
            nonlocal seen
            begins()
            found = self._newest()
            if found is seen:
                return None
            seen = found
            return self._configuration(found)

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(seen), newest, require_client_authentication=self._required  # type: ignore[arg-type]
        )  # fmt: skip

    def _configuration(self, files: _Files) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(files.key, files.certificate)], files.authorities if self._required else None
        )

    def _newest(self) -> _Files:
        """Return the newest usable files. Thread-safe, because gRPC asks in its own threads."""
        with self._lock:
            try:
                stamps = self._stamps()
                # Half of a list of authorities, or of a chain, is valid on its own.
                if stamps != self._files.stamps and stands_still(*(stamp[0] for stamp in stamps)):
                    self._files = self._read()
                self.problem = ""
            except ConfigurationError as error:
                self.problem = str(error)
            return self._files

    def _stamps(self) -> tuple[tuple[int, int, int], ...]:
        found = []
        for option, path in self._paths.items():
            try:
                stat = os.stat(path)
            except OSError as error:
                raise ConfigurationError(f"{option} = {path}: cannot be read: {error.strerror}") from None
            found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return tuple(found)

    def _read(self) -> _Files:
        stamps = self._stamps()
        texts: dict[str, bytes] = {}
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(CIPHERS)
        context.options |= ssl.OP_NO_RENEGOTIATION
        option, path = "", Path()
        try:
            for option, path in self._paths.items():
                with open(path, "rb") as file:
                    texts[option] = file.read(MAX_PEM)
            option, path = next(iter(self._paths.items()))
            context.load_cert_chain(path, self._paths["tls_key"], password=lambda: b"")  # a password could not be asked for
            if self.asks:
                option, path = "client_ca", self._paths["client_ca"]
                context.load_verify_locations(cadata=texts[option].decode("ascii", "ignore"))
                context.verify_mode = ssl.CERT_REQUIRED if self._required else ssl.CERT_OPTIONAL
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise ConfigurationError(
                f"{option} = {path}: must be a complete PEM file of a certificate and its private key: {reason}"
            ) from None
        if self._stamps() != stamps:
            raise ConfigurationError(f"tls_certificate = {path}: is being written")
        return _Files(stamps, texts["tls_certificate"], texts["tls_key"], texts.get("client_ca", b""), context)
