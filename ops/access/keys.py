"""`pixiu keys`: change the keys of datagrams in a folder (`cluster.trust.key_folder`).

Source: docs/security.md, "Keys of datagrams", "Login tickets".
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Final

import typer

from cluster.trust.key_folder import add_key, drop_keys, in_use_s, use_key
from pixiu.errors import ConfigurationError
from tools.cli.output import guarded, print_text

keys = typer.Typer(help="The keys that sign datagrams between processes, or login tickets.", no_args_is_help=True)
Folder = Annotated[Path, typer.Option("--dir", help="Their folder: what [cluster] key_dir or ticket_key_dir names.", metavar="DIR")]
FOLDER = Path("keys")
DROP_AFTER_S: Final = 600
"""Length of a loan of a worker number, whose proof a sender shows until it gets the next one."""


@keys.command("add")
@guarded
def add(folder: Folder = FOLDER) -> None:
    """Make the next key. Give the folder to every machine before it is used."""
    print_text(add_key(folder))


@keys.command("use")
@guarded
def use(folder: Folder = FOLDER) -> None:
    """Sign with the next key, on one machine after the other."""
    print_text(use_key(folder))


@keys.command("drop")
@guarded
def drop(
    folder: Folder = FOLDER,
    force: Annotated[bool, typer.Option("--force", help="Do it earlier: what the old keys signed is refused at once.")] = False,
) -> None:
    """Remove the keys before the one in use: ten minutes after every machine signs with that, for login tickets a day after."""
    if not force and (since_s := in_use_s(folder, time.time())) < DROP_AFTER_S:
        raise ConfigurationError(
            f"the newest key in {folder} has been in use for {since_s:.0f} s. For ten minutes senders prove their message IDs by "
            "the keys before it, and would be refused: drop those later, or now with --force"
        )
    for path in drop_keys(folder):
        print_text(path)
