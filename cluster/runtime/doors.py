"""Client doors: where clients connect, who may come in there, and whether others can read what is said.

A door on a loopback address is open to whoever is on this machine, unless clients have to log in. A door on any other address opens
only when they have to, by TLS; or when the operator says by the door's name that nobody is asked who he is (`…_insecure`), or that
logins and messages go as they are (`…_plain`). The log and `pixiu status` repeat that.

Source: docs/security.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from cluster.runtime.door_tls import DoorTls
from cluster.runtime.options import ClientDoorOptions, is_loopback

CLOSED: Final = (
    "a loopback address such as 127.0.0.1: this listener asks nobody for a login; have clients log in by an access_file, "
    "or set {flag} = true to open it to everybody who reaches it"
)


PLAIN: Final = (
    "a loopback address such as 127.0.0.1: logins and messages could be read on the way; give a tls_certificate, or set "
    "{flag} = true where nobody can eavesdrop or a balancer in front ends TLS"
)


class Door(NamedTuple):
    """One address on which clients connect, named by the keys of its options."""

    host_key: str
    host: str
    flag: str
    """The key that opens it to everybody."""
    insecure: bool
    plain_flag: str
    """The key that opens it without TLS."""
    plain: bool
    tls: bool
    """Whether all who connect there speak TLS."""

    @property
    def is_outside(self) -> bool:
        """Whether it can be reached from other machines."""
        return not is_loopback(self.host)


@dataclass(frozen=True, kw_only=True)
class ClientRoleOptions(ClientDoorOptions):
    """What roles add to which clients connect: gateways and proxies."""

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

    def door_tls(self) -> DoorTls | None:
        """What clients are shown; None: their doors do not speak TLS. Raises `ConfigurationError`."""
        if not self.tls_certificate:
            return None
        return DoorTls(self.tls_certificate, self.tls_key, self.client_ca, required=self.client_certificate_required)

    def doors(self) -> tuple[Door, ...]:
        """Where clients connect."""
        insecure, plain, tls = self.clients_insecure, self.clients_plain, bool(self.tls_certificate)
        return (Door("client_host", self.client_listen_host, "clients_insecure", insecure, "clients_plain", plain, tls),)

    def insecure_doors(self) -> list[str]:
        """What an operator must be reminded of, a line for each door that is open to everybody, or to who listens on the way."""
        found = []
        for door in self.doors():
            if not door.is_outside:
                continue
            if not self.access_file:
                found.append(f"{door.flag} = true: everybody who reaches {door.host_key} = {door.host} can act as any client")
            elif not door.tls:
                flag = door.plain_flag if door.plain else door.flag
                found.append(f"{flag} = true: logins and messages at {door.host_key} = {door.host} can be read on the way")
        return found

    def files_with_keys(self) -> list[Path]:
        """The file with the private key of the certificate that clients are shown."""
        return [Path(self.tls_key or self.tls_certificate)] if self.tls_certificate else []

    def problems(self) -> Iterator[tuple[str, str]]:
        """(key, what it must be) of every option that is wrong."""
        wrong = dict(super().problems())
        yield from wrong.items()
        for key in ("tls_key", "client_ca"):
            if getattr(self, key) and not self.tls_certificate:
                yield key, "given with a tls_certificate, or empty"
        if self.client_certificate_required and not self.client_ca:
            yield "client_certificate_required", "false, or given with a client_ca, whose certificates are asked for"
        for door in self.doors():
            if door.host_key in wrong or not door.is_outside or door.insecure:
                continue
            if not self.access_file:
                yield door.host_key, CLOSED.format(flag=door.flag)
            elif not door.tls and not door.plain:
                yield door.host_key, PLAIN.format(flag=door.plain_flag)


def host_of(transport: asyncio.BaseTransport) -> str:
    """The address of the machine at the other end of a connection; empty where it is not known any more."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""
