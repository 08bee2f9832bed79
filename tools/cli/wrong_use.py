"""Errors of command lines that cannot be parsed: one line with the value at fault, like every other error."""

from __future__ import annotations

import difflib
from typing import Any, Final

SERVERS: Final = frozenset((
    "acl", "add-replica", "audit", "bridge", "config", "console", "doctor", "double", "drain", "keys", "kick", "layout", "nsq",
    "nsq-proxy", "passwd", "pipeline", "pki", "promote", "registry", "remove-replica", "repair", "rolling-restart", "routes",
    "support-bundle", "token", "up", "zookeeper",
))  # fmt: skip
"""Commands of other packages than `tools/`; most need what the extra `server` installs."""
CLOSE: Final = 0.6
"""Similarity at which a word counts as a misspelling of another one."""


def is_wrong_use(error: BaseException) -> bool:
    """True if an exception is the parser's, of any version, and not a command's."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def sentence_of(error: Any) -> str:
    """Describe the error, with the value, and name the help to read."""
    context = getattr(error, "ctx", None)
    text = _with_value(error) or _with_names(error, context) or str(error.format_message()).rstrip(".")
    path = getattr(context, "command_path", "") or "pixiu"
    return f"{text}{' See' if text.endswith('?') else '; see'} `{path} --help`"


def _with_value(error: Any) -> str:
    """Describe a wrong value of an option or argument, if the parser names it."""
    cause = error.__cause__
    parameter = getattr(error, "param", None)
    if parameter is None or not hasattr(cause, "errors"):
        return ""
    first = cause.errors()[0]
    said = first["msg"].split(", unable")[0].replace("Input should be", "must be").replace("a valid integer", "an integer")
    name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.metavar or parameter.name.upper()
    return f"{name} {first['input']}: {said}"


def _with_names(error: Any, context: Any) -> str:
    """Describe an unknown option or command."""
    command: Any = getattr(context, "command", None)
    option = getattr(error, "option_name", "")
    if option and hasattr(error, "possibilities"):
        known = [name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)] if command else []
        return f"there is no option {option}" + _meant(option, [name for name in known if name.startswith("--")])
    said = str(error.format_message())
    if said.startswith("No such command") and hasattr(command, "commands"):
        word = said.split("'")[1]
        if word in SERVERS and getattr(context, "parent", None) is None:
            return f"{word} needs packages of the servers: pip install 'pixiu-sdk[server]'"
        return f"there is no command {word}; known: {', '.join(sorted(command.commands))}{_meant(word, command.commands)}"
    return ""


def _meant(word: str, known: Any) -> str:
    bare = {name.lstrip("-"): name for name in known}
    close = difflib.get_close_matches(word.lstrip("-"), bare, n=1, cutoff=CLOSE)
    return f". Did you mean {bare[close[0]]}?" if close else ""
