"""Syncs a log in a thread: while one group is on its way to the disk the next one gathers.

Source: docs/stores.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from cluster.replication.log import SegmentedLog
from pixiu.errors import StorageError


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
        """Wait for the sync under way; a disk that hangs is not waited for long."""
        self._closed = True
        if self._running is not None:
            await asyncio.wait({self._running}, timeout=2.0)
        self._executor.shutdown(wait=False)

    def _begin(self) -> None:
        assert self._log is not None
        self._since, self._reported = time.monotonic(), False
        ticket = self._wanted
        self._running = asyncio.get_running_loop().run_in_executor(self._executor, self._log.sync)
        self._running.add_done_callback(lambda future: self._done(ticket, future))

    def _done(self, ticket: int, future: asyncio.Future[object]) -> None:
        self._running = None
        if self._closed or future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._on_synced(ticket, str(error) if isinstance(error, StorageError) else repr(error))
            return
        self.syncs += 1
        self._took(time.monotonic() - self._since)
        if self._wanted > ticket:
            self._begin()
        self._on_synced(ticket, "")
