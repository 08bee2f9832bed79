"""A process of several idle roles. Started by test_node_process.py: `idle_node.py REGISTRY NAME=KEY=VALUE,… NAME=…`."""

from __future__ import annotations

import sys
from typing import Any

from cluster.process.host import Role, run_roles
from cluster.settings.options import load_options
from registry.membership import Membership
from tests.cluster.process.idle_role import Idle, Options


def role_of(text: str, registry: str) -> Role[Any]:
    name, _, said = text.partition("=")
    role, _, partition = name.partition("-")
    overrides = dict(each.split("=") for each in said.split(",") if each)
    overrides |= {"registry": registry, "partition": partition, "log_format": "json"}
    return Role(role, *load_options(role, Options, None, {}, overrides), Idle)


if __name__ == "__main__":
    sys.exit(run_roles([role_of(text, sys.argv[1]) for text in sys.argv[2:]], None, Membership))
