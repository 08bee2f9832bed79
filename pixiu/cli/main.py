"""The `pixiu` command. Commands that need more than the SDK come from the entry-point group `pixiu.commands`.

Source: DESIGN section 15.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
import time
from importlib.metadata import entry_points
from typing import Annotated, Final

import typer

from pixiu.cli import status as status_module
from pixiu.cli.inbox import inbox
from pixiu.cli.messages import listen, presence, send
from pixiu.cli.output import DEFAULT_TARGET, AsJson, Target, console, error_console, guarded, print_json
from pixiu.cli.promote import promote
from pixiu.cli.repair import repair
from pixiu.tools.probe.command import probe
from pixiu.tools.replay.command import replay
from pixiu.version import __version__

COMMAND_GROUP: Final = "pixiu.commands"

app = typer.Typer(
    name="pixiu",
    help="Pixiu: a distributed, partitioned publish/subscribe cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"pixiu {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Pixiu: a distributed, partitioned publish/subscribe cluster."""


@app.command()
@guarded
def status(target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Show every process of a cluster and whether all is well. Exit code 0: healthy, 1: not, 2: unreachable."""
    found = asyncio.run(status_module.read_status(target))
    if as_json:
        print_json(status_module.status_json(found, time.time_ns() // 1_000_000), indent=2)
    else:
        console().print(status_module.render(found))
    if not found.healthy:
        raise typer.Exit(1)


app.command()(replay)
app.command()(send)
app.command()(listen)
app.command()(probe)
app.command()(presence)
app.command()(inbox)
app.command()(promote)
app.command()(repair)


def add_plugins(to: typer.Typer) -> None:
    """Add the commands that installed packages bring; one that cannot be loaded is named and left out."""
    for entry in sorted(entry_points(group=COMMAND_GROUP), key=lambda found: found.name):
        try:
            command = entry.load()
        except ImportError as error:
            error_console().print(f"[yellow]pixiu {entry.name}: not available: {error}[/]", highlight=False)
            continue
        if isinstance(command, typer.Typer):
            to.add_typer(command, name=entry.name)
        else:
            to.command(entry.name)(command)


def allow_open_files() -> None:
    """Every connection is an open file: take as many as the system lets this user have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass  # the given number has to do


def main() -> None:
    """The `pixiu` command."""
    allow_open_files()
    # Libraries' warnings (a reconnect, a retry) go where the user asked for logs: nowhere by default.
    logging.getLogger().addHandler(logging.NullHandler())
    add_plugins(app)
    app()


if __name__ == "__main__":
    main()
