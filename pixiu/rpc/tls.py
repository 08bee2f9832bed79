"""Certificates at the cluster's listeners: TLS proves the role of both processes.

    TLS_DIR/ca.pem       trusted authorities; several, one after the other, while the authority changes
    TLS_DIR/xiu.pem      private key and certificate of a Xiu, in one file, so that a rename replaces both at once
    TLS_DIR/operator.pem the same of an operator's commands
    TLS_DIR/revoked      serial numbers of revoked certificates, hexadecimal, one a line (`cluster.listeners.call_guard`)

A certificate names its role twice: `pixiu://role/xiu`, which servers check, and the host name `xiu.pixiu`, which callers check
whatever the address is. So a process at a Xiu's address is trusted as a Xiu only if it can prove it.

Files are checked again for each new connection, so that a new certificate needs no restart; existing connections stay. Files
written in the last second are used from the next connection on.

Source: docs/security.md, "Certificates".
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from pixiu.errors import ConfigurationError

TLS_DIR: Final = "PIXIU_CLUSTER_TLS_DIR"
"""Environment variable that names the folder, for commands and processes."""
TLS_NAME: Final = "PIXIU_CLUSTER_TLS_NAME"
"""Environment variable with the name of a command's own file in it; default: `operator`."""
OPERATOR: Final = "operator"
ROLE_URI: Final = "pixiu://role/"
MAX_PEM: Final = 1 << 20
CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Ciphers of TLS 1.2 outside of gRPC; those of TLS 1.3 are all good."""
STILL_S: Final = 1.0
"""Time since the last write after which a file is read, seconds: a file that is being replaced may be incomplete."""
Options = Sequence[tuple[str, int | str]]


def stands_still(*written_ns: int) -> bool:
    """True if files that were written at these times are not being written now."""
    now = time.time_ns()
    return all(abs(now - written) >= STILL_S * 1e9 for written in written_ns)


def host_name(role: str) -> str:
    """The host name in a role's certificate, which callers check."""
    return f"{role}.pixiu"


def own_file(folder: Path, name: str) -> Path:
    """The file with the private key and certificate of a role, or of `operator`."""
    return folder / f"{name}.pem"


