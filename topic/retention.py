"""Retention: which segments of which parts may go, by age, by size, or as all channels have acknowledged them.

Source: docs/topics.md, "How it is stored".
"""

from __future__ import annotations

import asyncio
from typing import Final

from cluster.topics import entries as en
from pixiu.errors import PixiuError
from topic.clients.group import Group
from topic.offload.plan import expired
from topic.state.parts import Part
from topic.storage.part_log import PartLog

NO_LIMIT: Final = 1 << 62


class Retention:
    """Retention on a leader.

    Args:
        group: the replica.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.trims = 0

    async def look(self) -> None:
        """Look at all parts, and propose what is due. What is refused is found again."""
        store = self._group.store
        for part in list(store.state.parts.values()):
            topic, log = store.state.topics.get(en.topic_of(part.part)), store.logs.get(part.part)
            if topic is None or log is None or not (topic.retention_s or topic.retention_bytes or topic.retain_acknowledged):
                continue
            first = part.first
            if topic.retention_s or topic.retention_bytes:
                before_us = store.state.clock_us - topic.retention_s * 1_000_000 if topic.retention_s else 0
                most = topic.retention_bytes or NO_LIMIT
                if part.objects:
                    first = expired(part, before_us, most, log.bytes_from(part.stored) + log.tail_bytes)
                if first >= part.stored:
                    first = max(first, await asyncio.to_thread(log.expired, before_us, most, sealed=part.sealed))
            if not self._group.core.epoch:
                return
            if topic.retain_acknowledged:
                first = max(first, _whole_below(store.state.acknowledged(part.part), part, log))
            if first > part.first:
                try:
                    await self._group.request(en.TRIM, en.encode_trim(part.part, first))
                except PixiuError:
                    continue
                self.trims += 1


def _whole_below(offset: int, part: Part, log: PartLog) -> int:
    """The offset below which whole objects and segments lie below an offset; all of a sealed part, if that does."""
    if part.sealed and offset >= part.end:
        return part.end
    return max([log.first_of(offset), *(each.base for each in part.objects if each.base <= offset)])
