"""A partition in ZooKeeper as its replicas see it: the state, changed by compare-and-set, and the live replicas.

Presence is read here and not taken from the process's view, which keeps vanished nodes for a while: a leader is replaced when its
node is gone, and only ZooKeeper's state decides by which replica.

Source: docs/registry.md, docs/replication.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from cluster.core.log import once_per
from cluster.process.context import Context
from cluster.replication.core.events import CompareAndSetOutcome
from cluster.replication.model import MemberID, PartitionState, Presence, Versioned
from cluster.replication.peers.wire import decode_state, encode_state
from pixiu.discovery import paths
from pixiu.discovery.node import Node
from pixiu.discovery.operations import NodeExists, NoNode, RegistryConflict, SessionEvent, SessionState, WatchEvent
from pixiu.errors import MalformedData, RemoteError

POLL_S: Final = 5.0
"""Interval at which presence is read, even with watches, seconds."""
RETRY_S: Final = 0.3
SWAP_TIMEOUT_S: Final = 3.0
"""Time after which a compare-and-set without an answer has an unknown outcome, seconds."""
MAX_LIVE: Final = 64
"""Replicas of a partition that are considered. Policy: the oldest stay."""
STATE_MALFORMED: Final = "replica_state_malformed"


@dataclass(frozen=True, slots=True)
class LiveReplica:
    """A registered replica and its node."""

    presence: Presence
    node: Node

    @property
    def address(self) -> str:
        """Address (host:port)."""
        return self.node.address


class PartitionRegistry:
    """The partition of one process.

    Args:
        context: the process's context.
        on_state: called with the state as read; None if the read failed.
        on_swapped: called with the token and the outcome of its compare-and-set.
        on_presence: called with the live replicas by member, each by its newest registration.
    """

    def __init__(
        self,
        context: Context[Any],
        on_state: Callable[[Versioned | None], None],
        on_swapped: Callable[[int, CompareAndSetOutcome], None],
        on_presence: Callable[[dict[MemberID, LiveReplica]], None],
    ) -> None:
        self._context, self._zookeeper = context, context.zookeeper
        self._on_state, self._on_swapped, self._on_presence = on_state, on_swapped, on_presence
        partition = int(context.options.partition)
        self._directory = paths.partition_directory(context.root, context.role, partition)
        self._path = paths.partition_state(context.root, context.role, partition)
        self._nodes: dict[str, LiveReplica | None] = {}
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading = False
        self._read_again = False
        self.counts = {"state_conflicts_total": 0, "state_unknown_total": 0, "state_malformed_total": 0, "state_changes_total": 0}

    async def start(self) -> None:
        """Start watching."""
        self._zookeeper.add_listener(self._on_session)
        self._wake.set()
        self._begin(self._watch_presence())

    async def close(self) -> None:
        """Stop; no callback is called afterwards."""
        self._zookeeper.remove_listener(self._on_session)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._context.crash(error)

    # --- the state

    def read(self) -> None:
        """Read the state; the result is not older than this call. At most one read runs and one waits."""
        self._read_again = True
        if not self._reading:
            self._reading = True
            self._begin(self._read())

    async def _read(self) -> None:
        try:
            while self._read_again:
                self._read_again = False
                found = await self._read_once()
                if not self._read_again:
                    self._on_state(found)
        finally:
            self._reading = False

    async def _read_once(self) -> Versioned | None:
        try:
            await self._zookeeper.sync(self._path)
            try:
                data, stat = await self._zookeeper.get(self._path, self._on_state_watch)
            except NoNode:
                if await self._zookeeper.exists(self._path, self._on_state_watch) is not None:
                    self._read_again = True
                    return None
                return Versioned(-1, None)
            return Versioned(stat.version, decode_state(data))
        except MalformedData as error:
            # Never treated as a missing state: an operator must look.
            self.counts["state_malformed_total"] += 1
            if once_per(60, STATE_MALFORMED):
                self._context.log.error(STATE_MALFORMED, path=self._path, text=str(error))
        except RemoteError:
            pass
        return None

    def _on_state_watch(self, _event: WatchEvent) -> None:
        self.read()

    def swap(self, token: int, expected: int, state: PartitionState) -> None:
        """Set the state if its version is `expected` (-1: create it)."""
        self._begin(self._swap(token, expected, encode_state(state)))

    async def _swap(self, token: int, expected: int, data: bytes) -> None:
        try:
            async with asyncio.timeout(SWAP_TIMEOUT_S):
                if expected < 0:
                    await self._zookeeper.create(self._path, data)
                else:
                    await self._zookeeper.set(self._path, data, expected)
            outcome = CompareAndSetOutcome.OK
        except NodeExists:
            outcome = CompareAndSetOutcome.CONFLICT
        except RegistryConflict:
            outcome = CompareAndSetOutcome.CONFLICT
        except (RemoteError, TimeoutError):
            outcome = CompareAndSetOutcome.UNKNOWN
        names = {
            CompareAndSetOutcome.OK: "changes",
            CompareAndSetOutcome.CONFLICT: "conflicts",
            CompareAndSetOutcome.UNKNOWN: "unknown",
        }
        self.counts[f"state_{names[outcome]}_total"] += 1
        self._on_swapped(token, outcome)

    # --- presence

    def _on_session(self, event: SessionEvent) -> None:
        if event.state is SessionState.CONNECTED:  # the watches ended with the previous connection
            self._wake.set()
            self.read()

    def _on_children(self, _event: WatchEvent) -> None:
        self._wake.set()

    async def _watch_presence(self) -> None:
        wait_s = POLL_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            self._wake.clear()
            wait_s = POLL_S * random.uniform(0.9, 1.1)
            if not self._zookeeper.connected:
                continue
            try:
                live = await self._read_presence()
            except RemoteError:
                wait_s = RETRY_S * random.uniform(0.5, 1.5)
                continue
            self._on_presence(live)

    async def _read_presence(self) -> dict[MemberID, LiveReplica]:
        try:
            children = await self._zookeeper.children(self._directory, self._on_children)
        except NoNode:
            children = []
        names = sorted(name for name in children if paths.replica_of(name) is not None)[:MAX_LIVE]
        self._nodes = {name: found for name, found in self._nodes.items() if name in set(names)}
        for name in names:
            if name not in self._nodes:
                self._nodes[name] = await self._read_node(name)
        live: dict[MemberID, LiveReplica] = {}
        for found in self._nodes.values():
            if found is None:
                continue
            before = live.get(found.presence.member)
            if before is None or before.presence.incarnation < found.presence.incarnation:
                live[found.presence.member] = found
        return live

    async def _read_node(self, name: str) -> LiveReplica | None:
        """Read a node; its member never changes, so it is read once. None if it is not a replica's, or is gone."""
        number = paths.replica_of(name)
        try:
            data, _ = await self._zookeeper.get(f"{self._directory}/{name}")
            node = Node.from_json(data, replica=number if number is not None else -1)
        except (NoNode, MalformedData):
            return None
        if not node.member:
            return None
        presence = Presence(node.replica, MemberID(node.member), node.member_incarnation, node.member_end)
        return LiveReplica(presence, node)