class Tls:
    """The certificates of one process. Raises `ConfigurationError` when the folder lacks a file.

    Args:
        folder: see the module.
        name: name of the own file: a role, or `operator`.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._stamp: tuple[object, ...] = ()
        self._authorities = self._own = b""
        self._channel_credentials: grpc.ChannelCredentials | None = None
        self._server_context: ssl.SSLContext | None = None
        self._server_generation = 0
        self.generation = 0
        """Increased when the files have changed."""
        self.problem = ""
        """The reason why the current files are not used; the previous ones still are."""
        self._read()

    def refresh(self) -> bool:
        """Check the files again. True if they have changed. If they cannot be read, the previous ones stay in use (`problem`)."""
        before = self.generation
        try:
            self._read()
        except ConfigurationError as error:
            self.problem = str(error)
        else:
            self.problem = ""
        return self.generation != before

    def _read(self) -> None:
        found = []
        stamps: list[object] = []
        written: list[int] = []
        for path in (self.folder / "ca.pem", own_file(self.folder, self.name)):
            try:
                stat = os.stat(path)
                stamps += [stat.st_mtime_ns, stat.st_size, stat.st_ino]
                written.append(stat.st_mtime_ns)
                if stamps == list(self._stamp[: len(stamps)]):
                    continue
                with open(path, "rb") as file:
                    found.append((path, file.read(MAX_PEM)))
            except OSError as error:
                raise ConfigurationError(
                    f"[cluster] tls_dir = {self.folder}: {path.name} cannot be read: {error.strerror}; `pixiu pki issue` makes it"
                ) from None
        if tuple(stamps) == self._stamp or (self._stamp and not stands_still(*written)):
            return
        texts = {path.name: text for path, text in found}
        authorities, own = texts.get("ca.pem", self._authorities), texts.get(f"{self.name}.pem", self._own)
        for name, text, wanted in (("ca.pem", authorities, b"CERTIFICATE-----"), (f"{self.name}.pem", own, b"PRIVATE KEY-----")):
            if wanted not in text or b"CERTIFICATE-----" not in text:
                raise ConfigurationError(
                    f"[cluster] tls_dir = {self.folder}: {name} holds no {wanted.decode().rstrip('-').lower()}"
                )
        self._check_whole(authorities, stamps)
        self._authorities, self._own, self._stamp = authorities, own, tuple(stamps)
        self._channel_credentials = None
        self.generation += 1

    def _check_whole(self, authorities: bytes, stamps: list[object]) -> None:
        """Check that no file is being written, and that the key belongs to the certificate. Raises `ConfigurationError`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        path = self.folder / "ca.pem"
        try:
            context.load_verify_locations(cadata=authorities.decode("ascii", "ignore"))
            path = own_file(self.folder, self.name)
            context.load_cert_chain(path, password=lambda: b"")  # do not ask for a password: nobody could answer
            stat = os.stat(path)
            if [stat.st_mtime_ns, stat.st_size, stat.st_ino] != stamps[3:]:
                raise ConfigurationError(f"[cluster] tls_dir = {self.folder}: {path.name} is being written")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = getattr(error, "reason", None) or error
            raise ConfigurationError(
                f"[cluster] tls_dir = {self.folder}: {path.name} is damaged, incomplete, or has another certificate's key: {reason}"
            ) from None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a gRPC channel."""
        self.refresh()
        if self._channel_credentials is None:
            self._channel_credentials = grpc.ssl_channel_credentials(self._authorities, self._own, self._own)
        return self._channel_credentials

    def client_context(self) -> ssl.SSLContext:
        """Make the context of a plain TLS connection to ZooKeeper. Raises `ConfigurationError`."""
        self.refresh()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(cadata=self._authorities.decode("ascii", "ignore"))
            context.load_cert_chain(own_file(self.folder, self.name), password=lambda: b"")
        except (OSError, ValueError) as error:  # replaced at this moment
            raise ConfigurationError(f"[cluster] tls_dir = {self.folder}: cannot be used now: {error}") from None
        return context

    def server_context(self) -> ssl.SSLContext:
        """Make the context for a new incoming connection other than gRPC: callers must present a certificate of the authorities.
        Files that are being replaced leave the previous ones in use. Raises `ConfigurationError`."""
        self.refresh()
        if self._server_generation != self.generation or self._server_context is None:
            generation = self.generation
            try:
                self._server_context, self._server_generation = self._make_server_context(), generation
            except ConfigurationError:
                if self._server_context is None:
                    raise
        return self._server_context

    def _make_server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(CIPHERS)
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cadata=self._authorities.decode("ascii", "ignore"))
            context.load_cert_chain(own_file(self.folder, self.name), password=lambda: b"")
        except (OSError, ValueError) as error:  # replaced at this moment
            raise ConfigurationError(f"[cluster] tls_dir = {self.folder}: cannot be used now: {error}") from None
        return context

    def server_credentials(self, begins: Callable[[], None] = lambda: None) -> grpc.ServerCredentials:
        """Make the credentials of a gRPC server; files are checked at every connection. Callers must present a certificate.

        begins: called at every connection, in gRPC's threads.
        """
        seen = self.generation

        def newest() -> grpc.ServerCertificateConfiguration | None:
            nonlocal seen
            begins()
            self.refresh()
            if self.generation == seen:
                return None
            seen = self.generation
            return self._configuration()

        return grpc.dynamic_ssl_server_credentials(self._configuration(), newest, require_client_authentication=True)  # type: ignore[arg-type]

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self._own, self._own)], self._authorities)


class _Own:
    """The certificates of a command or an application. A role of a cluster passes its own: several may run in one process."""

    def __init__(self) -> None:
        self.tls: Tls | None = None
        self.asked = False


_own = _Own()


def use(tls: Tls | None) -> None:
    """Use these certificates as this program's own from now on; None: none."""
    _own.tls, _own.asked = tls, True


def own() -> Tls | None:
    """The certificates of a command or an application, by default those that the environment names; None: it has none. Raises
    `ConfigurationError` when the environment names a wrong folder."""
    if not _own.asked:
        folder = os.environ.get(TLS_DIR, "")
        use(Tls(Path(folder), os.environ.get(TLS_NAME, "") or OPERATOR) if folder else None)
    return _own.tls


def generation(tls: Tls | None) -> int:
    """Generation of certificates, 0 without any: when it grows, long-lived channels are made again."""
    if tls is None:
        return 0
    tls.refresh()
    return tls.generation


def _options(role: str, options: Options) -> list[tuple[str, int | str]]:
    return [*options, ("grpc.ssl_target_name_override", host_name(role))]


def peer_channel(address: str, role: str, tls: Tls | None, options: Options = ()) -> grpc.aio.Channel:
    """Open a channel to the cluster listener of a process, which must prove its role if the caller has certificates.

    tls: the caller's certificates: a role's, or a command's `own()`. None: it has none.
    """
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=_options(role, options))


def blocking_peer_channel(address: str, role: str, tls: Tls | None, options: Options = ()) -> grpc.Channel:
    """`peer_channel` for code without an event loop."""
    if tls is None:
        return grpc.insecure_channel(address, options=list(options))
    return grpc.secure_channel(address, tls.channel_credentials(), options=_options(role, options))
