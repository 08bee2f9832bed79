"""The cluster as the console sees it: one session with the registry, an hour of rates, connections that are open while used.

    every 5 s, always ──▶ /metrics of all processes ──▶ series
    a page is open    ──▶ /health of all processes, clients, topics, inboxes: asked for once, however many browsers ask

Source: docs/console.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Final, Generic, TypeVar

from ops.console.series import Series
from pixiu.client.stores.view import InboxView
from pixiu.discovery.reachable import check_reachable
from pixiu.discovery.target import names_registry, parse_address
from pixiu.discovery.view import View
from pixiu.discovery.watcher import Discovery
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import InvalidArgument
from tools.cli.rates import Reading
from tools.cli.status import ClusterStatus, ask_processes, tools_at_work
from tools.cli.top import Watch
from tools.topics.calls import TopicCluster

SAMPLE_S: Final = 5.0
FRESH_S: Final = 0.9
"""Age at which the state of the processes is asked for again, seconds."""
IDLE_S: Final = 60.0
"""Time after which a connection that nobody uses is closed, seconds."""
CONNECT_TIMEOUT_S: Final = 5.0

T = TypeVar("T")


class Held(Generic[T]):
    """A connection that is opened by its first use, and closed when it has not been used for a while."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self._make = make
        self._opened: AbstractAsyncContextManager[T] | None = None
        self._value: T | None = None
        self._lock = asyncio.Lock()
        self._used, self._users = 0.0, 0

    @asynccontextmanager
    async def use(self) -> AsyncIterator[T]:
        """Use it; it stays open meanwhile. Raises what opening it raises."""
        async with self._lock:
            value = self._value
            if value is None:
                opened = self._make()
                self._value = value = await opened.__aenter__()
                self._opened = opened
            self._users += 1
        try:
            yield value
        finally:
            self._users -= 1
            self._used = time.monotonic()

    async def close_idle(self, idle_s: float) -> None:
        """Close it if nobody has used it for so long."""
        async with self._lock:
            if self._opened is not None and not self._users and time.monotonic() - self._used >= idle_s:
                opened, self._opened, self._value = self._opened, None, None
                await opened.__aexit__(None, None, None)


class Once(Generic[T]):
    """Something that is asked for at most once in a while, however many ask."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._lock = asyncio.Lock()
        self._found: T | None = None
        self._at = -FRESH_S

    async def get(self) -> T:
        """Return what was found last, or is found now. Raises what asking raises."""
        async with self._lock:
            if self._found is None or time.monotonic() - self._at >= FRESH_S:
                self._found = await self._ask()
                self._at = time.monotonic()
            return self._found


class Cluster:
    """A cluster: `async with Cluster(target) as cluster`. Raises `InvalidArgument`, `RegistryUnavailable`."""

    def __init__(self, target: str) -> None:
        if not names_registry(target):
            raise InvalidArgument(f"--target {target}: the state of a cluster is in its registry; give zk://HOST:PORT/ROOT")
        self.target = target
        self.address = parse_address(target)
        self.series = Series()
        self.topics: Held[TopicCluster] = Held(lambda: TopicCluster(target))
        self.inboxes: Held[InboxView] = Held(lambda: InboxView(target))
        self.status: Once[ClusterStatus] = Once(self._status)
        self._zookeeper = ZooKeeper(self.address, connect_timeout_s=CONNECT_TIMEOUT_S)
        self._discovery = Discovery(self._zookeeper, self.address.root, lambda _view: None)
        self._watch = Watch(str(self.address), hot=0)
        self._sampling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Cluster:
        check_reachable(self.target)
        await self._zookeeper.connect()
        await self._discovery.start()
        self._sampling = asyncio.create_task(self._sample(), name="console-series")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)
        await self.topics.close_idle(0)
        await self.inboxes.close_idle(0)
        await self._discovery.close()
        await self._zookeeper.close()

    @property
    def view(self) -> View:
        """The newest view of the cluster."""
        return self._discovery.view

    @property
    def readings(self) -> dict[int, Reading]:
        """The metrics that were read last, by endpoint."""
        return self._watch.readings

    async def _status(self) -> ClusterStatus:
        tools = await tools_at_work(self._zookeeper, self.address.root)
        return await ask_processes(str(self.address), self.view, tools, metrics=False)

    async def _sample(self) -> None:
        while True:
            screen = await self._watch.look(self.view)
            self.series.add(time.time_ns() // 1_000_000, screen.rows)
            for held in (self.topics, self.inboxes):
                with suppress(Exception):  # it was of no use any longer anyway
                    await held.close_idle(IDLE_S)
            await asyncio.sleep(SAMPLE_S)
