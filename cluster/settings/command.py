"""The command line of every role and of a node: python -m ROLE --config FILE --set KEY=VALUE …"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.settings.fields import field_docs, specs, toml_value, unknown
from cluster.settings.options import ClusterOptions, Options, RoleOptions
from pixiu.errors import ConfigurationError
from pixiu.version import __version__

MAX_OVERRIDES = 256
"""Maximum number of --set in one command line."""


@dataclass(frozen=True, slots=True)
class Command:
    """A parsed command line."""

    config: str | None
    overrides: dict[str, str]
    show_example: bool


@dataclass(frozen=True)
class Table:
    """A table of options that a program takes.

    Args:
        keys: those of its options that the help shows; by default all.
    """

    name: str
    options: type[Options]
    keys: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", self.keys or list(specs(self.options)))


def parse(role: str, options_type: type[RoleOptions], argv: Sequence[str]) -> Command:
    """Parse a role's arguments. See `parse_arguments`."""
    about = f"Run one {role} of a Pixiu cluster until SIGTERM or Ctrl-C, which drain it; a second one ends it at once."
    return parse_arguments(role, about, [Table(role, options_type), Table("cluster", ClusterOptions)], argv)


def parse_arguments(module: str, about: str, tables: Sequence[Table], argv: Sequence[str]) -> Command:
    """Parse the arguments of `python -m MODULE` (without the program's name).

    tables: the first one's keys need no table in --set.

    Exits by SystemExit as argparse does: 0 after --help and --version, 2 on unknown arguments.
    Raises ConfigurationError on a --set without «=» or given twice for one key.
    """
    parser = _Parser(
        tables,
        prog=f"python -m {module}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with [cluster] and [{module}]")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="an option; wins over environment and file; cluster.KEY for [cluster]; repeatable",
    )
    parser.add_argument("--example", action="store_true", help="print a configuration file with every option, and exit")
    parser.add_argument("--version", action="version", version=f"pixiu {__version__}")
    found = parser.parse_args(list(argv))
    if len(found.overrides) > MAX_OVERRIDES:
        raise ConfigurationError(f"--set: given {len(found.overrides)} times: must be at most {MAX_OVERRIDES}")
    overrides: dict[str, str] = {}
    for text in found.overrides:
        key, equals, value = text.partition("=")
        if not equals:
            first, *further = tables
            known = [*first.keys, *(f"{table.name}.{name}" for table in further for name in table.keys)]
            raise ConfigurationError(
                f"--set {key}: must be KEY=VALUE; {unknown('option', key, known)}"
                if key not in known
                else f"--set {key}: must be {key}=VALUE"
            )
        if key in overrides:
            raise ConfigurationError(f"--set {key}: given twice")
        overrides[key] = value
    return Command(found.config, overrides, found.example)


class _Parser(argparse.ArgumentParser):
    """A parser whose help lists the options of tables, by their docstrings in the source: reading it takes longer than the rest of
    a start, so nothing else does."""

    def __init__(self, tables: Sequence[Table], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._tables = tables

    def format_help(self) -> str:
        """See `argparse`."""
        self.epilog = _options_help(self._tables)
        return super().format_help()


def _options_help(tables: Sequence[Table]) -> str:
    variables = " and ".join(f"PIXIU_{table.name.upper()}_KEY" for table in tables[:2])
    lines = [f"options (in the file's tables, as --set, or as {variables}):"]
    for table in tables:
        lines.append(f"\n[{table.name}]")
        docs, of_table = field_docs(table.options), specs(table.options)
        for key in table.keys:
            lines.append(f"  {key} = {toml_value(of_table[key].default)}")
            lines.append(f"      {docs.get(key, '')} ({of_table[key].describe()})")
    return "\n".join(lines)
