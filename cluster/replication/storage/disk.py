"""Sync a log: while one group is being synced the next one gathers. The seal follows a group in a sync of its own, at most once
in a tenth of a second, and nobody waits for it.

    a group ──▶ its segment, by the kernel ──▶ the seal is written ──▶ on_synced ──▶ the seal, if it is time, by the kernel
                    │ not possible here            │ the label must be synced first
                    └──────────────────────────────┴──▶ in a thread

Source: docs/replication.md, "The path of an entry"; docs/decisions/0282-a-seal-may-lag-a-tenth-of-a-second.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from cluster.replication.storage.kernel_sync import KernelSync
from cluster.replication.storage.label import SEAL_LAG_S
from cluster.replication.storage.log import SegmentedLog
from cluster.replication.storage.segment import Segment
from pixiu.errors import StorageError
from pixiu.rpc.deadline_timer import DeadlineTimer


class Syncer:
    """Group commit of one log.

    Args:
        on_synced: called in the event loop with a durable ticket, or with the reason why nothing will be durable.
        took: called in the event loop with the duration of a sync, seconds.
    """

    def __init__(self, on_synced: Callable[[int, str], None], took: Callable[[float], None] = lambda _s: None) -> None:
        self._took = took
        self._on_synced = on_synced
        self._log: SegmentedLog | None = None
        self._kernel = KernelSync()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="log-sync")
        self._running: asyncio.Future[None] | None = None
        """Done when the present sync has ended."""
        self._seal_timer = DeadlineTimer(self._seal)
        self._wanted = self._durable = 0
        self._since = 0.0
        self._reported = False
        self._closed = False
        self.syncs = 0

    def start(self, log: SegmentedLog) -> None:
        """Set the log to sync."""
        self._log = log

    def want(self, ticket: int) -> None:
        """Request that every change up to this ticket become durable."""
        self._wanted = ticket
        if self._running is None and not self._closed:
            self._begin()

    def hung_s(self, now: float) -> float:
        """Seconds for which the current sync has been running; 0 if there is none."""
        return now - self._since if self._running is not None else 0.0

    def report_once(self) -> bool:
        """True at the first call during the current sync."""
        first, self._reported = not self._reported, True
        return first

    async def close(self) -> None:
        """Wait for the current sync, or sync the seal; waits only briefly for a disk that hangs."""
        self._seal_timer.cancel()
        self._seal()
        self._closed = True
        if self._running is not None:
            await asyncio.wait({self._running}, timeout=2.0)
        self._executor.shutdown(wait=False)
        await self._kernel.close()

    def _begin(self) -> None:
        assert self._log is not None
        self._note_begin()
        try:
            dirty = self._log.begin_sync()
        except StorageError as error:
            self._end(error, partial(self._group_synced, self._wanted))
        else:
            self._sync_next(self._wanted, dirty)

    def _sync_next(self, ticket: int, dirty: Sequence[Segment]) -> None:
        """Sync the segments of a group that are not durable yet; without any the rest of it."""
        assert self._log is not None
        if not dirty or not self._kernel.begin(dirty[0].fd, partial(self._segment_synced, ticket, dirty)):
            self._in_thread(partial(self._log.finish_sync, dirty), partial(self._group_synced, ticket))

    def _segment_synced(self, ticket: int, dirty: Sequence[Segment], number: int) -> None:
        log, then = self._log, partial(self._group_synced, ticket)
        assert log is not None
        try:
            if number:
                raise log.sync_failed(dirty[0].path, number)
            ended = len(dirty) == 1 and log.end_sync()
        except StorageError as error:
            self._end(error, then)
            return
        if ended:
            self._end(None, then)
        else:
            self._sync_next(ticket, dirty[1:])

    def _seal(self) -> None:
        """Sync the seal after a while without other syncs, or before the next group."""
        log = self._log
        if self._running is None and log is not None and log.seal_lags:
            self._note_begin()
            if not self._kernel.begin(log.begin_seal(), self._seal_synced):
                self._in_thread(log.sync_seal, self._go_on)

    def _seal_synced(self, number: int) -> None:
        assert self._log is not None
        if number:
            self._end(self._log.seal_failed(number), self._go_on)
        else:
            self._log.end_seal()
            self._end(None, self._go_on)

    def _in_thread(self, sync: Callable[[], object], then: Callable[[], None]) -> None:
        def done(future: asyncio.Future[object]) -> None:
            if not future.cancelled():
                self._end(future.exception(), then)

        asyncio.get_running_loop().run_in_executor(self._executor, sync).add_done_callback(done)

    def _note_begin(self) -> None:
        self._since, self._reported = time.monotonic(), False
        self._running = asyncio.get_running_loop().create_future()

    def _end(self, error: BaseException | None, then: Callable[[], None]) -> None:
        """End the present sync, and go on with `then` if it succeeded."""
        assert self._running is not None
        self._running.set_result(None)
        self._running = None
        if self._closed:
            return
        if error is None:
            then()
        else:
            self._on_synced(self._wanted, str(error) if isinstance(error, StorageError) else repr(error))

    def _group_synced(self, ticket: int) -> None:
        self.syncs += 1
        self._took(time.monotonic() - self._since)
        self._durable = ticket
        self._go_on()
        self._on_synced(ticket, "")

    def _go_on(self) -> None:
        """Start with what has gathered; the seal waits for its timer."""
        assert self._log is not None
        if self._log.seal_overdue:
            self._seal()
        elif self._wanted > self._durable:
            self._begin()
        elif self._log.seal_lags:
            self._seal_timer.set(asyncio.get_running_loop().time() + SEAL_LAG_S)
