"""Sync a log in a thread: while one group is being synced the next one gathers. The seal follows a group in a sync of its own, at
most once in a tenth of a second, and nobody waits for it.

Source: docs/stores.md; docs/decisions/0282-a-seal-may-lag-a-tenth-of-a-second.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from cluster.replication.storage.label import SEAL_LAG_S
from cluster.replication.storage.log import SegmentedLog
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
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="log-sync")
        self._running: asyncio.Future[object] | None = None
        self._seal_timer = DeadlineTimer(self._seal)
        self._wanted = 0
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

    def _begin(self) -> None:
        assert self._log is not None
        self._run(self._log.sync, self._group_synced)

    def _seal(self) -> None:
        """Sync the seal after a while without other syncs. A group that is being synced takes care of it by itself."""
        if self._running is None and self._log is not None and self._log.seal_lags:
            self._run(self._log.sync_seal, self._go_on)

    def _run(self, sync: Callable[[], object], then: Callable[[int], None]) -> None:
        self._since, self._reported = time.monotonic(), False
        ticket = self._wanted
        self._running = asyncio.get_running_loop().run_in_executor(self._executor, sync)
        self._running.add_done_callback(lambda future: self._done(ticket, then, future))

    def _done(self, ticket: int, then: Callable[[int], None], future: asyncio.Future[object]) -> None:
        self._running = None
        error = None if future.cancelled() else future.exception()
        if self._closed or future.cancelled():
            return
        if error is not None:
            self._on_synced(ticket, str(error) if isinstance(error, StorageError) else repr(error))
            return
        then(ticket)

    def _group_synced(self, ticket: int) -> None:
        self.syncs += 1
        self._took(time.monotonic() - self._since)
        self._go_on(ticket)
        self._on_synced(ticket, "")

    def _go_on(self, ticket: int) -> None:
        """Start with what has gathered; the seal waits for its timer."""
        assert self._log is not None
        if self._wanted > ticket:
            self._begin()
        elif self._log.seal_lags:
            self._seal_timer.set(asyncio.get_running_loop().time() + SEAL_LAG_S)
