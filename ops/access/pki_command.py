"""`pixiu pki`: certificates for the cluster's listeners, for people who have no authority of their own.

Source: docs/security.md, "Certificates".
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.trust.pki import AUTHORITY_DAYS, DAYS, issue, make_authority, renew
from tools.cli.output import guarded, print_text

pki = typer.Typer(help="Certificates for the cluster's ports.", no_args_is_help=True)

Authority = Annotated[Path, typer.Option("--ca", help="Folder of the authority.", metavar="DIR")]
Out = Annotated[Path, typer.Option("--out", help="Folder of the certificates: what [cluster] tls_dir names.", metavar="DIR")]
Days = Annotated[float, typer.Option("--days", help="Days for which a certificate is valid.")]
AUTHORITY = Path("pki")
OUT = Path("tls")


@pki.command("init")
@guarded
def init(
    ca: Authority = AUTHORITY, name: Annotated[str, typer.Option("--name", help="Name of the authority.", metavar="NAME")] = "Pixiu"
) -> None:
    """Make an authority. Keep its `ca.key` off the machines of the cluster."""
    make_authority(ca, name)
    print_text(ca / "ca.pem")


@pki.command("issue")
@guarded
def issue_command(
    roles: Annotated[list[str], typer.Argument(help="Roles: xiu, …, operator, pipeline, client, zookeeper.", metavar="ROLE…")],
    ca: Authority = AUTHORITY,
    out: Out = OUT,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Name or address at which clients reach the role; may be repeated.", metavar="HOST"),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Name of its owner, for audit logs.", metavar="NAME")] = "",
    days: Days = DAYS,
) -> None:
    """Issue certificates, each with its private key in one file."""
    for role in roles:
        print_text(issue(ca, role, out, hosts=host or (), name=name, days=days))


@pki.command("renew")
@guarded
def renew_command(
    ca: Authority = AUTHORITY,
    out: Out = OUT,
    before_days: Annotated[
        float,
        typer.Option(
            "--before",
            min=0,
            max=AUTHORITY_DAYS,
            metavar="DAYS",
            help="Renew only certificates that expire within this number of days; 0: all.",
        ),
    ] = 0.0,
    days: Days = DAYS,
) -> None:
    """Renew the certificates in a folder. Processes load them without a restart."""
    for path in renew(ca, out, days=days, before_days=before_days):
        print_text(path)
