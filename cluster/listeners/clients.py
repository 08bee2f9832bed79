"""Listeners for clients: their addresses, the admission there, and the protection from eavesdroppers.

A listener on a loopback address is open to everybody on this machine, unless clients have to log in. A listener on any other
address opens only if they have to log in by TLS; or if the operator allows, by the listener's name, clients without a login
(`…_insecure`), or logins and messages in plain text (`…_plain`). The log and `pixiu status` repeat that.

Source: docs/security.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from cluster.settings.options import ClientListenerOptions, is_loopback
from cluster.trust.listener_tls import ListenerTls

CLOSED: Final = (
    "a loopback address such as 127.0.0.1: this listener asks nobody for a login; have clients log in by an access_file, "
    "or set {flag} = true to open it to everybody who reaches it"
)


PLAIN: Final = (
    "a loopback address such as 127.0.0.1: logins and messages could be read on the way; give a tls_certificate, or set "
    "{flag} = true where nobody can eavesdrop or a balancer in front ends TLS"
)


class ClientListener(NamedTuple):
    """One address for clients, named by the keys of its options."""

    host_key: str
    host: str
    flag: str
    """The key that opens it to everybody."""
    insecure: bool
    plain_flag: str
    """The key that opens it without TLS."""
    plain: bool
    tls: bool
    """True if all of its clients use TLS."""

    @property
    def is_outside(self) -> bool:
        """True if other machines can reach it."""
        return not is_loopback(self.host)


@dataclass(frozen=True, kw_only=True)
class ClientRoleOptions(ClientListenerOptions):
    """Additional options of roles to which clients connect: gateways, proxies and replicas of topics."""

    access_file: str = ""
    """File of the logins that are accepted and what each may do; it is read again when it changes. Empty: nobody has to log in."""
    clients_insecure: bool = False
    """Whether gRPC clients may connect from other machines without a login."""
    clients_plain: bool = False
    """Whether gRPC clients may log in from other machines without TLS."""
    tls_certificate: str = ""
    """PEM file with the certificate and chain that clients are shown, and its private key unless tls_key has it; it is read again
    when it changes. Clients' ports then speak TLS. Empty: they do not."""
    tls_key: str = ""
    """PEM file with the private key of tls_certificate. Empty: it is in the same file."""
    client_ca: str = ""
    """PEM file with the authorities of clients' certificates; it is read again when it changes. Empty: nobody is asked for one."""
    client_certificate_required: bool = False
    """Whether only clients with a certificate of client_ca may connect. Else MQTT clients may show one, and gRPC clients cannot."""

    def listener_tls(self) -> ListenerTls | None:
        """Return the TLS of the clients' listeners; None if they do not use TLS. Raises `ConfigurationError`."""
        if not self.tls_certificate:
            return None
        return ListenerTls(self.tls_certificate, self.tls_key, self.client_ca, required=self.client_certificate_required)

    def listeners(self) -> tuple[ClientListener, ...]:
        """Return the listeners for clients."""
        insecure, plain, tls = self.clients_insecure, self.clients_plain, bool(self.tls_certificate)
        return (ClientListener("client_host", self.client_listen_host, "clients_insecure", insecure, "clients_plain", plain, tls),)

    def insecure_listeners(self) -> list[str]:
        """Return the reminders for an operator: a line for each listener that is open to everybody, or to eavesdroppers."""
        found = []
        for listener in self.listeners():
            if not listener.is_outside:
                continue
            if not self.access_file:
                found.append(
                    f"{listener.flag} = true: everybody who reaches {listener.host_key} = {listener.host} can act as any client"
                )
            elif not listener.tls:
                flag = listener.plain_flag if listener.plain else listener.flag
                found.append(f"{flag} = true: logins and messages at {listener.host_key} = {listener.host} can be read on the way")
        return found

    def files_with_keys(self) -> list[Path]:
        """Return the file with the private key of the certificate that clients see."""
        return [Path(self.tls_key or self.tls_certificate)] if self.tls_certificate else []

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, allowed values) for every wrong option."""
        wrong = dict(super().problems())
        yield from wrong.items()
        for key in ("tls_key", "client_ca"):
            if getattr(self, key) and not self.tls_certificate:
                yield key, "given with a tls_certificate, or empty"
        if self.client_certificate_required and not self.client_ca:
            yield "client_certificate_required", "false, or given with a client_ca, whose certificates are asked for"
        for listener in self.listeners():
            if listener.host_key in wrong or not listener.is_outside or listener.insecure:
                continue
            if not self.access_file:
                yield listener.host_key, CLOSED.format(flag=listener.flag)
            elif not listener.tls and not listener.plain:
                yield listener.host_key, PLAIN.format(flag=listener.plain_flag)


def close_once(transport: asyncio.Transport) -> None:
    """Close a transport that is not closing yet. Any call raises AttributeError after asyncio's TLS transport was closed twice."""
    if not transport.is_closing():
        transport.close()


def host_of(transport: asyncio.BaseTransport) -> str:
    """Return the address of the machine at the other end of a connection; empty if it is no longer known."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""
