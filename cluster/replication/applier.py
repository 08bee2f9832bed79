"""Apply committed entries to the state machine, in order, one bounded batch per turn of the event loop.

Source: docs/stores.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from cluster.replication.machine import StateMachine
from cluster.replication.model import Entry, Position
from cluster.replication.storage.folder import DataFolder
from cluster.replication.storage.log import SegmentedLog
from pixiu.errors import DiskFull, LogDamaged, StateDamaged, StorageError

BATCH_ENTRIES: Final = 4096
BATCH_BYTES: Final = 256 << 10
"""Bytes of entries applied in one turn of the event loop: 16,000 of Pi's appends, some 20 ms. A larger entry is applied alone."""
RETRY_S: Final = 1.0
"""Interval between attempts to apply while the disk is full or a value is broken, seconds."""


class Applier:
    """Applies committed entries to one state machine.

    Args:
        machine: the state machine, open.
        on_applied: called with the counter of the first entry of a batch, its answers, and how many replicas have it.
        on_log_failed: called when the log cannot be read.
        crash: ends the process, because a state that cannot be brought forward is of no use.
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
        """Number of disks that hold the committed entries; 0: replication is not confirmed to writers (`events.Committed`)."""
        self._later: asyncio.Handle | None = None
        self._installing: asyncio.Task[None] | None = None
        self._waiting: list[Callable[[], None]] = []
        self._closed = False
        self._answered = 0
        """Last counter whose answer was given. A state that goes back produces the answers again; they are dropped."""
        self._looked = 0
        """Last counter given to `StateMachine.look_ahead` while entries cannot be applied."""
        self.blocked: DiskFull | StateDamaged | None = None
        """Reason why nothing is applied now."""

    def start(self, log: SegmentedLog) -> None:
        """Set the log to apply entries from."""
        self._log = log

    @property
    def behind(self) -> int:
        """Number of committed entries that are not applied yet."""
        return self._target - self._machine.applied

    @property
    def installing(self) -> bool:
        """True while a snapshot is being loaded."""
        return self._installing is not None

    def commit(self, counter: int, copies: int) -> None:
        """Allow the next `run` to apply everything up to this counter."""
        self._target, self.copies = max(self._target, counter), copies

    def run(self) -> None:
        """Apply a batch; the next one follows in another turn of the loop."""
        if self._later is not None:
            self._look_at_once()
        if self._later is None and self.behind > 0:
            self._run()

    def run_soon(self) -> None:
        """Like `run`, but after the callbacks that wait in the event loop: a follower's acknowledgement leaves before it
        applies."""
        if self._later is not None:
            self._look_at_once()
        if self._later is None and self.behind > 0:
            self._later = asyncio.get_running_loop().call_soon(self._run)

    def _look_at_once(self) -> None:
        """Run at once if the state is blocked by damage and has not seen every committed entry: a new one may resolve it."""
        if isinstance(self.blocked, StateDamaged) and self._looked < self._target and self._later is not None:
            self._later.cancel()
            self._later = None

    def _run(self) -> None:
        self._later = None
        if self._closed or self._installing is not None or self._log is None:
            return
        after = self._machine.applied
        if after >= self._target:
            return
        loop = asyncio.get_running_loop()
        try:
            entries = self._log.read(after, min(BATCH_ENTRIES, self._target - after), BATCH_BYTES)
            answers = self._machine.apply(entries)
        except DiskFull as full:
            self.blocked = full
            self._later = loop.call_later(RETRY_S, self._run)
            return
        except StateDamaged as damage:
            self._stand_still(damage, after)
            return
        except (LogDamaged, StorageError) as problem:
            self._closed = True
            self._on_log_failed(str(problem))
            return
        except Exception as error:  # a bug in the state machine: its contents are unknown now
            self._closed = True
            self._crash(error)
            return
        self.blocked = None
        if self.behind > 0:
            self._later = loop.call_soon(self._run)
        known, self._answered = max(self._answered - after, 0), max(self._answered, after + len(answers))
        if known < len(answers):
            self._on_applied(after + known + 1, answers[known:], self.copies)

    def _stand_still(self, damage: StateDamaged, after: int) -> None:
        """Handle an entry that cannot be applied: look through the entries after it, a batch at a time, for one that resolves
        it."""
        if not isinstance(self.blocked, StateDamaged):
            self._looked = after
        self.blocked = damage
        ahead: Sequence[Entry] = ()
        try:
            if self._log is not None and self._looked < self._target:
                ahead = self._log.read(self._looked, min(BATCH_ENTRIES, self._target - self._looked), BATCH_BYTES)
        except (LogDamaged, StorageError) as problem:
            self._closed = True
            self._on_log_failed(str(problem))
            return
        if ahead:
            self._machine.look_ahead(ahead)
            self._looked = ahead[-1].counter
        loop = asyncio.get_running_loop()
        goes_on = ahead or self._machine.applied != after
        self._later = loop.call_soon(self._run) if goes_on else loop.call_later(RETRY_S, self._run)

    def install(self, position: Position, folder: DataFolder) -> None:
        """Load the received snapshot; nothing is applied until that is done."""
        self._target = max(self._target, position.counter)
        self._installing = asyncio.create_task(self._install(folder))

    async def _install(self, folder: DataFolder) -> None:
        try:
            await self._machine.load(folder.received)
            self.blocked = None
            await asyncio.to_thread(folder.discard_received)
        except Exception as error:  # the snapshot is still there and is loaded at the next start
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
        """Call it when the state reaches the beginning of the log: now, or once the snapshot that is being loaded is in use."""
        if self._installing is None:
            callback()
        else:
            self._waiting.append(callback)

    async def close(self) -> None:
        """Stop applying."""
        self._closed = True
        if self._later is not None:
            self._later.cancel()
        if self._installing is not None:
            self._installing.cancel()
            await asyncio.gather(self._installing, return_exceptions=True)
