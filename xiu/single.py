"""The only replica of a partition: the core of `pixiu.replication` over its log, with a set of one in sync.

    event ──▶ core ──▶ Sync          a thread: one fdatasync at a time, for everything that came meanwhile
                  ├──▶ ReadState     ZooKeeper's state of the partition, and compare-and-set on its version
                  ├──▶ CompareAndSet
                  └──▶ everything else: to the Xiu's core

It leads when the partition's state names its data directory alone in sync, so that a second process with another folder never
leads beside it. Level `replicated` is `persisted` here: there is one copy, and answers say so.

Source: DESIGN section 12.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from pixiu.discovery.zookeeper import NodeExists, NoNode, SessionEvent, SessionState, VersionConflict, ZooKeeper
from pixiu.errors import MalformedData, PixiuError, RemoteError, StorageError
from pixiu.replication import events as ev
from pixiu.replication.core import Core
from pixiu.replication.log import SegmentedLog
from pixiu.replication.model import MemberID, Presence, Versioned
from pixiu.replication.options import ReplicationOptions
from pixiu.replication.wire import decode_state, encode_state

NODE: Final = 0
"""Its number among candidates: it is the only one."""


class SingleReplica:
    """See the module. Use it from the event loop.

    Args:
        log: opened; closed by `close`.
        zookeeper: connected.
        path: of the partition's state.
        applied: the store holds everything up to this counter.
        on_effect: gets what is for the Xiu.
        on_failed: gets the error that ends this replica.
        now: monotonic seconds.
    """

    def __init__(
        self,
        log: SegmentedLog,
        zookeeper: ZooKeeper,
        path: str,
        applied: int,
        on_effect: Callable[[ev.Effect], None],
        on_failed: Callable[[PixiuError], None],
        now: Callable[[], float],
    ) -> None:
        self._log, self._zookeeper, self._path = log, zookeeper, path
        self._on_effect, self._on_failed, self._now = on_effect, on_failed, now
        self.core = Core(
            member=log.member,
            incarnation=log.incarnation,
            log=log,
            options=ReplicationOptions(),
            applied=applied,
            now=now(),
            damage=log.damage,
        )
        self._events: deque[ev.Event] = deque()
        self._stepping = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="xiu-log")
        self._ticket = 0
        self._dirty = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.syncs = 0

    async def start(self) -> None:
        """Seek to lead. Raises DiskFailed."""
        self._spawn(self._sync(), "xiu-log-sync")
        self._spawn(self._tick(), "xiu-log-tick")
        self._zookeeper.add_listener(self._on_session)
        await self._begin_session()

    async def close(self) -> None:
        """Close the log; what was appended is synced first where the disk lets it."""
        self._closed = True
        self._zookeeper.remove_listener(self._on_session)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(StorageError):
            await loop.run_in_executor(self._thread, self._log.sync)
        await loop.run_in_executor(self._thread, self._log.close)
        self._thread.shutdown(wait=False)

    @property
    def member(self) -> MemberID:
        """The data directory's ID."""
        return self._log.member

    @property
    def others_in_sync(self) -> tuple[MemberID, ...]:
        """Whose data directories the registry names instead of this one; () when it may lead."""
        read = self.core.context.read
        if read is None or read.state is None or self.member in read.state.in_sync:
            return ()
        return tuple(sorted(read.state.in_sync))

    def step(self, event: ev.Event) -> None:
        """Take an event; what follows from it is done before this returns, unless another event is being done."""
        self._events.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._events and not self._closed:
                for effect in self.core.step(self._events.popleft(), self._now()):
                    self._perform(effect)
        finally:
            self._stepping = False

    def _perform(self, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Sync):
            self._ticket = effect.ticket
            self._dirty.set()
        elif isinstance(effect, ev.ReadState):
            self._spawn(self._read(), "xiu-state-read")
        elif isinstance(effect, ev.CompareAndSet):
            self._spawn(self._swap(effect), "xiu-state-swap")
        elif isinstance(effect, ev.CloseSession):
            self._on_failed(StorageError(f"the log in {self._log.directory} cannot go on: {effect.reason}"))
        elif not isinstance(effect, ev.Send | ev.SendSnapshot):  # nobody else is live
            self._on_effect(effect)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failed(error if isinstance(error, PixiuError) else StorageError(f"{task.get_name()}: {error!r}"))

    async def _sync(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            ticket = self._ticket
            try:
                await loop.run_in_executor(self._thread, self._log.sync)
            except StorageError as error:
                self.step(ev.LogFailed(str(error)))
                return
            self.syncs += 1
            self.step(ev.Synced(ticket))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(max(self.core.next_deadline() - self._now(), 0.01))
            self.step(ev.Tick())

    # --- ZooKeeper

    def _on_session(self, event: SessionEvent) -> None:
        if event.state is SessionState.LOST:
            self.step(ev.SessionLost())
        elif event.state is SessionState.CONNECTED and event.new_session:
            self._spawn(self._begin_session(), "xiu-session")

    async def _begin_session(self) -> None:
        incarnation = await asyncio.get_running_loop().run_in_executor(self._thread, self._log.next_incarnation)
        self.step(ev.SessionStarted(NODE, incarnation))
        self.step(ev.PresenceChanged((Presence(NODE, self._log.member, incarnation),)))

    async def _read(self) -> None:
        try:
            data, stat = await self._zookeeper.get(self._path)
            read = Versioned(stat.version, decode_state(data))
        except NoNode:
            read = Versioned(-1, None)
        except MalformedData:
            raise
        except RemoteError:
            self.step(ev.StateUnread())
            return
        self.step(ev.StateRead(read))

    async def _swap(self, effect: ev.CompareAndSet) -> None:
        data = encode_state(effect.state)
        try:
            if effect.expected < 0:
                await self._zookeeper.ensure_path(self._path.rpartition("/")[0])
                await self._zookeeper.create(self._path, data)
            else:
                await self._zookeeper.set(self._path, data, effect.expected)
            outcome = ev.Outcome.OK
        except (VersionConflict, NodeExists, NoNode):
            outcome = ev.Outcome.CONFLICT
        except RemoteError:
            outcome = ev.Outcome.UNKNOWN
        self.step(ev.Swapped(effect.token, outcome))
