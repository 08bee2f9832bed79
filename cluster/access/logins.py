"""From a call or a connection to a session: the credentials of gRPC clients of gateways and proxies, and their verification.

    authorization: Bearer TOKEN
    authorization: Basic BASE64(USER:PASSWORD)

Source: docs/security.md, "Logging in"; RFC 6750, RFC 7617.
"""

from __future__ import annotations

import base64
import binascii
import ssl
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote

from structlog.typing import FilteringBoundLogger

from cluster.access.login_guard import LoginGuard, LoginSession
from cluster.listeners.clients import ClientRoleOptions
from cluster.settings.options import ClusterOptions
from cluster.trust.audit import Audit
from cluster.trust.identity import Credentials
from pixiu.errors import ConfigurationError, NotAuthenticated

NO_LOGIN: Final = (
    "this port requires a login: give a token, for the SDK and `pixiu` in PIXIU_TOKEN; other gRPC clients send metadata "
    "`authorization: Bearer TOKEN`"
)


def guard_of(
    options: ClientRoleOptions,
    cluster: ClusterOptions,
    log: FilteringBoundLogger,
    audit: Audit,
    called: Callable[[str], None] = lambda _peer: None,
) -> LoginGuard | None:
    """Create the guard of a process's client ports; None if no login is required. Raises `ConfigurationError`.

    called: called with each gRPC call's peer.
    """
    if not options.access_file:
        if cluster.ticket_key_dir:
            raise ConfigurationError("[cluster] ticket_key_dir: needs an access_file here, by which logins are checked")
        return None
    if not cluster.key_dir:
        raise ConfigurationError(
            f"access_file = {options.access_file}: needs [cluster] key_dir, with whose keys gateways prove their role"
        )
    guard = LoginGuard(options.access_file, log, audit)
    guard.called = called
    if guard.settings.certificate is not None and not options.client_ca:
        raise ConfigurationError(
            f"access_file = {options.access_file}: [certificate] needs client_ca, the authorities of the clients' certificates"
        )
    return guard


async def enter(guard: LoginGuard | None, context: Any, client: str, end: Callable[[str], None]) -> LoginSession | None:
    """Open a session for a gRPC call; None if no login is required. `end`: ends the call, with a reason in words.

    Raises `NotAuthenticated`, `NotAllowed` or `Overloaded`.
    """
    if guard is None:
        return None
    credentials = brought(guard, context, client)
    session = guard.open(await guard.check(credentials), credentials.address, client, end)
    await session.charge_call()
    return session


def brought(guard: LoginGuard, context: Any, client: str) -> Credentials:
    """Credentials of a gRPC caller. Raises `NotAuthenticated` if they are invalid."""
    peer = str(context.peer())
    guard.called(peer)
    address = address_of(peer)
    with guard.refusing(address, client):
        return credentials_of(header_of(context), client, address, certificate_of(context))


LOANS: Final = ("proxy", "proxy, loans")
"""Keys with which proxies prove to proxies that they lent a worker number."""


def header_of(context: Any) -> str:
    """Authorization of a call, unchanged; empty if there is none."""
    found = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
    return str(found[0]) if len(found) == 1 else ""


def certificate_of(context: Any) -> bytes:
    """Certificate of a caller, DER, verified by TLS; empty if there is none."""
    found = context.auth_context().get("x509_pem_cert")
    try:
        return ssl.PEM_cert_to_DER_cert(found[0].decode()) if found else b""
    except ValueError:
        return b""


def credentials_of(header: str, client: str, address: str, certificate: bytes = b"") -> Credentials:
    """Credentials in an authorization, or a certificate alone. Raises `NotAuthenticated` if they are invalid."""
    if certificate and not header:
        return Credentials("", "", client, address, certificate)
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer":
        return Credentials("", value.strip(), client, address, certificate)
    if scheme.lower() == "basic":
        try:
            user, colon, password = base64.b64decode(value.strip(), validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            raise NotAuthenticated("the authorization is malformed") from None
        if colon:
            return Credentials(user, password, client, address, certificate)
    raise NotAuthenticated(NO_LOGIN)


def address_of(peer: str) -> str:
    """Address of the machine in gRPC's name of a peer, such as ipv4:10.0.0.7:41000 or ipv6:%5B::1%5D:41000."""
    return unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]") or peer
