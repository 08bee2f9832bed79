"""Read the log's older segments again and again, slowly, to find data that the disk changed before a follower needs it.

Source: docs/replication.md, "The log on disk".
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cluster.replication.model import Position
from cluster.replication.storage.entry import HEAD_BYTES
from cluster.replication.storage.log import SegmentedLog
from cluster.replication.storage.segment import READ_BYTES, walk
from pixiu.errors import LogDamaged, MalformedData

BYTES_PER_S: Final = 4 << 20
PAUSE_S: Final = 60.0
"""Pause between two passes, seconds."""


class Scrub:
    """Scrubber of one log.

    Args:
        on_rotten: called in the event loop with the last counter of a broken segment.
        bytes_per_s: limit of the reading rate.
        pause_s: pause between two passes.
    """

    def __init__(self, on_rotten: Callable[[int], None], bytes_per_s: int = BYTES_PER_S, pause_s: float = PAUSE_S) -> None:
        self._on_rotten, self._bytes_per_s, self._pause_s = on_rotten, bytes_per_s, pause_s
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.passes = 0
        self.found = 0

    def start(self, log: SegmentedLog) -> None:
        """Start scrubbing."""
        self._task = asyncio.create_task(self._run(log), name="log-scrub")

    async def close(self) -> None:
        """Stop, even in the middle of a segment."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, log: SegmentedLog) -> None:
        while True:
            for path, base, last in log.sealed_segments():
                if await asyncio.to_thread(self._whole, path, base, last):
                    continue
                if await asyncio.to_thread(self._is_broken, log, base, last):
                    self.found += 1
                    self._on_rotten(last)
            self.passes += 1
            await asyncio.sleep(self._pause_s)

    def _whole(self, path: Path, base: Position, last: int) -> bool:
        """Check a segment in a thread, without the log's lock; one that was trimmed or cut meanwhile is checked again."""
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError:
            return False
        counter, read, began = base.counter, 0, time.monotonic()
        try:
            for entry, _ in walk(fd, 0, os.fstat(fd).st_size, READ_BYTES):
                counter += 1
                if entry.counter != counter or self._closed:
                    return self._closed
                read += HEAD_BYTES + len(entry.payload)
                ahead_s = read / self._bytes_per_s - (time.monotonic() - began)
                if ahead_s > 0.1:
                    time.sleep(ahead_s)
        except (MalformedData, OSError):
            return False
        finally:
            os.close(fd)
        return counter == last

    @staticmethod
    def _is_broken(log: SegmentedLog, base: Position, last: int) -> bool:
        """Let the log check a segment, if it still has it."""
        if (base, last) not in [(each, end) for _, each, end in log.sealed_segments()]:
            return False
        try:
            log.verify(base.counter, last)
        except LogDamaged:
            return True
        return False
