"""Publishes of one connection: handed on in order, many at a time, and answered in order.

Source: docs/nsq.md, "Promises".
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from nsqdoor.options import Options
from nsqdoor.protocol.commands import Refused
from nsqdoor.protocol.events import Publish
from nsqdoor.topics import Topics, refused
from pixiu.client.topics.writing.writer_shell import TopicReceipt
from pixiu.errors import Overloaded, PixiuError, UnknownTopic

FULL_S = 0.05
"""Wait before a message is offered again while the writer's queue is full, seconds."""


Outcomes = Sequence[tuple[Publish, Refused | None]]


def _is_known(receipts: Sequence[TopicReceipt] | PixiuError) -> bool:
    """True if awaiting the outcome takes no time."""
    return isinstance(receipts, PixiuError) or all(receipt.resolved for receipt in receipts)


class Publisher:
    """Publishes for one connection. Its bound is the session's: `Limits.max_publishes`.

    Args:
        topics: of the client's login.
        options: of the listener.
        published: called, in their order, with what is stored, or was not: several at once, so that their answers are one write.
    """

    def __init__(self, topics: Topics, options: Options, published: Callable[[Outcomes], None]) -> None:
        self._topics, self._options, self._published = topics, options, published
        self._offered: deque[tuple[Publish, Sequence[TopicReceipt] | PixiuError]] = deque()
        self._waiting: deque[Publish] = deque()
        """Not offered yet: their topic is looked up, or the writer is full."""
        self._task: asyncio.Task[None] | None = None

    def offer(self, found: Publish) -> None:
        """Publish."""
        if self._waiting or not self._topics.knows(found.topic) or not self._send(found):
            self._waiting.append(found)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="nsq-publisher")

    def close(self) -> None:
        """Answer nothing more. What was handed on is stored all the same."""
        if self._task is not None:
            self._task.cancel()

    @property
    def idle(self) -> bool:
        """True if everything is answered."""
        return self._task is None

    def _send(self, found: Publish) -> bool:
        try:
            self._offered.append((found, self._topics.send(found)))
        except Overloaded:
            if len(found.headers) > 1:  # some are under way, so the client has to be asked to send all again
                self._offered.append((found, Overloaded("the listener's queue is full", 1_000)))
                return True
            return False
        except PixiuError as error:
            self._offered.append((found, error))
        return True

    async def _run(self) -> None:
        while self._offered or self._waiting:
            while self._offered:
                done = [await self._first()]
                while self._offered and _is_known(self._offered[0][1]):
                    done.append(await self._first())
                self._published(done)
            if self._waiting:
                await self._advance()
        self._task = None

    async def _first(self) -> tuple[Publish, Refused | None]:
        found, receipts = self._offered.popleft()
        return found, await self._outcome(found, receipts)

    async def _outcome(self, found: Publish, receipts: Sequence[TopicReceipt] | PixiuError) -> Refused | None:
        error = receipts if isinstance(receipts, PixiuError) else None
        if not isinstance(receipts, PixiuError):
            for place, receipt in enumerate(receipts):
                if receipt.resolved and receipt.failure is None:
                    continue
                failed = await receipt.outcome()
                if failed is not None and error is None:
                    error, found.stored = failed, place if found.answers > 1 else 0
        if error is None:
            return None
        if isinstance(error, UnknownTopic):
            self._topics.forget(found.topic)
        return refused(error, found.command, found.topic)

    async def _advance(self) -> None:
        """Offer what waits, as far as it goes."""
        found = self._waiting[0]
        if not self._topics.knows(found.topic):
            try:
                await self._topics.ensure(found.topic, self._options)
            except PixiuError as error:
                self._waiting.popleft()
                self._offered.append((found, error))
                return
        while self._waiting and self._topics.knows(self._waiting[0].topic):
            if not self._send(self._waiting[0]):
                await asyncio.sleep(FULL_S)
                return
            self._waiting.popleft()
