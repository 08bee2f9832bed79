"""The mark that `pixiu up` leaves in the registry. It shows tools that a supervisor starts and ends processes as the layout
wants.

Source: docs/operations.md, "Draining and adding processes".
"""

from __future__ import annotations

import os
import socket
from typing import Final

from pixiu.discovery import paths
from pixiu.discovery.zookeeper import NodeExists, NoNode, ZooKeeper
from registry.restorer import Restorer

MAX_BACKOFF_S: Final = 5.0


class SupervisorMark:
    """An ephemeral node that exists while this process runs a cluster."""

    def __init__(self, zookeeper: ZooKeeper, root: str) -> None:
        self._zookeeper, self._path = zookeeper, paths.supervisor(root)
        self._restorer = Restorer(zookeeper, self._put, "the mark of the supervisor", MAX_BACKOFF_S)

    def start(self) -> None:
        """Put the node there, and again after every loss of the session."""
        self._restorer.start()

    async def stop(self) -> None:
        """Stop restoring the node; it ends with the session."""
        await self._restorer.stop()

    async def _put(self) -> None:
        stat = await self._zookeeper.exists(self._path, self._restorer.on_watch)
        if stat is None:
            try:
                await self._zookeeper.create(
                    self._path, f"{socket.gethostname()} (pid {os.getpid()})".encode(), ephemeral=True, make_parents=True
                )
            except NodeExists:
                return  # another one's, or an earlier session's: the watch reports when it is gone


async def supervisor_of(zookeeper: ZooKeeper, root: str) -> str:
    """Describe the `pixiu up` that runs the cluster; empty if there is none. Raises `RegistryUnavailable`."""
    try:
        data, _ = await zookeeper.get(paths.supervisor(root))
    except NoNode:
        return ""
    return data.decode(errors="replace")
