"""Gives committed entries to the state machine, in order, a bounded batch a turn of the event loop.

Source: docs/stores.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from cluster.replication.folder import DataFolder
from cluster.replication.log import SegmentedLog
from cluster.replication.machine import StateMachine
from cluster.replication.model import Position
from pixiu.errors import DiskFull, LogDamaged, StorageError

BATCH_ENTRIES: Final = 4096
BATCH_BYTES: Final = 1 << 20
RETRY_S: Final = 1.0
"""How long after a full disk applying is tried again."""


class Applier:
    """Applies committed entries to one state machine.

    Args:
        machine: open.
        on_applied: called with the counter of the first entry of a batch, its answers, and how many replicas have it.
        on_log_failed: the log cannot be read.
        crash: ends the process: a state that cannot be brought forward serves nobody.
    """

    def __init__(
        self,
        machine: StateMachine,
        on_applied: Callable[[int, Sequence[object], int], None],
        on_log_failed: Callable[[str], None],
        crash: Callable[[BaseException], None],
    ) -> None:
        self._machine = machine
        self._on_applied, self._on_log_failed, self._crash = on_applied, on_log_failed, crash
        self._log: SegmentedLog | None = None
        self._target = 0
        self.copies = 0
        """Disks that what may be applied is on; 0: nobody is to be told (`events.Committed`)."""
        self._later: asyncio.Handle | None = None
        self._installing: asyncio.Task[None] | None = None
        self._waiting: list[Callable[[], None]] = []
        self._closed = False
        self.blocked = ""
        """Why nothing is applied now; empty otherwise."""

    def start(self, log: SegmentedLog) -> None:
        """Apply from this log."""
        self._log = log

    @property
    def behind(self) -> int:
        """Committed entries that are not applied."""
        return self._target - self._machine.applied

    @property
    def installing(self) -> bool:
        """A snapshot is being loaded."""
        return self._installing is not None

    def commit(self, counter: int, copies: int) -> None:
        """Everything up to here may be applied, by the next `run`."""
        self._target, self.copies = max(self._target, counter), copies

    def run(self) -> None:
        """Apply a batch; the next one follows in another turn of the loop."""
        if self._later is None and self.behind > 0:
            self._run()

    def run_soon(self) -> None:
        """The same, behind what waits for its turn of the loop now: a follower's acknowledgement leaves before it applies."""
        if self._later is None and self.behind > 0:
            self._later = asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._later = None
        if self._closed or self._installing is not None or self._log is None or self.behind <= 0:
            return
        after = self._machine.applied
        try:
            entries = self._log.read(after, min(BATCH_ENTRIES, self._target - after), BATCH_BYTES)
            answers = self._machine.apply(entries)
        except DiskFull as full:
            self.blocked = str(full)
            self._later = asyncio.get_running_loop().call_later(RETRY_S, self._run)
            return
        except (LogDamaged, StorageError) as problem:
            self._closed = True
            self._on_log_failed(str(problem))
            return
        except Exception as error:  # a bug in the state machine: what it holds now is unknown
            self._closed = True
            self._crash(error)
            return
        self.blocked = ""
        if self.behind > 0:
            self._later = asyncio.get_running_loop().call_soon(self._run)
        self._on_applied(after + 1, answers, self.copies)

    def install(self, position: Position, folder: DataFolder) -> None:
        """Load the snapshot that was received; nothing is applied until that is done."""
        self._target = max(self._target, position.counter)
        self._installing = asyncio.create_task(self._install(folder))

    async def _install(self, folder: DataFolder) -> None:
        try:
            await self._machine.load(folder.received)
            await asyncio.to_thread(folder.discard_received)
        except Exception as error:  # it is still there, and is loaded at the next start
            self._closed = True
            self._crash(error)
        finally:
            self._installing = None
        waiting, self._waiting = self._waiting, []
        if not self._closed:
            for callback in waiting:
                callback()
        self.run()

    def when_loaded(self, callback: Callable[[], None]) -> None:
        """Call it once the state is not behind the log's beginning: at once, unless a snapshot is being loaded."""
        if self._installing is None:
            callback()
        else:
            self._waiting.append(callback)

    async def close(self) -> None:
        """Stop: nothing more is applied."""
        self._closed = True
        if self._later is not None:
            self._later.cancel()
        if self._installing is not None:
            self._installing.cancel()
            await asyncio.gather(self._installing, return_exceptions=True)
