"""The `pixiu` command. Commands of other packages come from the entry-point group `pixiu.commands`.

Only the module of the requested command is imported; `--help` shows the others by the first line of their docstring, read from
their source.

Source: docs/operations.md, "Monitoring".
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import logging
import os
import resource
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from pixiu.version import __version__
from tools.cli.output import print_anywhere

COMMAND_GROUP: Final = "pixiu.commands"
COMPLETION: Final = "_PIXIU_COMPLETE"
"""Set by a shell that completes a command line."""
PLAIN: Final = None
"""Help is printed as written: parsed as markup, `[cluster] tls_dir` would lose its first word."""
EXIT_ABORTED: Final = 1
EXIT_WRONG: Final = 2
COMMANDS: Final = {
    "status": "tools.cli.status:status",
    "top": "tools.cli.top:top",
    "replay": "tools.replay.command:replay",
    "send": "tools.cli.messages:send",
    "listen": "tools.cli.messages:listen",
    "bench": "tools.load.bench:bench",
    "probe": "tools.probe.command:probe",
    "presence": "tools.cli.messages:presence",
    "availability": "tools.probe.availability_command:availability",
    "inbox": "tools.cli.inbox:inbox",
    "sessions": "tools.cli.sessions:sessions",
    "retained": "tools.cli.retained:retained",
    "tenants": "tools.tenants.command:tenants",
    "topic": "tools.topics.command:topic",
    "tail": "tools.tail.command:tail",
}
"""Name → module:function of the commands of `tools/`."""


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"pixiu {__version__}\n")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Pixiu: a distributed, partitioned publish/subscribe cluster."""


def application(arguments: Sequence[str] | None = None) -> typer.Typer:
    """The command with its subcommands.

    Args:
        arguments: a command line without the program's name: only its subcommand is loaded. None: all are loaded.
    """
    app = typer.Typer(
        name="pixiu",
        help=_root.__doc__,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=PLAIN,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    named = next((word for word in arguments if not word.startswith("-")), None) if arguments is not None else None
    for name, place, load in _found(alone=list(arguments or ())[:1] == [named] and named in COMMANDS):
        if arguments is not None and name != named:
            # After a command's name, no text of the others is shown.
            summary = "" if list(arguments[:1]) == [named] else summary_of(place)
            if summary is not None:
                app.command(name, short_help=summary.split(". ")[0].rstrip("."))(_not_loaded)
                continue
        try:
            command = load()
        except ImportError as error:
            sys.stderr.write(f"pixiu {name}: not available: {error}\n")
            continue
        if isinstance(command, typer.Typer):
            command.rich_markup_mode = PLAIN
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _found(*, alone: bool) -> Sequence[tuple[str, str, Callable[[], Any]]]:
    """Name, module:function and loader of every subcommand; alone: only those of `tools/`."""
    own = [(name, place, partial(_load, place)) for name, place in COMMANDS.items()]
    if alone:
        return own  # finding what is installed beside it would cost every command a tenth of a second
    from importlib.metadata import entry_points

    plugins = sorted(entry_points(group=COMMAND_GROUP), key=lambda entry: entry.name)
    return [*own, *((entry.name, entry.value, entry.load) for entry in plugins)]


def _load(place: str) -> Any:
    module, _, function = place.partition(":")
    return getattr(importlib.import_module(module), function)


def _not_loaded() -> None:
    """Placeholder for a command that this command line does not name."""


def summary_of(place: str) -> str | None:
    """The first paragraph about module:name: of the function's docstring, of a group's `help`, or of the module's docstring. It is
    read from the source, without importing it; None when there is no source."""
    module, _, name = place.partition(":")
    try:
        spec = importlib.util.find_spec(module)
        tree = ast.parse(Path(spec.origin).read_bytes()) if spec is not None and spec.origin else None
    except (ImportError, OSError, SyntaxError):
        return None
    if tree is None:
        return None
    text = ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            text = ast.get_docstring(node)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name and isinstance(node.value, ast.Call):
            helps = [word.value for word in node.value.keywords if word.arg == "help"]
            text = str(helps[0].value) if helps and isinstance(helps[0], ast.Constant) else text
    return text.split("\n\n")[0] if text else None


def allow_open_files() -> None:
    """Raise the limit of open files as far as the system lets this user: every connection is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass  # the current limit has to do


def main() -> None:
    """The `pixiu` command."""
    allow_open_files()
    print_anywhere()
    # Libraries' warnings (a reconnect, a retry) go where the user asked for logs: nowhere by default.
    logging.getLogger().addHandler(logging.NullHandler())
    app = application(None if COMPLETION in os.environ else sys.argv[1:])
    try:
        code = app(prog_name="pixiu", standalone_mode=False)
    except typer.Abort:
        asked = sys.stdin is not None and sys.stdin.isatty()
        why = "" if asked else ": the question was not answered; use --yes where there is no terminal"
        sys.stderr.write(f"\npixiu: nothing was done{why}\n")
        sys.exit(EXIT_ABORTED)
    except Exception as error:
        from tools.cli.wrong_use import is_wrong_use, sentence_of  # not needed by most command lines

        if not is_wrong_use(error):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]  # the help
        else:
            sys.stderr.write(f"pixiu: {sentence_of(error)}\n")
        sys.exit(getattr(error, "exit_code", EXIT_WRONG))
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
