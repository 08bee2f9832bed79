"""Topics in the registry as the leading admin writes them: by compare-and-set, and only while it leads.

    ROOT/admin/epoch      {"epoch": 3}, raised by each admin that begins to lead
    ROOT/admin/leader     ephemeral: who leads

A write is one transaction with a check of the epoch's version, so a deposed admin changes nothing.

Source: docs/topics.md, "Administration".
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from pixiu.discovery import paths
from pixiu.discovery.node import integer, json_object, text
from pixiu.discovery.operations import (
    Check,
    Create,
    Delete,
    NoNode,
    Operation,
    RegistryConflict,
    SessionEvent,
    SessionState,
    Set,
    Stat,
)
from pixiu.discovery.topics import Numbers, TopicNode, read_topic, topic_names
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import MalformedData, NotLeader, RemoteError
from pixiu.ids import MAX_ID
from registry.restorer import Restorer

MAX_LEASE_BYTES: Final = 1_024
READ_AT_ONCE: Final = 64
"""Topics that are read at once when an admin begins to lead."""


class AdminLease:
    """The leadership of one admin: it takes it whenever nobody has it.

    Args:
        zookeeper: the process's session.
        root: the cluster's root.
        holder: names the process in the registry; must be unique to it (its endpoint ID).
        on_changed: called in the event loop with the epoch in which this process leads from now on; 0: it does not.
    """

    def __init__(self, zookeeper: ZooKeeper, root: str, holder: str, on_changed: Callable[[int], None]) -> None:
        self._zookeeper, self._root, self._on_changed = zookeeper, root, on_changed
        self._holder, self._address = holder, ""
        self._restorer = Restorer(zookeeper, self._look, "the admin's lease")
        self._version = -1
        self.epoch = 0
        """The epoch in which this process leads; 0: it does not."""
        self.leader = ""
        """Address of the leading admin, as far as it is known; empty: nobody leads."""

    def start(self, address: str) -> None:
        """Start trying to lead, under this address."""
        self._address = address
        self._zookeeper.add_listener(self._on_session)
        self._restorer.start()

    async def stop(self) -> None:
        """Give the leadership up. Without the registry it ends with the session."""
        await self._restorer.stop()
        self._zookeeper.remove_listener(self._on_session)
        if self.epoch:
            own: list[Operation] = [self.check(), Delete(paths.admin_lease(self._root))]  # whoever takes it raises the epoch
            self._deposed()
            with suppress(RemoteError):
                await self._zookeeper.transaction(own)

    def check(self) -> Check:
        """Make the operation that fails a transaction when this process no longer leads. Raises `NotLeader`."""
        if not self.epoch:
            raise NotLeader("this admin does not lead", self.leader)
        return Check(paths.admin_epoch(self._root), self._version)

    def doubt(self) -> None:
        """Look again who leads: a transaction failed."""
        self._restorer.wake()

    def _on_session(self, event: SessionEvent) -> None:
        if event.state is SessionState.LOST and self.epoch:
            self._deposed()

    def _deposed(self) -> None:
        self.epoch, self.leader = 0, ""
        self._on_changed(0)

    async def _look(self) -> None:
        path = paths.admin_lease(self._root)
        found = await self._found(path)
        if found is not None and found[0] == self._holder and found[2].ephemeral_owner == self._zookeeper.session_id:
            if self.epoch:
                lease = await self._read_epoch()
                if lease == (self.epoch, self._version):
                    return
        elif found is not None and found[0] != self._holder:
            if self.epoch:
                self._deposed()
            self.leader = found[1]
            return
        if self.epoch:
            self._deposed()
        await self._take(path, replaced=found is not None)

    async def _found(self, path: str) -> tuple[str, str, Stat] | None:
        """Holder, address and stat of the leader's node; the node is watched, also when there is none."""
        if await self._zookeeper.exists(path, self._restorer.on_watch) is None:
            return None
        try:
            data, stat = await self._zookeeper.get(path)
        except NoNode:
            self._restorer.wake()
            return None
        fields = json_object(data, MAX_LEASE_BYTES, path)
        return text(fields, "holder"), text(fields, "address"), stat

    async def _read_epoch(self) -> tuple[int, int]:
        """Epoch, and version of its node."""
        path = paths.admin_epoch(self._root)
        try:
            data, stat = await self._zookeeper.get(path)
        except NoNode:
            await self._zookeeper.ensure_path(path)
            data, stat = await self._zookeeper.get(path)
        return integer(json_object(data or b"{}", MAX_LEASE_BYTES, path), "epoch", 0, MAX_ID, 0), stat.version

    async def _take(self, path: str, *, replaced: bool) -> None:
        """Become the leader in the next epoch. `replaced`: a node of ours, left by an earlier session, goes in the same
        transaction."""
        epoch, version = await self._read_epoch()
        holder = json.dumps({"holder": self._holder, "address": self._address, "epoch": epoch + 1}).encode()
        operations: list[Operation] = [Delete(path)] if replaced else []
        operations.append(Set(paths.admin_epoch(self._root), b'{"epoch":%d}' % (epoch + 1), version))
        operations.append(Create(path, holder, ephemeral=True))
        try:
            await self._zookeeper.transaction(operations)
        except RegistryConflict:
            self._restorer.wake()  # another one was faster
            return
        await self._zookeeper.exists(path, self._restorer.on_watch)
        self.epoch, self._version, self.leader = epoch + 1, version + 1, self._address
        self._on_changed(self.epoch)


