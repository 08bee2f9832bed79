"""Nodes through which tools and processes ask each other for something, and keep asking over lost sessions.

    tool                                        process
      │ `posted`: creates an ephemeral node       │ `Mailbox` watches that node, or `Requests` the nodes beside it
      ├──────────────── registry ────────────────▶│ acts
      │ deletes it when its block ends            │

Everybody who may write the registry may ask; a caller who can only reach a process's port may not.

Source: docs/registry.md, "Requests of operators".
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from pixiu.discovery.operations import NodeExists, NoNode
from pixiu.discovery.zookeeper import ZooKeeper
from registry.restorer import Restorer

MAX_REQUESTS: Final = 1000
"""Maximum number of requests in one directory that a process looks at."""
MAX_REQUEST: Final = 4096
"""Maximum size of a request in a directory, bytes."""


async def data_at(zookeeper: ZooKeeper, path: str) -> bytes:
    """Read a node's data; empty if it does not exist. Raises `MalformedData`, `RegistryUnavailable`."""
    try:
        return (await zookeeper.get(path))[0]
    except NoNode:
        return b""


@asynccontextmanager
async def posted(zookeeper: ZooKeeper, path: str, request: str, *, sequence: bool = False) -> AsyncIterator[None]:
    """Keep a request in the registry while the block runs, or until the tool dies. Raises `NodeExists`, `RegistryUnavailable`."""
    made = await zookeeper.create(path, request.encode(), ephemeral=True, sequence=sequence, make_parents=True)
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # it goes with the session
            await zookeeper.delete(made)


class Mailbox(Restorer):
    """Watches one node.

    Args:
        zookeeper: the process's session.
        path: the node; it need not exist.
        told: called in the event loop with the node's data at the start and after every change, maybe more than once; empty: it
            does not exist.
    """

    def __init__(self, zookeeper: ZooKeeper, path: str, told: Callable[[bytes], None]) -> None:
        super().__init__(zookeeper, self._look, f"the watch of {path}")
        self._path, self._told = path, told

    async def _look(self) -> None:
        there = await self._zookeeper.exists(self._path, self.on_watch) is not None
        self._told(await data_at(self._zookeeper, self._path) if there else b"")


class Requests(Restorer):
    """Watches the children of a node.

    Args:
        zookeeper: the process's session.
        directory: the node; it is created if it does not exist.
        told: called in the event loop with each child's data, once.
    """

    def __init__(self, zookeeper: ZooKeeper, directory: str, told: Callable[[str], object]) -> None:
        super().__init__(zookeeper, self._look, f"the watch of {directory}")
        self._directory, self._told = directory, told
        self._done: set[str] = set()

    async def _look(self) -> None:
        await self._zookeeper.ensure_path(self._directory)
        names = (await self._zookeeper.children(self._directory, self.on_watch))[:MAX_REQUESTS]
        self._done &= set(names)
        for name in names:
            if name not in self._done:
                data = await data_at(self._zookeeper, f"{self._directory}/{name}")
                self._told(data[:MAX_REQUEST].decode(errors="replace"))
                self._done.add(name)


class Mark(Restorer):
    """An ephemeral node that exists while this process runs. Another process's stays until it ends."""

    def __init__(self, zookeeper: ZooKeeper, path: str, text: str) -> None:
        super().__init__(zookeeper, self._put, f"the mark at {path}")
        self._path, self._text = path, text

    async def _put(self) -> None:
        if await self._zookeeper.exists(self._path, self.on_watch) is None:
            with contextlib.suppress(NodeExists):  # the watch reports when it is gone
                await self._zookeeper.create(self._path, self._text.encode(), ephemeral=True, make_parents=True)
