"""A process in the registry: its ephemeral node, through the loss of sessions.

    register ──▶ registered ──(session lost, or the node is gone)──▶ registered again: same endpoint, new incarnation
                     │                                                and replica; an old node is replaced in the
                 unregister                                           same transaction

Source: docs/registry.md; PiXiu §2.2 step 1.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from pixiu.discovery import paths
from pixiu.discovery.agreement import disagreement
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.operations import Create, Delete, NoNode, Operation, RegistryConflict, Stat
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import ConfigurationError, InvalidArgument, MalformedData, RemoteError, Unavailable
from registry.leases import lease_checks
from registry.mailbox import Mailbox
from registry.restorer import Restorer

MAX_TRIES: Final = 10
"""Number of tries of a registration that conflicts with a change of the registry."""
MAX_COMPARED: Final = 64
"""Number of registered nodes with which a new one is compared: these agree with each other already."""
CONFLICT_POLL_S: Final = 0.2

_log = logging.getLogger("registry.membership")


class Membership:
    """The registration of one process.

    Args:
        zookeeper: the process's session; must be connected when `register` is called.
        root: the cluster's root.
        on_registered: called in the event loop with the node each time it was registered again.
        conflict_wait_s: time for which `register` waits until incompatible nodes are gone (an earlier run of the cluster, whose
            sessions have not ended yet) before it refuses, seconds.
        on_drain: called in the event loop with the name of a requester who asks this run of the process to drain, while registered;
            empty: nobody does.
        on_settings: called in the event loop with the data of the registry's node of settings, while registered; empty: none.

    Source: docs/registry.md.
    """

    def __init__(
        self,
        zookeeper: ZooKeeper,
        root: str,
        *,
        on_registered: Callable[[Node], None] | None = None,
        conflict_wait_s: float = 0.0,
        on_drain: Callable[[bytes], None] | None = None,
        on_settings: Callable[[bytes], None] | None = None,
    ) -> None:
        self._zookeeper = zookeeper
        self._root = paths.check_root(root)
        self._on_registered = on_registered
        self._before: Callable[[Node], Awaitable[Node]] | None = None
        self._conflict_wait_s = conflict_wait_s
        self._on_drain, self._on_settings = on_drain, on_settings
        self._mailboxes: list[Mailbox] = []
        self._node: Node | None = None
        self._path = ""
        self._unwritten = False
        """True if the node's data in the registry may be older than ours."""
        self._lock = asyncio.Lock()
        self._restorer = Restorer(zookeeper, self._restore, "the process's node")
        self.registrations = 0
        """Number of times that the node was created."""

    @property
    def node(self) -> Node | None:
        """The node as it was last registered and set; None while not registered."""
        return self._node

    def before_registering_again(self, renew: Callable[[Node], Awaitable[Node]]) -> None:
        """Set the function that makes the node to register after a lost session from the former node; it is retried when it
        raises."""
        self._before = renew

    async def register(self, node: Node) -> Node:
        """Register the process. Returns the node with its replica ID and incarnation.

        Raises `ConfigurationError` when registered processes have other cluster settings or protocol versions,
        `InvalidArgument` when it is registered already or the node is invalid, `Unavailable` (for example, it names an instance
        that it does not lease), `RegistryUnavailable`.
        """
        async with self._lock:
            if self._node is not None:
                raise InvalidArgument(f"this process is already registered as {self._path}; unregister it first")
            await self._wait_for_agreement(node)
            # After an earlier try of unknown outcome our node may be there already.
            registered = await self._create(node)
            try:
                stat = await self._zookeeper.exists(self._path, self._restorer.on_watch)
                if stat is not None:
                    # Two that start at once do not see each other above; here the later one does.
                    self._refuse(await self._disagreement(node, created_before=stat.created_zxid))
            except BaseException:
                await self._forget(self._path)
                raise
            self._node = registered
            await self._announce(registered.role)
            self._restorer.start()
            watched = (
                (paths.drain(self._root, registered.endpoint), self._on_drain),
                (paths.settings(self._root), self._on_settings),
            )
            self._mailboxes = [Mailbox(self._zookeeper, path, told) for path, told in watched if told is not None]
            for mailbox in self._mailboxes:
                mailbox.start()
            return registered

    async def set_state(self, state: NodeState) -> bool:
        """Publish the process's state. Returns True when the registry has it, False when the registry cannot be reached and gets
        it later. Raises `InvalidArgument` while not registered."""
        async with self._lock:
            return await self._write(replace(self._registered(), state=state))

    async def update(self, node: Node) -> bool:
        """Replace the data of the node. Its identity (role, partition, endpoint) must stay; replica and incarnation are the
        registry's and are kept. Returns as `set_state`. Raises `InvalidArgument`."""
        async with self._lock:
            now = self._registered()
            if (node.role, node.partition, node.endpoint) != (now.role, now.partition, now.endpoint):
                raise InvalidArgument("a registered process cannot change its role, partition or endpoint")
            return await self._write(replace(node, replica=now.replica, incarnation=now.incarnation))

    async def unregister(self) -> bool:
        """Remove the node. Returns False when the registry cannot be reached: the node then ends with the session."""
        await self._restorer.stop()
        for mailbox in self._mailboxes:
            await mailbox.stop()
        async with self._lock:
            if self._node is None:
                return True
            role, self._node = self._node.role, None
            gone = await self._forget(self._path)
            if gone:
                await self._announce(role)
            return gone

    def _registered(self) -> Node:
        if self._node is None:
            raise InvalidArgument("this process is not registered; call register first")
        return self._node

    async def _forget(self, path: str) -> bool:
        try:
            await self._zookeeper.delete(path)
        except NoNode:
            return True
        except RemoteError as error:
            _log.debug("%s was not deleted and goes with its session: %s", path, error)
            return False
        return True

    async def _write(self, node: Node) -> bool:
        data = node.to_json()
        self._node, self._unwritten = node, True
        try:
            await self._zookeeper.set(self._path, data)
        except RemoteError as error:
            # Gone with its session, or no connection: the restorer writes it.
            _log.debug("%s was not written now: %s", self._path, error)
            self._restorer.wake()
            return False
        self._unwritten = False
        await self._announce(node.role)
        return True

    async def _announce(self, role: str) -> None:
        """Write the role's marker, which shows processes that lost their connection that there are changes to read. Others are
        notified by watches, so a failed write matters little."""
        marker = paths.changes(self._root, role)
        try:
            try:
                await self._zookeeper.set(marker, b"")
            except NoNode:
                await self._zookeeper.ensure_path(marker)
        except RemoteError as error:
            _log.debug("%s was not written: %s", marker, error)

    async def _create(self, node: Node) -> Node:
        """Create the node, and delete the nodes of this process's earlier sessions in the same transaction."""
        directory = paths.node_directory(self._root, node.role, node.partition)
        fresh = replace(node, incarnation=secrets.randbits(63))
        data = fresh.to_json()
        for _ in range(MAX_TRIES):
            await self._zookeeper.ensure_path(directory)
            own = [path for path, other, _ in await self._nodes_in(directory) if other.endpoint == node.endpoint]
            operations: list[Operation] = [Delete(path) for path in own[:MAX_TRIES]]
            if node.instance >= 0:  # never register an instance without its lease, even if this process believes that it has it
                holder = f"{node.endpoint:016x}"
                operations += await lease_checks(self._zookeeper, self._root, node.instance, node.generation, holder)
            operations.append(Create(paths.node_prefix(self._root, node.role, node.partition), data, True, True))
            try:
                made = await self._zookeeper.transaction(operations)
            except RegistryConflict:
                continue
            self._path = str(made[-1])
            self._unwritten = False
            self.registrations += 1
            return replace(fresh, replica=paths.replica_of(self._path.rpartition("/")[2]) or 0)
        raise Unavailable(f"{directory} was changed by others {MAX_TRIES} times in a row; try again")

    async def _nodes_in(self, directory: str, limit: int = 0) -> list[tuple[str, Node, Stat]]:
        """Return the readable nodes of a directory: path, node, ZooKeeper's stat. At most `limit`, the oldest."""
        try:
            names = [name for name in await self._zookeeper.children(directory) if paths.replica_of(name) is not None]
        except NoNode:
            return []
        wanted = [f"{directory}/{name}" for name in (names[:limit] if limit else names)]
        found = []
        for path, result in zip(wanted, await asyncio.gather(*map(self._read, wanted)), strict=True):
            if result is not None:
                found.append((path, *result))
        return found

    async def _read(self, path: str) -> tuple[Node, Stat] | None:
        try:
            data, stat = await self._zookeeper.get(path)
            return Node.from_json(data, replica=paths.replica_of(path.rpartition("/")[2]) or 0), stat
        except (NoNode, MalformedData):
            return None

    async def _directories(self) -> list[str]:
        """Return every directory below which nodes are registered now."""
        found = [paths.role_directory(self._root, role) for role in paths.UNPARTITIONED_ROLES]
        for role in paths.PARTITIONED_ROLES:
            directory = paths.role_directory(self._root, role)
            try:
                names = await self._zookeeper.children(directory)
            except NoNode:
                continue
            found += [f"{directory}/{name}" for name in names if paths.partition_of(name) is not None]
        return found

    async def _disagreement(self, node: Node, created_before: int | None = None) -> str:
        """Describe why the node cannot work with a registered process; empty if it can work with all that were compared."""
        left = MAX_COMPARED
        for directory in await self._directories():
            for _, other, stat in await self._nodes_in(directory, limit=left):
                left -= 1
                # A node at our address, or of our endpoint, is an earlier run of this process, and over.
                same_place = node.port != 0 and (other.host, other.port) == (node.host, node.port)
                earlier = created_before is None or stat.created_zxid < created_before
                if same_place or other.endpoint == node.endpoint or not earlier:
                    continue
                if problem := disagreement(node, other):
                    return problem
            if left <= 0:
                break
        return ""

    async def _wait_for_agreement(self, node: Node) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._conflict_wait_s
        while problem := await self._disagreement(node):
            if loop.time() >= until:
                self._refuse(problem)
            await asyncio.sleep(CONFLICT_POLL_S)

    def _refuse(self, problem: str) -> None:
        if problem:
            raise ConfigurationError(f"{problem}; another cluster needs another root than {self._root}")

    async def _restore(self) -> None:
        async with self._lock:
            node = self._node
            if node is None:
                return
            stat = await self._zookeeper.exists(self._path, self._restorer.on_watch)
            if stat is not None and stat.ephemeral_owner == self._zookeeper.session_id:
                if self._unwritten:
                    await self._zookeeper.set(self._path, node.to_json())
                    self._unwritten = False
                    await self._announce(node.role)
                return
            if self._before is not None:
                node = await self._before(node)
            self._node = await self._create(node)
            await self._announce(node.role)
            await self._zookeeper.exists(self._path, self._restorer.on_watch)
            again = self._node
        if self._on_registered is not None:
            self._on_registered(again)