class Loaded(NamedTuple):
    """All topics of a cluster."""

    numbers: Numbers
    topics: dict[str, tuple[int, TopicNode]]
    """Name → version of its node, and the topic."""
    unreadable: dict[str, str]
    """Name → what is wrong with its node."""


class TopicStore:
    """The topics in the registry, for the admin that leads.

    Args:
        zookeeper: the process's session.
        root: the cluster's root.
        lease: the leadership under which it writes.
    """

    def __init__(self, zookeeper: ZooKeeper, root: str, lease: AdminLease) -> None:
        self._zookeeper, self._root, self._lease = zookeeper, root, lease
        self._numbers, self._numbers_version = Numbers(), -1
        self._writing = asyncio.Lock()

    async def load(self) -> Loaded:
        """Read everything. Raises `RegistryUnavailable`, `MalformedData` for the numbers."""
        await self._zookeeper.ensure_path(paths.topics(self._root))
        await self._zookeeper.sync(paths.topics(self._root))
        await self._read_numbers()
        topics: dict[str, tuple[int, TopicNode]] = {}
        unreadable: dict[str, str] = {}
        names = await topic_names(self._zookeeper, self._root)
        for first in range(0, len(names), READ_AT_ONCE):
            piece = names[first : first + READ_AT_ONCE]
            for name, found in zip(piece, await asyncio.gather(*map(self._read_or_why, piece)), strict=True):
                if isinstance(found, str):
                    unreadable[name] = found
                elif found is not None:
                    topics[name] = found
        return Loaded(self._numbers, topics, unreadable)

    async def read(self, name: str) -> tuple[int, TopicNode] | None:
        """Read a topic, not older than this call; None: there is none. Raises `RegistryUnavailable`, `MalformedData`."""
        await self._zookeeper.sync(paths.topics(self._root))
        found = await read_topic(self._zookeeper, self._root, name)
        return None if found is None else (found[1], found[0])

    async def write(self, name: str, expected: int, node: TopicNode | None, numbers: Numbers) -> int:
        """Write a topic whose node has this version (-1: there is none), or delete it; and the numbers given so far, if they rose.

        Returns the new version of the node. Raises `RegistryConflict` (somebody else wrote the node, or leads), `NotLeader`,
        `RegistryUnavailable` (it may have happened or not).
        """
        path = paths.topic(self._root, name)
        async with self._writing:
            operations: list[Operation] = [self._lease.check()]
            numbers = Numbers(max(numbers.topic, self._numbers.topic), max(numbers.channel, self._numbers.channel))
            if numbers != self._numbers:
                operations.append(Set(paths.topics(self._root), numbers.to_json(), self._numbers_version))
            if node is None:
                operations.append(Delete(path, expected))
            elif expected < 0:
                operations.append(Create(path, node.to_json()))
            else:
                operations.append(Set(path, node.to_json(), expected))
            try:
                await self._zookeeper.transaction(operations)
            except RemoteError:
                self._lease.doubt()
                with suppress(RemoteError):
                    await self._read_numbers()
                raise
            if numbers != self._numbers:
                self._numbers, self._numbers_version = numbers, self._numbers_version + 1
        return expected + 1

    async def _read_or_why(self, name: str) -> tuple[int, TopicNode] | str | None:
        try:
            found = await read_topic(self._zookeeper, self._root, name)
        except MalformedData as error:
            return str(error)
        return None if found is None else (found[1], found[0])

    async def _read_numbers(self) -> None:
        data, stat = await self._zookeeper.get(paths.topics(self._root))
        self._numbers, self._numbers_version = Numbers.from_json(data), stat.version
