"""The command line of every role: python -m ROLE --config FILE --set KEY=VALUE …"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.settings.fields import field_docs, specs, toml_value, unknown
from cluster.settings.options import ClusterOptions, RoleOptions
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


def parse(role: str, options_type: type[RoleOptions], argv: Sequence[str]) -> Command:
    """Parse a role's arguments (without the program's name).

    Exits by SystemExit as argparse does: 0 after --help and --version, 2 on unknown arguments.
    Raises ConfigurationError on a --set without «=» or given twice for one key.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {role}",
        description=f"Run one {role} of a Pixiu cluster until SIGTERM or Ctrl-C, which drain it; a second one ends it at once.",
        epilog=_options_help(role, options_type),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with [cluster] and [{role}]")
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
            known = [*specs(options_type), *(f"cluster.{name}" for name in specs(ClusterOptions))]
            raise ConfigurationError(
                f"--set {key}: must be KEY=VALUE; {unknown('option', key, known)}"
                if key not in known
                else f"--set {key}: must be {key}=VALUE"
            )
        if key in overrides:
            raise ConfigurationError(f"--set {key}: given twice")
        overrides[key] = value
    return Command(found.config, overrides, found.example)


def _options_help(role: str, options_type: type[RoleOptions]) -> str:
    lines = [f"options (in the file's tables, as --set, or as PIXIU_{role.upper()}_KEY and PIXIU_CLUSTER_KEY):"]
    tables: tuple[tuple[str, type], ...] = ((role, options_type), ("cluster", ClusterOptions))
    for table, of_table in tables:
        lines.append(f"\n[{table}]")
        docs = field_docs(of_table)
        for key, spec in specs(of_table).items():
            lines.append(f"  {key} = {toml_value(spec.default)}")
            lines.append(f"      {docs.get(key, '')} ({spec.describe()})")
    return "\n".join(lines)
