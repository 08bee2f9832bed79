"""Finds wrong options of `pixiu up` before anything starts: each role's own options read the file and the --set values."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from cluster.settings.fields import unknown
from cluster.settings.options import RoleOptions, load_options
from pixiu.discovery.paths import ROLES
from pixiu.errors import ConfigurationError

GIVEN: Final = "run"
"""Stands for the folder that each process gets."""


def overrides_for(role: str, settings: Sequence[str]) -> dict[str, str]:
    """Return the part of `TABLE.KEY=VALUE` that is for a role: its own keys, and `cluster.KEY`."""
    found: dict[str, str] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        table, _, key = name.partition(".")
        if table in ("cluster", role):
            found[f"cluster.{key}" if table == "cluster" else key] = value
    return found


def check_settings(roles: Sequence[str], settings: Sequence[str], config: Path | None, environ: Mapping[str, str]) -> None:
    """Read every role's options as its processes will. Raises ConfigurationError with one line for each error."""
    wrong: list[str] = []
    for setting in settings:
        table = setting.partition(".")[0]
        if table != "cluster" and table not in ROLES:
            wrong.append(f"--set {setting}: {unknown('table', table, {'cluster', *ROLES})}")
        elif table in ROLES and table not in roles:
            wrong.append(f"--set {setting}: this cluster has no {table}")
    for role in roles:
        options: type[RoleOptions] = importlib.import_module(f"{role}.options").Options
        try:
            load_options(role, options, config, environ, {"data_dir": GIVEN, **overrides_for(role, settings)})
        except ConfigurationError as error:
            wrong += [line for line in str(error).splitlines() if line not in wrong]
    if wrong:
        raise ConfigurationError("\n".join(wrong))
