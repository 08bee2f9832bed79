"""`python -m node --config FILE`: several roles in one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from cluster.process.host import EXIT_ENVIRONMENT, EXIT_OK, Role, run_roles
from cluster.settings import command
from node.options import example, load, tables
from pixiu.errors import ConfigurationError
from registry.membership import Membership

ABOUT = "Run several roles of a Pixiu cluster in one process until SIGTERM or Ctrl-C, which drain it; a second one ends it at once."


def main(argv: Sequence[str]) -> int:
    """Run a node. Returns its exit code. argv: the arguments without the program's name."""
    try:
        wanted = command.parse_arguments("node", ABOUT, tables(), argv)
        if wanted.show_example:
            print(example())
            return EXIT_OK
        cluster, entries = load(wanted.config, os.environ, wanted.overrides)
    except ConfigurationError as error:
        print(f"node: wrong options:\n{error}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    roles = [Role(entry.role, cluster, entry.options, import_module(f"{entry.role}.service").Service) for entry in entries]
    return run_roles(roles, wanted.config, Membership)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
