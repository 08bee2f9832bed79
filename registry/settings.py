"""Writes the settings that change while the cluster runs, and an audit of the changes, in one transaction.

Source: docs/operations.md, "Change a setting while all runs".
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Final

from cluster.settings.live_settings import Settings, changed
from pixiu.discovery import paths
from pixiu.discovery.operations import Create, NoNode, Operation, RegistryConflict, Set
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import Unavailable
from registry.mailbox import data_at

MAX_TRIES: Final = 20
AUDIT_LINES: Final = 100
"""Number of changes that are kept. Policy: the oldest go."""


async def read_settings(zookeeper: ZooKeeper, root: str) -> Settings:
    """Read the present settings. Raises `MalformedData`, `RegistryUnavailable`."""
    return (await _read(zookeeper, root))[0]


async def read_changes(zookeeper: ZooKeeper, root: str) -> list[dict[str, Any]]:
    """Read the audit of changes, the newest last. Raises `RegistryUnavailable`."""
    return [json.loads(line) for line in (await data_at(zookeeper, paths.settings_changes(root))).decode().splitlines()]


async def change_settings(
    zookeeper: ZooKeeper, root: str, wanted: Mapping[str, Any], operator: str
) -> tuple[Settings, dict[str, Any]]:
    """Set values, and unset those that are None. Returns the new settings, and the changes. Writes nothing if nothing changes.

    Raises `Unavailable` when others keep writing, `MalformedData`, `RegistryUnavailable`.
    """
    await zookeeper.ensure_path(root)
    for _ in range(MAX_TRIES):
        before, version = await _read(zookeeper, root)
        values = {name: value for name, value in {**before.values, **wanted}.items() if value is not None}
        differs = changed(before.values, values)
        if not differs:
            return before, {}
        after = Settings(before.version + 1, values, operator)
        path, lines = paths.settings(root), paths.settings_changes(root)
        head: Operation = Set(path, after.to_json(), version) if version >= 0 else Create(path, after.to_json())
        try:
            await zookeeper.transaction([head, await _audit(zookeeper, lines, after.version, operator, differs)])
        except RegistryConflict:
            continue
        return after, differs
    raise Unavailable(f"the settings at {root} were changed by others {MAX_TRIES} times in a row; try again")


async def _read(zookeeper: ZooKeeper, root: str) -> tuple[Settings, int]:
    """Read the settings, and the version of their node; -1: there is none."""
    try:
        data, stat = await zookeeper.get(paths.settings(root))
    except NoNode:
        return Settings(), -1
    return Settings.from_json(data), stat.version


async def _audit(zookeeper: ZooKeeper, path: str, version: int, operator: str, differs: Mapping[str, Any]) -> Operation:
    line = json.dumps(
        {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "operator": operator, "version": version, "settings": differs}
    )
    try:
        data, stat = await zookeeper.get(path)
    except NoNode:
        return Create(path, line.encode())
    return Set(path, "\n".join([*data.decode().splitlines()[1 - AUDIT_LINES :], line]).encode(), stat.version)
