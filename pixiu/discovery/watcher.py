"""Keeps a process's view of the cluster: by watch and by poll, through one reducer. Reads only.

    watches ─┐                         ┌─ heartbeats say dead, alive
             ├─▶ what changed ─▶ scan ─┴─▶ ViewReducer ─▶ view
    poll ────┘   is read again

Both ways end in the same scan; a watch only says earlier which part of the registry to read again. A read that fails
gives no scan, so an outage of ZooKeeper changes nothing.

Source: docs/registry.md; PiXiu §2.2 steps 2 to 4.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final

from pixiu.discovery import paths
from pixiu.discovery.node import Node
from pixiu.discovery.view import Connected, Disconnected, Event, Layout, PeerAlive, PeerDead, Scan, Tick, View, ViewReducer
from pixiu.discovery.zookeeper import NoNode, SessionEvent, SessionState, WatchEvent, ZooKeeper
from pixiu.errors import InvalidArgument, MalformedData, RemoteError
from pixiu.ids import EndpointID
from pixiu.rpc.backoff import Backoff

POLL_INTERVAL_S: Final = 60.0
POLL_JITTER: Final = 0.1
"""Polls come up to this part early or late, so that processes that started together do not read together."""
FIRST_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 5.0
"""Back-off after a read that failed while connected; doubles in between, with jitter."""
IDLE_S: Final = 3600.0
"""The longest that the loop sleeps when nothing else is due."""

_log = logging.getLogger("pixiu.discovery")


class Discovery:
    """The view of the cluster, kept up to date.

    Args:
        zookeeper: a session that is connected before `start`.
        root: below which everything lies.
        on_view: called in the event loop with every new view; must not raise and must not block.
        poll_interval_s: how often everything is read, watches or not, seconds.
        roles: which roles to see; the others are not read.

    Source: docs/registry.md.
    """

    def __init__(
        self,
        zookeeper: ZooKeeper,
        root: str,
        on_view: Callable[[View], None],
        poll_interval_s: float = POLL_INTERVAL_S,
        *,
        roles: Iterable[str] = paths.ROLES,
    ) -> None:
        if poll_interval_s <= 0:
            raise InvalidArgument(f"poll_interval_s is {poll_interval_s}; it must be above 0")
        self._zookeeper = zookeeper
        self._root = paths.check_root(root)
        self._on_view = on_view
        self._poll_interval_s = poll_interval_s
        self._roles = {paths.role_directory(self._root, role): role for role in roles}
        self._reducer = ViewReducer()
        self._layout: Layout | None = None
        self._directories: dict[str, tuple[str, int]] = {}
        """Directory of nodes → role, partition."""
        self._nodes: dict[str, dict[str, Node | None]] = {}
        """Directory → name → node; None for a node whose data was never readable."""
        self._changed: set[str] = set()
        self._everything = False
        self._poll_at = 0.0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self.malformed = 0
        """Data of nodes or of the layout that could not be read; what was known before stays."""

    @property
    def view(self) -> View:
        """The newest view; empty before `start` returns."""
        return self._reducer.view

    @property
    def held(self) -> int:
        """How many nodes of the view are not registered now."""
        return self._reducer.held

    @property
    def refused(self) -> Mapping[str, str]:
        """Role → why its layout in the registry is not taken, and what to do."""
        return self._reducer.refused

    async def start(self) -> None:
        """Read everything and give the first view to `on_view`. Raises `RegistryUnavailable`."""
        if self._task is not None or self._closed:
            raise InvalidArgument("this discovery was already started; make a new one")
        self._loop = asyncio.get_running_loop()
        self._zookeeper.add_listener(self._on_session)
        try:
            await self._read_everything()
        except BaseException:
            self._zookeeper.remove_listener(self._on_session)
            raise
        if self._zookeeper.connected:
            self._step(Connected())
        if self._step(self._scan()) is None:
            # An empty registry is a first view too.
            self._give(self.view)
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop reading; the last view stays."""
        self._closed = True
        self._zookeeper.remove_listener(self._on_session)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def mark_dead(self, endpoint: int) -> None:
        """Heartbeats say that a process is dead: out of the view now if it is not registered, else as soon as it vanishes.

        The new view is given after the caller has returned to the event loop.
        """
        self._later(PeerDead(EndpointID(endpoint)))

    def mark_alive(self, endpoint: int) -> None:
        """Heartbeats say that a process that was marked dead lives: it is held again when it vanishes from the registry."""
        self._later(PeerAlive(EndpointID(endpoint)))

    def poll_within(self, seconds: float) -> None:
        """Read everything so soon, whatever the poll interval: somebody knows more than the view shows."""
        self._poll_at = min(self._poll_at, time.monotonic() + seconds)
        self._wake.set()

    def _later(self, event: Event) -> None:
        if self._loop is not None and not self._closed:
            self._loop.call_soon(self._step, event)

    def _step(self, event: Event) -> View | None:
        if self._closed:
            return None
        view = self._reducer.step(event, time.monotonic())
        if view is not None:
            self._give(view)
        return view

    def _give(self, view: View) -> None:
        try:
            self._on_view(view)
        except Exception:  # a bug in the receiver must not end the updates
            _log.exception("a receiver of views failed")

    def _on_session(self, event: SessionEvent) -> None:
        if event.state is SessionState.CONNECTED:
            # Whatever watches there were are gone with the connection.
            self._everything = True
            self._wake.set()
            self._step(Connected())
        else:
            self._step(Disconnected())

    def _on_watch(self, event: WatchEvent) -> None:
        if not self._closed:
            self._changed.add(event.path)
            self._wake.set()

    def _scan(self) -> Scan:
        nodes = (node for names in self._nodes.values() for node in names.values() if node is not None)
        return Scan(tuple(nodes), self._layout)

    async def _run(self) -> None:
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, random.random)
        self._poll_at = time.monotonic() + self._jittered()
        retry_at = 0.0
        while True:
            now = time.monotonic()
            deadline = self._reducer.next_deadline()
            until = min(self._poll_at, now + IDLE_S if deadline is None else deadline)
            if retry_at:
                until = min(until, retry_at)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(until - now, 0.0)):
                    await self._wake.wait()
            self._wake.clear()
            now = time.monotonic()
            if now >= self._poll_at:
                self._everything = True
                self._poll_at = now + self._jittered()
            if now < retry_at or not self._zookeeper.connected:
                retry_at = retry_at if self._zookeeper.connected else 0.0
                self._step(Tick())
                continue
            try:
                changed = await self._read_changed()
                backoff.reset()
                retry_at = 0.0
                self._step(self._scan() if changed else Tick())
            except Exception as error:
                # Half of it may be read: read all of it again, and give no scan until then.
                expected = isinstance(error, RemoteError)
                _log.log(logging.DEBUG if expected else logging.ERROR, "reading the registry failed: %r", error)
                self._everything = True
                retry_at = time.monotonic() + backoff.next_s()

    def _jittered(self) -> float:
        return self._poll_interval_s * random.uniform(1 - POLL_JITTER, 1 + POLL_JITTER)

    async def _read_changed(self) -> bool:
        """Read what watches and polls named since the last time; whether there was anything."""
        changed, self._changed = self._changed, set()
        if self._everything:
            self._everything = False
            await self._read_everything()
            return True
        await _all(self._read_path(path) for path in sorted(changed))
        return bool(changed)

    async def _read_everything(self) -> None:
        await _all([self._read_layout(), *(self._read_role(directory) for directory in self._roles)])

    async def _read_path(self, path: str) -> None:
        """Read again what a watch fired on."""
        directory, _, name = path.rpartition("/")
        if path == paths.layout(self._root):
            await self._read_layout()
        elif path in self._roles:
            await self._read_role(path, fresh=False)
        elif path in self._directories:
            await self._read_directory(path, fresh=False)
        elif directory in self._directories:
            await self._read_node(directory, name)

    async def _read_layout(self) -> None:
        try:
            data = await self._get(paths.layout(self._root))
            if data is not None:
                self._layout = Layout.from_json(data)
        except MalformedData as error:
            self._count_malformed(error)

    async def _read_role(self, directory: str, fresh: bool = True) -> None:
        """Read a role; with `fresh`, also what is known to be there."""
        role = self._roles[directory]
        if role in paths.UNPARTITIONED_ROLES:
            self._directories[directory] = (role, paths.NO_PARTITION)
            await self._read_directory(directory, fresh)
            return
        names = await self._list(directory)
        found = {f"{directory}/{name}": number for name in names if (number := paths.partition_of(name)) is not None}
        for gone in [old for old, (known, _) in self._directories.items() if known == role and old not in found]:
            del self._directories[gone]
            self._nodes.pop(gone, None)
        wanted = [path for path in found if fresh or path not in self._directories]
        self._directories.update({path: (role, number) for path, number in found.items()})
        await _all(self._read_directory(path, fresh) for path in wanted)

    async def _read_directory(self, directory: str, fresh: bool) -> None:
        names = {name for name in await self._list(directory) if paths.replica_of(name) is not None}
        known = self._nodes.setdefault(directory, {})
        for gone in known.keys() - names:
            del known[gone]
        await _all(self._read_node(directory, name) for name in sorted(names if fresh else names - known.keys()))

    async def _read_node(self, directory: str, name: str) -> None:
        try:
            data, _ = await self._zookeeper.get(f"{directory}/{name}", self._on_watch)
        except NoNode:
            self._nodes.get(directory, {}).pop(name, None)
            return
        except MalformedData as error:
            self._count_malformed(error)
            return
        nodes = self._nodes.get(directory)
        replica = paths.replica_of(name)
        if nodes is None or replica is None:
            return
        nodes.setdefault(name, None)
        try:
            node = Node.from_json(data, replica=replica)
            if (node.role, node.partition) != self._directories[directory]:
                raise MalformedData(f"it says {node.role}, partition {node.partition}")
            nodes[name] = node
        except MalformedData as error:
            self._count_malformed(MalformedData(f"{directory}/{name}: {error}"))

    def _count_malformed(self, error: MalformedData) -> None:
        self.malformed += 1
        _log.debug("malformed data in the registry: %s", error)

    async def _get(self, path: str) -> bytes | None:
        """A node's data with a watch; None, and a watch for its coming, where there is none."""
        try:
            data, _ = await self._zookeeper.get(path, self._on_watch)
            return data
        except NoNode:
            if await self._zookeeper.exists(path, self._on_watch) is not None:
                self._changed.add(path)
                self._wake.set()
            return None

    async def _list(self, path: str) -> list[str]:
        """A node's children with a watch; none, and a watch for its coming, where there is no such node."""
        try:
            return await self._zookeeper.children(path, self._on_watch)
        except NoNode:
            if await self._zookeeper.exists(path, self._on_watch) is not None:
                self._changed.add(path)
                self._wake.set()
            return []


async def _all(reads: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run reads together; when one fails the others are stopped and its error is raised."""
    tasks = [asyncio.ensure_future(read) for read in reads]
    try:
        for task in tasks:
            await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
