"""Reads blocks from the disk or the object store into memory, in a thread, ahead of who asks for them.

Source: docs/topics.md, "How it is stored".
"""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_left
from collections.abc import Awaitable, Callable
from typing import Final

from pixiu.errors import MalformedData, Unavailable
from pixiu.objects.manifest import StoredObject
from pixiu.rpc.backoff import Backoff
from pixiu.wire.block import Block, Stamp
from topic.state.parts import Part
from topic.storage.part_log import PartLog
from topic.storage.segment import Gap, Stored, read_segment
from topic.storage.store import READ_AHEAD_BYTES, Store

TRIES: Final = 6
"""Of a fetch, until whoever waits is told that the object store does not answer."""
FIRST_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 1.0
Fetch = Callable[[int, StoredObject, int], Awaitable[list[Stored]]]


async def no_store(_part: int, found: StoredObject, _offset: int) -> list[Stored]:
    """Fetch where there is no object store."""
    raise Unavailable(f"this process cannot read the store {found.url}")


class Reader:
    """Reads for all streams of a process.

    Args:
        store: returns the store of this moment.
        on_gap: called with a part and offsets that cannot be read here.
        fetch: blocks of an object from the one with an offset on. Raises Unavailable, MalformedData.
    """

    def __init__(self, store: Callable[[], Store], on_gap: Callable[[int, Gap], None], fetch: Fetch = no_store) -> None:
        self._store, self._on_gap, self._fetch = store, on_gap, fetch
        self._loading: dict[tuple[int, int], asyncio.Task[Gap | None]] = {}
        """(part, offset) → reading that is under way."""
        self.loads = 0

    async def find(self, part: int, offset: int) -> tuple[Stamp, Block] | Gap:
        """The block with an offset, or the gap that begins there. What lies at or beyond the end, or in a part that is not here, is
        a gap without an end. Raises Unavailable: it is in the object store, which does not answer."""
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
        """Bring the block with an offset into memory, and those after it. Returns the gap instead if it cannot be read. Raises
        Unavailable."""
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
            state = store.state.parts.get(part)
            found = state.object_at(offset) if state is not None else None
            if found is not None:
                store.keep(part, await self.fetch(part, found, offset))
                if store.find(part, offset) is not None:
                    return None
            gap = await asyncio.to_thread(log.gap_at, offset)
            if log.segment_at(offset) is segment:  # else compaction has put another file in its place meanwhile
                return self._gap(part, log, offset, gap, found)

    async def fetch(self, part: int, found: StoredObject, offset: int) -> list[Stored]:
        """Blocks of an object from the one with an offset on; none if it is damaged. Raises Unavailable after some tries."""
        backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S, random.random)
        for _ in range(TRIES - 1):
            try:
                return await self._fetch(part, found, offset)
            except Unavailable:
                await asyncio.sleep(backoff.next_s())
            except MalformedData:
                return []
        try:
            return await self._fetch(part, found, offset)
        except MalformedData:
            return []

    async def offset_at(self, part: Part, at_us: int) -> int:
        """The first offset of a part that was appended at a time or later; its end if there is none. Raises Unavailable."""
        log = self._store().logs.get(part.part)
        if log is None:
            return part.end
        objects = part.objects
        at = bisect_left(objects, at_us, key=lambda each: each.last_us)
        if at == len(objects) or log.segment_at(objects[at].base) is not None:
            return min(await asyncio.to_thread(log.offset_at, at_us), part.end)
        offset, end = objects[at].base, objects[at].end
        while offset < end:
            blocks = await self.fetch(part.part, objects[at], offset)
            found = next((each.stamp.base for each in blocks if each.stamp.at_us >= at_us), None)
            if found is not None:
                return max(found, part.first)
            offset = blocks[-1].stamp.base + blocks[-1].block.count if blocks else end
        return max(end, part.first)

    def _gap(self, part: int, log: PartLog, offset: int, gap: Gap, found: StoredObject | None) -> Gap | None:
        store = self._store()
        if found is not None:
            gap = Gap(offset, found.end)
        elif (state := store.state.parts.get(part)) is not None and offset < state.stored:  # objects leave given up offsets out
            later = [each.base for each in state.objects if each.base > offset]
            gap = Gap(offset, min([*later, gap.high]))
        if store.logs.get(part) is not log or store.find(part, offset) is not None:
            return None
        first = store.state.parts[part].first
        if offset < first:  # retention dropped it meanwhile
            return Gap(offset, first)
        self._on_gap(part, gap)
        return gap
