"""Durable topics by the SDK.

Source: docs/performance.md, "Durable topics beside others"; docs/sdk.md, "Durable topics".
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import pixiu
from comparison.cases import Case

CREDIT: Final = 5_000
TAKEN: Final = 500
"""Messages of one step."""
QUEUE: Final = 200_000


class Ours:
    """A client: writers of all topics, and a member or a reader of the first one."""

    can_begin_anew = True

    def __init__(self, proxies: str, case: Case, topics: Sequence[str]) -> None:
        self._case, self._topics = case, topics
        self._px: Any = pixiu.connect(proxies, client="bench", queue_records=QUEUE, queue_bytes=QUEUE << 10)
        self._writers: list[Any] = []
        self._taking: Any = None
        self._channels = 0
        self._seen: set[tuple[int, int]] = set()
        self.repeated = 0

    async def open(self) -> None:
        """Make the topics, of one part each."""
        await self._px.__aenter__()
        for name in self._topics:
            await self._px.topics.create(name, parts=1)
            self._writers.append(await self._px.durable_topic(name).writer().open())

    async def write(self, messages: int, block: int) -> None:
        """Write to every topic, in blocks, and wait until all is confirmed."""
        body, level = bytes(self._case.bytes), self._case.level
        if messages == 1:
            for writer in self._writers:
                await (await writer.send(body, level=level))
            return
        part = max(block // self._case.bytes, 1)
        while messages:
            number = min(part, messages)
            messages -= number
            for writer in self._writers:
                for _ in range(number):
                    await writer.send(body, level=level)
                if messages:  # else the block leaves when all is waited for
                    await writer.flush()
        await asyncio.gather(*(writer.wait_finished() for writer in self._writers))

    async def take(self) -> int:
        """Take some messages, and acknowledge them if the case does."""
        if self._taking is None:
            topic = self._px.durable_topic(self._topics[0])
            take = self._case.act == "take"
            self._channels += 1
            self._taking = (
                topic.channel(f"bench{self._channels}", credit=CREDIT, ordered=self._case.ordered) if take else topic.reader()
            )
            await self._taking.open()
        for _ in range(TAKEN):
            message = await self._taking.__anext__()
            if self._case.act == "take":
                message.ack_soon()
                if message.position in self._seen:
                    self.repeated += 1
                self._seen.add(message.position)
        return TAKEN

    async def again(self) -> None:
        """Take from the beginning, as a new channel or reader."""
        await self.finish()
        await self._taking.close()
        self._taking = None
        self._seen.clear()

    async def finish(self) -> None:
        """Wait until all acknowledgements are committed."""
        if self._case.act == "take":
            await self._taking.flush()

    async def close(self) -> None:
        """Leave."""
        if self._taking is not None:
            await self._taking.close()
        await self._px.__aexit__(None, None, None)
