"""The only replica of a partition: `pixiu.replication.core` over a log on the disk and the state node in ZooKeeper.

There are no other replicas to speak to: what the core would send is left out. Everything else is as with several: an
epoch by compare-and-set at every start, a synced log before every acknowledgement, damage told from torn writes.

Source: DESIGN sections 11 and 12.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from pi.operations import ENTRY_KIND
from pixiu.discovery.zookeeper import NodeExists, NoNode, VersionConflict, ZooKeeper
from pixiu.errors import MalformedData, PixiuError, RemoteError, StateDamaged
from pixiu.replication import events as ev
from pixiu.replication.core import Core
from pixiu.replication.log import SegmentedLog
from pixiu.replication.model import Damage, Entry, Presence, Versioned
from pixiu.replication.options import ReplicationOptions
from pixiu.replication.wire import decode_state, encode_state

APPLY_ENTRIES: Final = 256
"""Read from the log and applied at a time."""
APPLY_BYTES: Final = 1 << 20
RETRY_S: Final = 1.0
"""Between two tries of what ZooKeeper did not answer."""


class Listener(Protocol):
    """Who owns the state."""

    def accepted(self, token: int, epoch: int, counter: int) -> None:
        """A proposal is in the log."""

    def rejected(self, token: int, reason: ev.Rejection) -> None:
        """A proposal is not."""

    def persisted(self, counter: int) -> None:
        """The log is on the disk up to here."""

    def committed(self, entries: Sequence[Entry], copies: int) -> None:
        """Apply these. Raises a PixiuError when the state cannot."""

    def leading(self, epoch: int) -> None:
        """This replica leads; 0: no longer."""

    def damage(self, damage: Damage) -> None:
        """The log is damaged: nothing is served before an operator's word."""

    def failed(self, error: PixiuError) -> None:
        """Nothing more can be promised by this process."""


