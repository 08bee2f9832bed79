"""`pixiu keys`: change the keys of datagrams in a folder (`cluster.trust.key_folder`).

Source: docs/security.md, "Keys of datagrams", "Login tickets".
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.trust.key_folder import add_key, drop_keys, use_key
from tools.cli.output import guarded, print_text

keys = typer.Typer(help="The keys that sign datagrams between processes, or login tickets.", no_args_is_help=True)
Folder = Annotated[Path, typer.Option("--dir", help="Their folder: what [cluster] key_dir or ticket_key_dir names.", metavar="DIR")]
FOLDER = Path("keys")


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
def drop(folder: Folder = FOLDER) -> None:
    """Remove the keys before the one in use, once every machine signs with that."""
    for path in drop_keys(folder):
        print_text(path)
