"""Output of all commands: tables for people, JSON for programs, one clear line for an error."""

from __future__ import annotations

import functools
import getpass
import io
import json
import math
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final, NoReturn, ParamSpec, TypeVar

import typer

from pixiu.errors import Dropped, InvalidArgument, Offline, PixiuError, Undelivered
from pixiu.ids import MAX_ID

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_TARGET: Final = "zk://127.0.0.1:2181/pubsub"
EXIT_NOT_DELIVERED: Final = 1
"""Exit code if the cluster took the message, and reports that it was not delivered."""
EXIT_UNUSABLE: Final = 2
"""Exit code of an error on our side: wrong arguments, no cluster."""
EXIT_INTERRUPTED: Final = 130
NOT_DELIVERED: Final = (Offline, Undelivered, Dropped)
PIPE_WIDTH: Final = 200
"""Width of tables in a file or a pipe, in columns, so that nothing is cut."""
FILES: Final = frozenset(("file", "mentions", "replay"))
"""Parameters of type `str` that name files, whose names may have any bytes."""
_DOUBTFUL: Final = re.compile(r"[^ -~]+")
"""Characters among which some may not be printable."""

Target = Annotated[
    str,
    typer.Option(
        "--target",
        "-t",
        envvar="PIXIU_TARGET",
        help="The cluster: zk://HOST:PORT/ROOT, or HOST:PORT,… of proxies.",
        metavar="TARGET",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]

P = ParamSpec("P")
T = TypeVar("T")


def console() -> Console:
    """Console for results. Only commands with output load it."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def error_console() -> Console:
    """Console for progress and errors, so that the output stays clean."""
    from rich.console import Console

    return Console(stderr=True, width=None if sys.stderr.isatty() else PIPE_WIDTH)


def print_json(value: object, *, indent: int | None = None) -> None:
    """Print one JSON value on its own line (or lines, with an indent). Only ASCII if the output's encoding lacks characters."""
    every = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    sys.stdout.write(json.dumps(value, ensure_ascii=not every, indent=indent, default=str) + "\n")
    sys.stdout.flush()


def print_text(text: object) -> None:
    """Print a text as it is: without styles, and with no line breaks of our own."""
    console().print(str(text), highlight=False, markup=False, soft_wrap=True)


def print_result(value: object, text: object, *, as_json: bool) -> None:
    """Print a result as JSON, or as text for people."""
    if as_json:
        print_json(value)
    else:
        print_text(text)


def print_anywhere() -> None:
    """Escape characters that the encoding of the terminal or pipe does not have, such as an emoji in Latin-1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def shown_time(unix_ms: int) -> str:
    """Format a time of the cluster, in UTC."""
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def visible(text: str) -> str:
    """Escape the control characters of a text from outside, so that it cannot move the cursor or hide a line."""
    return text if text.isprintable() else _DOUBTFUL.sub(_escaped, text)


def _escaped(run: re.Match[str]) -> str:
    text = run[0]
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def check_arguments(given: Mapping[str, object]) -> None:
    """Check a command's arguments by name: texts are Unicode, and numbers fit into 64 bits. Paths may have any bytes.

    Raises `InvalidArgument`.
    """
    for name, value in given.items():
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, str) and name not in FILES and not _is_unicode(each):
                raise InvalidArgument(f"{os.fsencode(each)!r} is not UTF-8: an argument is text")
            if isinstance(each, int) and not -MAX_ID <= each <= MAX_ID:
                raise InvalidArgument(f"{each} is out of range: a number is from -{MAX_ID} to {MAX_ID}")
            if isinstance(each, float) and not math.isfinite(each):
                raise InvalidArgument(f"{each} is out of range: a number must be finite")


def _is_unicode(text: str) -> bool:
    """False for a text with bytes that could not be decoded, which Python keeps as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def guarded(command: Callable[P, T]) -> Callable[P, T]:
    """Decorate a command: errors become one line on stderr and exit code 2, without a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            check_arguments(kwargs)
            return command(*args, **kwargs)
        except PixiuError as error:
            fail(error, as_json=bool(kwargs.get("as_json")))
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            # The reader of our output is gone; nothing may be written at the exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_UNUSABLE) from None

    return run


def fail(error: PixiuError, *, as_json: bool = False) -> NoReturn:
    """Report an error and exit with 2, or with 1 if the command was right and the cluster answered no."""
    if as_json:
        print_json({"error": {"code": error.code, "text": str(error)}})
    sys.stderr.write(f"pixiu: {error}\n")
    raise typer.Exit(EXIT_NOT_DELIVERED if isinstance(error, NOT_DELIVERED) else EXIT_UNUSABLE)


def operator() -> str:
    """User who runs a command, for audit logs; for a user without a name, as in containers, their number."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = f"uid-{os.getuid()}"
    return f"{name}@{socket.gethostname()}"
