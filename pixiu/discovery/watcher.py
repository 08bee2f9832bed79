"""Keeps a process's view of the cluster: by watch and by poll, through one reducer. It only reads.

    watches ─┐                                        ┌─ heartbeats report dead, alive
             ├─▶ Reader: what to read ─▶ reads ─▶ scan ┴─▶ ViewReducer ─▶ view
    poll ────┘

A failed read is repeated, and there is no scan until it succeeds, so an outage of ZooKeeper changes nothing.

Source: docs/registry.md; PiXiu §2.2 steps 2 to 4.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from pixiu.discovery import paths
from pixiu.discovery.operations import NoNode, SessionEvent, SessionState, WatchEvent, WatchKind
from pixiu.discovery.reader import Read, Reader, RequestKind
from pixiu.discovery.view import Connected, Disconnected, Event, PeerAlive, PeerDead, Tick, View, ViewReducer
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import InvalidArgument, MalformedData, RemoteError
from pixiu.ids import EndpointID
from pixiu.rpc.backoff import Backoff

POLL_INTERVAL_S: Final = 60.0
FIRST_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 5.0
"""Longest back-off after a read that failed while connected, seconds; it doubles, with jitter."""
IDLE_S: Final = 3600.0
"""Longest sleep of the loop when nothing else is due, seconds."""

_log = logging.getLogger("pixiu.discovery")


class Discovery:
    """The view of the cluster, kept up to date.

    Args:
        zookeeper: a session that is connected before `start`.
        root: path above all nodes.
        on_view: called in the event loop with every new view; must not raise and must not block.
        poll_interval_s: interval between polls, seconds.
        roles: the roles to read; others are ignored.

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
        self._on_view = on_view
        self._reader = Reader(paths.check_root(root), roles, poll_interval_s, random.random)
        self._reducer = ViewReducer()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def malformed(self) -> int:
        """Number of nodes or layouts whose data could not be read; the earlier data stay."""
        return self._reader.malformed

    @property
    def view(self) -> View:
        """The newest view; empty before `start` returns."""
        return self._reducer.view

    @property
    def held(self) -> int:
        """Number of nodes of the view that are not registered now."""
        return self._reducer.held

    @property
    def refused(self) -> Mapping[str, str]:
        """Role → reason why its layout in the registry is not taken, and what to do."""
        return self._reducer.refused

    async def start(self) -> None:
        """Read everything and pass the first view to `on_view`. Raises `RegistryUnavailable`."""
        if self._task is not None or self._closed:
            raise InvalidArgument("this discovery was already started; make a new one")
        self._loop = asyncio.get_running_loop()
        self._zookeeper.add_listener(self._on_session)
        self._reader.begin(time.monotonic())
        try:
            if (error := await self._read()) is not None:
                raise error
        except BaseException:
            self._zookeeper.remove_listener(self._on_session)
            self._zookeeper.stop_watching_below(self._on_watch)
            raise
        if self._zookeeper.connected:
            self._step(Connected())
        if self._step(self._reader.snapshot()) is None:
            # An empty registry is a first view too.
            self._give(self.view)
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop reading; the last view stays."""
        self._closed = True
        self._zookeeper.remove_listener(self._on_session)
        self._zookeeper.stop_watching_below(self._on_watch)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def mark_dead(self, endpoint: int) -> None:
        """Take a heartbeat report of death: the process leaves the view now if it is not registered, else as soon as it vanishes.

        The new view is passed on after the caller has returned to the event loop.
        """
        self._later(PeerDead(EndpointID(endpoint)))

    def mark_alive(self, endpoint: int) -> None:
        """Take a heartbeat report that a process marked dead is alive: it is held again when it vanishes from the registry."""
        self._later(PeerAlive(EndpointID(endpoint)))

    def poll_within(self, seconds: float) -> None:
        """Poll within this time, whatever the poll interval is, because somebody knows more than the view shows."""
        self._reader.poll_within(seconds, time.monotonic())
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
            self._reader.connected_again(time.monotonic())
            self._wake.set()
            self._step(Connected())
        else:
            self._step(Disconnected())

    def _on_watch(self, event: WatchEvent) -> None:
        if not self._closed:
            self._reader.heard(event.path, gone=event.kind is WatchKind.DELETED)
            self._wake.set()

    async def _run(self) -> None:
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, random.random)
        retry_at = 0.0
        while True:
            now = time.monotonic()
            ready = self._zookeeper.connected
            until = max(self._reader.next_deadline(), retry_at) if ready else now + IDLE_S
            until = min(until, now + IDLE_S, self._reducer.next_deadline())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(until - now, 0.0)):
                    await self._wake.wait()
            self._wake.clear()
            if time.monotonic() < retry_at or not self._zookeeper.connected:
                retry_at = retry_at if self._zookeeper.connected else 0.0
                self._step(Tick())
                continue
            error = await self._read()
            if error is None:
                backoff.reset()
                retry_at = 0.0
                self._step(self._reader.scan() or Tick())
            else:
                expected = isinstance(error, RemoteError)
                _log.log(logging.DEBUG if expected else logging.ERROR, "reading the registry failed: %r", error)
                retry_at = time.monotonic() + backoff.next_s()

    async def _read(self) -> Exception | None:
        """Read what is due. Returns the error if a read failed; it stays due."""
        while reads := self._reader.take(time.monotonic()):
            errors = await asyncio.gather(*map(self._ask, reads))
            for error in errors:
                if error is not None:
                    return error
        return None

    async def _ask(self, read: Read) -> Exception | None:
        reader, zookeeper, path = self._reader, self._zookeeper, read.path
        try:
            match read.kind:
                case RequestKind.WATCH:
                    await zookeeper.watch_below(path, self._on_watch)
                    reader.watched(read)
                case RequestKind.COMPARE:
                    stat = await zookeeper.exists(path)
                    if stat is None:
                        reader.missing(read)
                    else:
                        reader.compared(read, stat.version, stat.modified_zxid, stat.children_zxid)
                case RequestKind.LIST:
                    names, stat = await zookeeper.listing(path)
                    reader.listed(read, names, stat.children_zxid)
                case RequestKind.GET:
                    data, stat = await zookeeper.get(path)
                    reader.got(read, data, stat.modified_zxid)
        except NoNode:
            reader.missing(read)
        except MalformedData as error:
            _log.debug("malformed data in the registry: %s", error)
            reader.unreadable(read)
        except Exception as error:  # the connection, or a bug: neither ends the updates
            reader.failed(read)
            return error
        return None
