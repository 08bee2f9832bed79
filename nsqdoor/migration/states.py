"""The phases of topics in the registry: ROOT/nsq/migration/TOPIC. A topic that is not there is in phase 0.

Source: docs/nsq.md, "Moving from NSQ".
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Final

from cluster.core import log
from nsqdoor.migration.phases import Phase, decode, encode
from pixiu.discovery.operations import NodeExists, NoNode, SessionEvent, WatchEvent
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import MalformedData, PixiuError

FOLDER: Final = "nsq/migration"
POLL_S: Final = 15.0
LEAST_S: Final = 0.2
"""Least time between two readings, seconds."""
MAX_TOPICS: Final = 10_000
UNREADABLE: Final = "nsq_migration_unreadable"


async def read(zookeeper: ZooKeeper, root: str, topic: str) -> tuple[Phase, int]:
    """The phase of a topic and its node's version; -1: it has none. Raises `MalformedData`, `RegistryUnavailable`."""
    try:
        data, stat = await zookeeper.get(f"{root}/{FOLDER}/{topic}")
    except NoNode:
        return Phase.OLD, -1
    return decode(data), stat.version


async def read_all(zookeeper: ZooKeeper, root: str) -> dict[str, Phase]:
    """The phases of all topics that have one. Raises `RegistryUnavailable`."""
    found: dict[str, Phase] = {}
    try:
        names = await zookeeper.children(f"{root}/{FOLDER}")
    except NoNode:
        return found
    for name in names[:MAX_TOPICS]:
        with contextlib.suppress(NoNode, MalformedData):
            found[name] = decode((await zookeeper.get(f"{root}/{FOLDER}/{name}"))[0])
    return found


async def write(zookeeper: ZooKeeper, root: str, topic: str, phase: Phase, by: str, version: int) -> None:
    """Set a topic's phase, if nobody has changed it since `read`. Raises `RegistryConflict`, `RegistryUnavailable`."""
    path, data = f"{root}/{FOLDER}/{topic}", encode(phase, by, time.time_ns() // 1_000_000)
    if version < 0:
        with contextlib.suppress(NodeExists):
            await zookeeper.ensure_path(f"{root}/{FOLDER}")
        await zookeeper.create(path, data)
    else:
        await zookeeper.set(path, data, version)


class States:
    """Follows the phases of all topics. While the registry is away they stay as they were.

    Args:
        zookeeper: a session.
        root: the cluster's root.
    """

    def __init__(self, zookeeper: ZooKeeper, root: str) -> None:
        self._zookeeper, self._root = zookeeper, root
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.phases: Mapping[str, Phase] = {}

    async def start(self) -> None:
        """Read all, and follow them. Raises `RegistryUnavailable`."""
        await self._look()
        self._zookeeper.add_listener(self._on_session)
        self._task = asyncio.create_task(self._follow(), name="nsq-migration")

    async def close(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def of(self, topic: str) -> Phase:
        """The phase of a topic."""
        return self.phases.get(topic, Phase.OLD)

    def _on_session(self, _event: SessionEvent) -> None:
        self._changed.set()

    def _on_change(self, _event: WatchEvent) -> None:
        self._changed.set()

    async def _look(self) -> None:
        await self._zookeeper.watch_below(f"{self._root}/{FOLDER}", self._on_change)
        self.phases = await read_all(self._zookeeper, self._root)

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self._look()
            except PixiuError as error:
                if log.once_per(60, UNREADABLE):
                    log.get_logger().warning(UNREADABLE, error=str(error))
            await asyncio.sleep(LEAST_S)
