"""`pixiu console`: a cluster in a browser.

Source: docs/console.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import signal
import ssl
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from cluster.access.login_guard import LoginGuard
from cluster.core import log
from cluster.settings.options import is_loopback
from cluster.trust.audit import Audit
from ops.console.cluster import Cluster
from ops.console.logins import SECRET_BYTES, Logins
from ops.console.server import Console, Place
from pixiu.errors import ConfigurationError, InvalidArgument
from tools.cli.output import DEFAULT_TARGET, Target, guarded, operator, print_text
from tools.end_of_input import on_end_of_input

PORT: Final = 7080
OPERATORS: Final = "operators"
VIEWERS: Final = "viewers"
NAME: Final = re.compile(r"[A-Za-z0-9_.:\[\]-]{1,253}")
"""A host name or an address."""


@guarded
def console(
    target: Target = DEFAULT_TARGET,
    port: Annotated[int, typer.Option(help="Port; 0: any that is free.", min=0, max=65_535)] = PORT,
    host: Annotated[str, typer.Option(help="Address; beyond loopback with --access and --certificate only.")] = "127.0.0.1",
    names: Annotated[
        list[str] | None, typer.Option("--name", help="A host name of its URL; may be repeated.", metavar="NAME")
    ] = None,
    access: Annotated[
        Path | None, typer.Option(help="The cluster's access file: its users log in with their tokens.", metavar="FILE")
    ] = None,
    group: Annotated[str, typer.Option(help="With --access: users of this group may change something.")] = OPERATORS,
    viewers: Annotated[str, typer.Option(help="With --access: users of this group may look.")] = VIEWERS,
    certificate: Annotated[
        Path | None, typer.Option(help="PEM file with the certificate of its URL and the private key.", metavar="FILE")
    ] = None,
    look: Annotated[
        bool,
        typer.Option(
            "--look", help="Without --access: no login; everybody who reaches the port may look, and nobody change anything."
        ),
    ] = False,
    until_eof: Annotated[bool, typer.Option("--until-eof", help="End when the standard input is closed.")] = False,
) -> None:
    """Serve a page that shows the whole cluster in a browser, until Ctrl-C: map, clients, rooms, inboxes, topics, paths, growth,
    bridges, security, and a client to try. Prints its URL, with the token of this run."""
    if not is_loopback(host) and (access is None or certificate is None):
        raise InvalidArgument(f"--host {host}: beyond loopback a console needs a login and TLS: give --access and --certificate")
    if look and access is not None:
        raise InvalidArgument("--look is for a console without logins; leave --access out")
    for name in names or ():
        if NAME.fullmatch(name) is None:
            raise InvalidArgument(f"--name {name!r}: is no host name")
    log.configure("console", "info", sys.stderr)
    place = Place(host, port, tuple(names or ()), _tls(certificate))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(target, place, access, (group, viewers), look=look, until_eof=until_eof))


def _tls(certificate: Path | None) -> ssl.SSLContext | None:
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{certificate}: is not a PEM file with a certificate and its key: {error}") from None
    return context


async def _serve(target: str, place: Place, access: Path | None, groups: tuple[str, str], *, look: bool, until_eof: bool) -> None:
    ended = asyncio.Event()
    if until_eof:
        on_end_of_input(ended.set)
    guard = LoginGuard(str(access), log.get_logger(), Audit(None)) if access is not None else None
    secret = "" if access is not None or look else secrets.token_urlsafe(SECRET_BYTES)
    logins = Logins(secret, guard, *groups, operator=operator())
    async with Cluster(target) as cluster:
        server = Console(cluster, logins, place)
        try:
            await server.start()
        except OSError as error:
            raise InvalidArgument(f"{place.host}:{place.port}: the console cannot listen there: {error.strerror}") from None
        if guard is not None:
            guard.start()
        scheme, host = "https" if place.tls is not None else "http", (*place.names, place.host)[0]
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        # After the #, where no server and no log sees it.
        print_text(f"{scheme}://{host}:{server.port}/" + (f"#token={secret}" if secret else ""))
        try:
            await _wait(ended)
        finally:
            await server.close()
            if guard is not None:
                await guard.close()


async def _wait(ended: asyncio.Event) -> None:
    """Wait for it, for Ctrl-C or for SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()
