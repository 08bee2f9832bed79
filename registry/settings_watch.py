"""Watches for settings that change while a process runs.

Source: docs/operations.md, "Change a setting while all runs".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pixiu.discovery import paths
from pixiu.discovery.zookeeper import NoNode, ZooKeeper
from registry.restorer import Restorer

MAX_BACKOFF_S: Final = 5.0


class SettingsWatch:
    """Watches the node of settings, through losses of the session.

    Args:
        zookeeper: the process's session.
        root: the cluster's root.
        told: called in the event loop with the node's data at the start and after every change; empty: there is none.
    """

    def __init__(self, zookeeper: ZooKeeper, root: str, told: Callable[[bytes], None]) -> None:
        self._zookeeper, self._path, self._told = zookeeper, paths.settings(root), told
        self._restorer = Restorer(zookeeper, self._look, "the watch for settings", MAX_BACKOFF_S)

    def start(self) -> None:
        """Start watching."""
        self._restorer.start()

    async def stop(self) -> None:
        """Stop watching."""
        await self._restorer.stop()

    async def _look(self) -> None:
        data = b""
        if await self._zookeeper.exists(self._path, self._restorer.on_watch) is not None:
            try:
                data, _ = await self._zookeeper.get(self._path)
            except NoNode:
                data = b""
        self._told(data)
