"""Reads blocks from the disk into memory, in a thread, ahead of who asks for them.

Source: docs/topics.md, "How it is stored".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pixiu.wire.block import Block, Stamp
from topic.storage.part_log import PartLog
from topic.storage.segment import Gap, read_segment
from topic.storage.store import READ_AHEAD_BYTES, Store


class Reader:
    """Reads for all streams of a process.

    Args:
        store: returns the store of this moment.
        on_gap: called with a part and offsets that cannot be read here.
    """

    def __init__(self, store: Callable[[], Store], on_gap: Callable[[int, Gap], None]) -> None:
        self._store, self._on_gap = store, on_gap
        self._loading: dict[tuple[int, int], asyncio.Task[Gap | None]] = {}
        """(part, offset) → reading that is under way."""
        self.loads = 0

    async def find(self, part: int, offset: int) -> tuple[Stamp, Block] | Gap:
        """The block with an offset, or the gap that begins there. What lies at or beyond the end, or in a part that is not here, is
        a gap without an end."""
        for _ in range(2):  # memory may be so short that the block is gone again
            found = self._store().find(part, offset)
            if found is not None:
                return found
            gap = await self.load(part, offset)
            if gap is not None:
                return gap
        found = self._store().find(part, offset)
        return found if found is not None else Gap(offset, offset)

    async def load(self, part: int, offset: int) -> Gap | None:
        """Bring the block with an offset into memory, and those after it. Returns the gap instead if it cannot be read."""
        key = part, offset
        task = self._loading.get(key)
        if task is None:
            task = self._loading[key] = asyncio.create_task(self._load(part, offset))
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        return await asyncio.shield(task)

    async def _load(self, part: int, offset: int) -> Gap | None:
        store = self._store()
        log = store.logs.get(part)
        if log is None or offset >= log.end:
            return Gap(offset, offset)
        self.loads += 1
        while True:
            segment = log.segment_at(offset)
            if segment is not None:
                store.keep(part, await asyncio.to_thread(read_segment, store.files, segment, offset, READ_AHEAD_BYTES))
            if store.find(part, offset) is not None:
                return None
            gap = await asyncio.to_thread(log.gap_at, offset)
            if log.segment_at(offset) is segment:  # else compaction has put another file in its place meanwhile
                return self._gap(part, log, offset, gap)

    def _gap(self, part: int, log: PartLog, offset: int, gap: Gap) -> Gap | None:
        store = self._store()
        if store.logs.get(part) is not log or store.find(part, offset) is not None:
            return None
        first = store.state.parts[part].first
        if offset < first:  # retention dropped it meanwhile
            return Gap(offset, first)
        self._on_gap(part, gap)
        return gap
