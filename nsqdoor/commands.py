"""`pixiu nsq`: listen for NSQ's clients.

Source: docs/nsq.md.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, cast

import typer

from cluster.core import log
from nsqdoor.options import Options
from nsqdoor.service import serve
from pixiu.client.messages.load_test import LoadTest
from pixiu.discovery.reachable import check_reachable
from tools.cli.output import DEFAULT_TARGET, Target, guarded


@guarded
def nsq(
    target: Target = DEFAULT_TARGET,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    tcp_port: Annotated[int, typer.Option(help="Port of nsqd's protocol; 0: any.")] = 4150,
    http_port: Annotated[int, typer.Option(help="Port of nsqd's and nsqlookupd's HTTP; 0: any.")] = 4151,
    broadcast: Annotated[str, typer.Option(help="Address that clients are given; empty: --host.")] = "",
    auth: Annotated[bool, typer.Option("--auth", help="Clients have to log in by AUTH with a token of the cluster.")] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let other machines connect without a login.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Let other machines log in without TLS.")] = False,
    tls_certificate: Annotated[str, typer.Option(help="PEM file of the certificate and its key.")] = "",
    tls_key: Annotated[str, typer.Option(help="PEM file of the key, if it is not with the certificate.")] = "",
    tls_required: Annotated[bool, typer.Option("--tls-required", help="Refuse clients that do not ask for TLS.")] = False,
    create: Annotated[
        str, typer.Option(help="Prefixes, with commas, of topics that are created when they are first used; *: all; empty: none.")
    ] = "*",
    parts: Annotated[int, typer.Option(min=0, help="Parts of such a topic; 0: one for each group.")] = 0,
    max_attempts: Annotated[
        int, typer.Option(min=0, help="Deliveries before a message of a new channel becomes a dead letter; 0: the default.")
    ] = 0,
    load_test: Annotated[str, typer.Option(help="Messages of load tests: block, pass or only.")] = "block",
    headers: Annotated[
        str, typer.Option(help="Consumers that know no headers: strip gives bodies, require refuses them.")
    ] = "strip",
    log_format: Annotated[str, typer.Option(help="console or json.")] = "console",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Listen for NSQ's clients, with nsqd's protocol and nsqlookupd's HTTP, and serve durable topics to them. Ends on Ctrl-C or
    SIGTERM."""
    options = Options(
        target=target, host=host, tcp_port=tcp_port, http_port=http_port, broadcast=broadcast, auth=auth, insecure=insecure,
        plain=plain, tls_certificate=tls_certificate, tls_key=tls_key, tls_required=tls_required, create=create, parts=parts,
        max_attempts=max_attempts, load_test=cast(LoadTest, load_test), headers=headers, log_format=log_format, log_level=log_level,
    )  # fmt: skip
    options.validate()
    log.configure(log_format, log_level)
    check_reachable(target)
    asyncio.run(serve(options))


def main() -> None:
    """Run the command alone: `python -m nsqdoor`."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(nsq)
    app()
