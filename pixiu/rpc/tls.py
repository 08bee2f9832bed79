"""Certificates at the cluster's doors: which process has which role is proved by TLS, both ways.

    TLS_DIR/ca.pem       whose certificates are trusted; several, one after the other, while the authority changes
    TLS_DIR/xiu.pem      private key and certificate of a Xiu, in one file, so that a rename exchanges both at once
    TLS_DIR/operator.pem the same of an operator's commands
    TLS_DIR/revoked      serial numbers that are not taken any more, hexadecimal, one a line (`cluster.runtime.guard`)

A certificate names its role twice: `pixiu://role/xiu`, which servers look at, and the host name `xiu.pixiu`, which callers ask
for whatever the address is: a process that can be reached at a Xiu's address is taken for one only if it can prove it.

Files are looked at again for each new connection, so that a new certificate needs no restart; those that are there stay. What was
written in the last second is left for the next one.

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
"""Environment variable that names the folder, for commands as for processes."""
TLS_NAME: Final = "PIXIU_CLUSTER_TLS_NAME"
"""Environment variable that says which file in it is a command's own; `operator` without it."""
OPERATOR: Final = "operator"
ROLE_URI: Final = "pixiu://role/"
MAX_PEM: Final = 1 << 20
CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2, where it is not gRPC's; those of TLS 1.3 are all good."""
STILL_S: Final = 1.0
"""For so long nobody has written a file that is exchanged while a process runs: half of it may be a good one."""
Options = Sequence[tuple[str, int | str]]


def stands_still(*written_ns: int) -> bool:
    """Whether files that were written at these times are not being written now."""
    now = time.time_ns()
    return all(abs(now - written) >= STILL_S * 1e9 for written in written_ns)


def host_name(role: str) -> str:
    """The name in a role's certificate that callers ask for."""
    return f"{role}.pixiu"


def own_file(folder: Path, name: str) -> Path:
    """The file with the private key and certificate of a role, or of `operator`."""
    return folder / f"{name}.pem"


class Tls:
    """The certificates of one process. Raises ConfigurationError when the folder lacks what is needed.

    Args:
        folder: see the module.
        name: of the own file: a role, or `operator`.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._stamp: tuple[object, ...] = ()
        self._authorities = self._own = b""
        self._channel_credentials: grpc.ChannelCredentials | None = None
        self._server_context: ssl.SSLContext | None = None
        self._server_generation = 0
        self.generation = 0
        """Grows when other files are there."""
        self.problem = ""
        """Why the files that are there now are not taken; those before them still are."""
        self._read()

    def refresh(self) -> bool:
        """Look at the files again; whether they are others. What cannot be read leaves those before them in use (`problem`)."""
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
        """A file that is being written is not taken, nor a key that is another certificate's. Raises `ConfigurationError`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        path = self.folder / "ca.pem"
        try:
            context.load_verify_locations(cadata=authorities.decode("ascii", "ignore"))
            path = own_file(self.folder, self.name)
            context.load_cert_chain(path, password=lambda: b"")  # one with a password is not asked for: nobody could answer
            stat = os.stat(path)
            if [stat.st_mtime_ns, stat.st_size, stat.st_ino] != stamps[3:]:
                raise ConfigurationError(f"[cluster] tls_dir = {self.folder}: {path.name} is being written")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = getattr(error, "reason", None) or error
            raise ConfigurationError(
                f"[cluster] tls_dir = {self.folder}: {path.name} is damaged, incomplete, or has another certificate's key: {reason}"
            ) from None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """What a caller shows and trusts."""
        self.refresh()
        if self._channel_credentials is None:
            self._channel_credentials = grpc.ssl_channel_credentials(self._authorities, self._own, self._own)
        return self._channel_credentials

    def client_context(self) -> ssl.SSLContext:
        """The same for a plain TLS connection: to ZooKeeper. Raises ConfigurationError."""
        self.refresh()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(cadata=self._authorities.decode("ascii", "ignore"))
            context.load_cert_chain(own_file(self.folder, self.name), password=lambda: b"")
        except (OSError, ValueError) as error:  # exchanged at this moment
            raise ConfigurationError(f"[cluster] tls_dir = {self.folder}: cannot be used now: {error}") from None
        return context

    def server_context(self) -> ssl.SSLContext:
        """The same for one who is called, for a new connection that is not gRPC's: callers must show a certificate of the
        authorities. Files that are exchanged at this moment leave those before in use. Raises ConfigurationError."""
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
        except (OSError, ValueError) as error:  # exchanged at this moment
            raise ConfigurationError(f"[cluster] tls_dir = {self.folder}: cannot be used now: {error}") from None
        return context

    def server_credentials(self, begins: Callable[[], None] = lambda: None) -> grpc.ServerCredentials:
        """What a server shows and whom it trusts; asked for again with every connection. Callers must show a certificate.

        begins: called with every connection, in gRPC's threads.
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
    """What this process uses: set once at its start; commands find it by the environment."""

    def __init__(self) -> None:
        self.tls: Tls | None = None
        self.asked = False


_own = _Own()


def use(tls: Tls | None) -> None:
    """Make channels to the cluster's doors with these certificates from now on; None: without."""
    _own.tls, _own.asked = tls, True


def own() -> Tls | None:
    """The certificates of this process; None: it has none. Raises ConfigurationError when the environment names a wrong folder."""
    if not _own.asked:
        folder = os.environ.get(TLS_DIR, "")
        use(Tls(Path(folder), os.environ.get(TLS_NAME, "") or OPERATOR) if folder else None)
    return _own.tls


def generation() -> int:
    """Grows when this process has other certificates: channels that are held for long are then made anew."""
    tls = own()
    if tls is None:
        return 0
    tls.refresh()
    return tls.generation


def _options(role: str, options: Options) -> list[tuple[str, int | str]]:
    return [*options, ("grpc.ssl_target_name_override", host_name(role))]


def peer_channel(address: str, role: str, options: Options = ()) -> grpc.aio.Channel:
    """A channel to the cluster's door of a process, which must prove that it has the role where this process has certificates."""
    tls = own()
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=_options(role, options))


def blocking_peer_channel(address: str, role: str, options: Options = ()) -> grpc.Channel:
    """The same for code without an event loop."""
    tls = own()
    if tls is None:
        return grpc.insecure_channel(address, options=list(options))
    return grpc.secure_channel(address, tls.channel_credentials(), options=_options(role, options))
