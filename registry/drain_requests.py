"""Requests to drain: an operator's tool puts one into the registry, and the process that it names drains as on SIGTERM.

    tool                                        process
      │ creates ROOT/drain/ENDPOINT, ephemeral    │ watches that node
      ├──────────────── registry ────────────────▶│ Draining, hands over, leaves
      │ waits until its node is gone              │

Everybody who may write the registry may ask; a caller who can only reach a process's port may not. A request names one run of a
process, so that no later run takes it up, and ends with the tool.

Source: docs/registry.md, "Requests of operators".
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from pixiu.discovery import paths
from pixiu.discovery.node import Node
from pixiu.discovery.zookeeper import NodeExists, NoNode, ZooKeeper
from pixiu.errors import MalformedData, Unavailable
from registry.restorer import Restorer

MAX_BACKOFF_S: Final = 5.0
MAX_WORDS: Final = 200
"""Maximum length of a request, characters."""
POLL_S: Final = 0.2


class DrainRequests:
    """Watches for requests to drain this process.

    Args:
        zookeeper: the process's session.
        root: the cluster's root.
        endpoint: the endpoint of this run of the process.
        asked: called in the event loop with the requester's name; maybe more than once.

    Source: docs/operations.md, "Draining and adding processes".
    """

    def __init__(self, zookeeper: ZooKeeper, root: str, endpoint: int, asked: Callable[[str], None]) -> None:
        self._zookeeper = zookeeper
        self._path = paths.drain(root, endpoint)
        self._asked = asked
        self._restorer = Restorer(zookeeper, self._look, "the watch for requests to drain", MAX_BACKOFF_S)

    def start(self) -> None:
        """Start watching; survives losses of the session."""
        self._restorer.start()

    async def stop(self) -> None:
        """Stop watching."""
        await self._restorer.stop()

    async def _look(self) -> None:
        if await self._zookeeper.exists(self._path, self._restorer.on_watch) is None:
            return
        with contextlib.suppress(NoNode, MalformedData):
            data, _ = await self._zookeeper.get(self._path)
            self._asked(data.decode(errors="replace")[:MAX_WORDS])


@asynccontextmanager
async def drain_request(zookeeper: ZooKeeper, root: str, node: Node, by: str) -> AsyncIterator[None]:
    """Keep a request to one process in the registry while the block runs, or until the tool dies.

    Raises `Unavailable` when another command already drains it, `RegistryUnavailable`.
    """
    path = paths.drain(root, node.endpoint)
    try:
        await zookeeper.create(path, by.encode(), ephemeral=True, make_parents=True)
    except NodeExists:
        raise Unavailable(f"{node.role} at {node.address} is being drained by another command already") from None
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # it goes with the session
            await zookeeper.delete(path)


async def drain_process(zookeeper: ZooKeeper, root: str, node: Node, by: str, timeout_s: float) -> None:
    """Ask a process to drain, and wait until it has left the registry.

    by: the requester, for the process's log. timeout_s: seconds to wait.

    Raises `Unavailable` when it does not leave in time, or is being drained by another command, `RegistryUnavailable`.

    Source: docs/operations.md, "Draining and adding processes".
    """
    place = f"{paths.node_prefix(root, node.role, node.partition)}{node.replica:010d}"
    until = time.monotonic() + timeout_s
    async with drain_request(zookeeper, root, node, by):
        while await zookeeper.exists(place) is not None:
            if time.monotonic() >= until:
                raise Unavailable(
                    f"{node.role} at {node.address} has not left after {timeout_s:g} s: its log says why (pid {node.pid})"
                )
            await asyncio.sleep(POLL_S)