class SoleReplica:
    """See the module. Everything but the syncs happens in the event loop."""

    def __init__(self, folder: Path, segment_bytes: int, zookeeper: ZooKeeper, path: str, applied: int, listener: Listener) -> None:
        self.log = SegmentedLog(folder, segment_bytes=segment_bytes, verify_from=applied)
        if applied < self.log.first.counter:
            raise StateDamaged(
                f"the inboxes end at {applied} and the log {folder} begins after {self.log.first.counter}: entries are missing; "
                "put the inboxes of this log, or a snapshot of them, in their place"
            )
        self._zookeeper, self._path, self._listener = zookeeper, path, listener
        self._core = Core(
            member=self.log.member, incarnation=self.log.incarnation, log=self.log, options=ReplicationOptions(),
            applied=applied, now=time.monotonic(), damage=self.log.damage,
        )  # fmt: skip
        self._applied = applied
        self._session = 0
        self._ticket = 0
        self._syncing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._handed_over = asyncio.Event()
        self._closed = False
        self._performers: dict[type[Any], Callable[[Any], None]] = {
            ev.Sync: self._on_sync,
            ev.ReadState: lambda effect: self._spawn(self._read()),
            ev.CompareAndSet: lambda effect: self._spawn(self._swap(effect)),
            ev.Accepted: lambda effect: listener.accepted(effect.token, effect.epoch, effect.last),
            ev.Rejected: lambda effect: listener.rejected(effect.token, effect.reason),
            ev.Persisted: lambda effect: listener.persisted(effect.counter),
            ev.Committed: self._on_committed,
            ev.Leading: lambda effect: listener.leading(effect.epoch),
            ev.Deposed: lambda effect: listener.leading(0),
            ev.SendSnapshot: lambda effect: self.step(ev.SnapshotSent(effect.member, None)),
            ev.ReportDamage: lambda effect: listener.damage(effect.damage),
            ev.HandedOver: lambda effect: self._handed_over.set(),
            ev.CloseSession: lambda effect: listener.failed(StateDamaged(effect.reason)),
        }

    # --- the outside

    def registered(self, node: int, incarnation: int) -> None:
        """The process is in the registry under this number; another incarnation is another session."""
        if incarnation == self._session or self._closed:
            return
        if self._session:
            self.step(ev.SessionLost())
        self._session = incarnation
        mine = self.log.next_incarnation()
        self.step(ev.SessionStarted(node, mine))
        self.step(ev.PresenceChanged((Presence(node, self.log.member, mine),)))
        self._arm()

    def propose(self, token: int, payload: bytes, replicated: bool) -> None:
        """One entry."""
        self.step(ev.Propose(token, [(ENTRY_KIND, payload)], time.time_ns() // 1000, replicated))

    def may_read(self) -> bool:
        """Whether what is committed here is the newest there is, and applied."""
        return self._core.may_read(time.monotonic()) and self._applied == self._core.context.committed

    def flushed(self, counter: int) -> None:
        """The state is durable up to here."""
        if not self._closed:
            self.step(ev.Flushed(counter))

    @property
    def state(self) -> str:
        """For people."""
        return self._core.state.value

    async def drain(self) -> None:
        """Lead no more. Without another replica that is over at once, or at the end of the time given."""
        self.step(ev.Drain())
        if self._core.leader is None:
            await self._handed_over.wait()

    async def close(self) -> None:
        """Sync what is left and close the log."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._syncing is not None:
            await asyncio.gather(self._syncing, return_exceptions=True)
        self.log.close()

    # --- the core

    def step(self, event: ev.Event) -> None:
        """Take an event and do what follows."""
        if self._closed:
            return
        for effect in self._core.step(event, time.monotonic()):
            performer = self._performers.get(type(effect))
            if performer is not None:
                performer(effect)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay = max(self._core.next_deadline() - time.monotonic(), 0.0)
        self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self.step(ev.Tick())
        if not self._closed:
            self._arm()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_sync(self, effect: ev.Sync) -> None:
        self._ticket = effect.ticket
        if self._syncing is None:
            self._syncing = asyncio.create_task(self._sync(), name="pi-sync")

    async def _sync(self) -> None:
        """Group commit: whatever came while the disk was busy is synced together."""
        done = 0
        while done < self._ticket and not self._closed:
            ticket = self._ticket
            try:
                await asyncio.to_thread(self.log.sync)
            except PixiuError as failed:
                self.step(ev.LogFailed(str(failed)))
                return  # `_syncing` stays: nothing is synced any more
            done = ticket
            self.step(ev.Synced(ticket))
        self._syncing = None

    def _on_committed(self, effect: ev.Committed) -> None:
        while self._applied < effect.counter and not self._closed:
            try:
                entries = self.log.read(self._applied, min(APPLY_ENTRIES, effect.counter - self._applied), APPLY_BYTES)
                self._listener.committed(entries, effect.copies)
            except PixiuError as failed:
                self._listener.failed(failed)
                return
            self._applied = entries[-1].counter

    # --- ZooKeeper

    async def _read(self) -> None:
        try:
            data, stat = await self._zookeeper.get(self._path)
            read = Versioned(stat.version, decode_state(data))
        except NoNode:
            read = Versioned(-1, None)
        except MalformedData as wrong:
            self._listener.failed(wrong)
            return
        except RemoteError:
            self.step(ev.StateUnread())
            return
        self.step(ev.StateRead(read))

    async def _swap(self, effect: ev.CompareAndSet) -> None:
        data = encode_state(effect.state)
        try:
            if effect.expected == -1:
                await self._zookeeper.create(self._path, data, make_parents=True)
            else:
                await self._zookeeper.set(self._path, data, effect.expected)
            outcome = ev.Outcome.OK
        except (NodeExists, NoNode, VersionConflict):
            outcome = ev.Outcome.CONFLICT
        except RemoteError:
            outcome = ev.Outcome.UNKNOWN
        self.step(ev.Swapped(effect.token, outcome))
