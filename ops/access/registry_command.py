"""`pixiu registry`: logins in ZooKeeper, and their access rights.

Source: docs/security.md, "The registry".
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from pixiu.discovery import login as logins
from pixiu.discovery.login import CREDENTIALS_FILE
from pixiu.discovery.target import parse_address
from pixiu.errors import ConfigurationError
from registry.credentials import make_credentials, read_credentials
from registry.guarding import Guarded, guard
from registry.session import registry_of
from tools.cli.output import DEFAULT_TARGET, Target, guarded, print_text

registry = typer.Typer(help="Logins in the registry, and who may do what there.", no_args_is_help=True)


@registry.command()
@guarded
def credentials(
    file: Annotated[Path, typer.Argument(help="The operator's file; created if missing.", metavar="FILE")],
    renew: Annotated[bool, typer.Option("--renew", help="Give every role one more password.")] = False,
    drop: Annotated[bool, typer.Option("--drop", help="Keep only the newest password of every role.")] = False,
) -> None:
    """Create a file with a login for every role. Give each machine the lines of its own roles, in a file of mode 600."""
    if renew and drop:
        raise ConfigurationError(
            "--renew and --drop cannot be given together: first --renew, then `pixiu registry secure`, then --drop"
        )
    found = make_credentials(file, renew=renew, drop=drop)
    count = sum(map(len, found.values()))
    print_text(f"{file}: {count} passwords of {len(found)} logins")


@registry.command()
@guarded
def secure(
    file: Annotated[
        Path | None, typer.Option("--credentials", help=f"The operator's file; ${CREDENTIALS_FILE} without it.", metavar="FILE")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Shut out processes that have not logged in.")] = False,
    shared: Annotated[
        bool, typer.Option("--shared", help="ZooKeeper has other users: leave the nodes above the root as they are.")
    ] = False,
    target: Target = DEFAULT_TARGET,
) -> None:
    """Admit only the logins in the file, each to its own nodes. Run it again after each change of the file."""
    done = asyncio.run(_secure(target, file, force=force, whole=not shared))
    text = f"{done.nodes} nodes of {target} are guarded; {done.changed} had another access list"
    print_text(text)


async def _secure(target: str, file: Path | None, *, force: bool, whole: bool) -> Guarded:
    named = os.environ.get(CREDENTIALS_FILE, "")
    path = file or (Path(named) if named else logins.left_at(parse_address(target).hosts))
    if not path.exists():
        made_by = f"`pixiu registry credentials {file or 'FILE'}` makes it"
        raise ConfigurationError(f"give the operator's file with --credentials FILE; {made_by}")
    found = read_credentials(path)
    logins.use(logins.Login(path))
    async with registry_of(target) as (zookeeper, root):
        return await guard(zookeeper, root, found, force=force, whole=whole)
