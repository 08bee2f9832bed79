"""Syncs a log in a thread: while one group is on its way to the disk the next one gathers. The seal follows a group by its own
sync, once in a tenth of a second at most, for which nobody waits.

Source: docs/stores.md; docs/decisions/0282-a-seal-may-lag-a-tenth-of-a-second.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from cluster.replication.label import SEAL_LAG_S
from cluster.replication.log import SegmentedLog
from pixiu.errors import StorageError
from pixiu.rpc.deadline_timer import DeadlineTimer


class Syncer:
    """Group commit of one log.

    Args:
        on_synced: called in the event loop with a ticket that is durable, or with why nothing will be.
        took: called in the event loop with how long a sync took, seconds.
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
        """Set the log whose changes are to be synced."""
        self._log = log

    def want(self, ticket: int) -> None:
        """Everything up to this ticket is in the log and must become durable."""
        self._wanted = ticket
        if self._running is None and not self._closed:
            self._begin()

    def hung_s(self, now: float) -> float:
        """How long the sync under way has been running, seconds; 0 when none is."""
        return now - self._since if self._running is not None else 0.0

    def report_once(self) -> bool:
        """Whether this is the first call for the sync under way."""
        first, self._reported = not self._reported, True
        return first

    async def close(self) -> None:
        """Wait for the sync under way, or sync the seal; a disk that hangs is not waited for long."""
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
        """Nothing was to be synced for a while: the seal is made durable now. A group under way sees to it by itself."""
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
        """Begin with what gathered meanwhile; the seal waits for its turn."""
        assert self._log is not None
        if self._wanted > ticket:
            self._begin()
        elif self._log.seal_lags:
            self._seal_timer.set(asyncio.get_running_loop().time() + SEAL_LAG_S)
