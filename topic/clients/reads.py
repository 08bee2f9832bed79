"""Reads without a channel: stored blocks as they are, from an offset, a time or the end on.

Source: docs/topics.md, "Reading".
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from cluster.topics import entries as en
from cluster.topics.entries import Child, number_of, part_id
from pixiu.errors import Overloaded, StaleWriter, Unavailable, WrongPartition
from pixiu.wire.block import Flag, stamped
from pixiu.wire.v1 import topic_pb2 as pb
from topic.clients.group import Group, topic_named
from topic.state.parts import Part
from topic.state.state import Done
from topic.storage.segment import Gap

MAX_BYTES: Final = 1 << 20
"""Bytes of blocks in one reply; one block may have more."""
MAX_WAIT_MS: Final = 30_000
PATIENT_S: Final = 2.0
"""Time for which a read that does not wait for new messages waits for the topic's rate, seconds."""
MAX_PACED_S: Final = 5.0
"""Longest time after which a reader is asked to come back: the rate may have been raised."""
MAX_WAITING: Final = 10_000
"""Reads that wait for a first block. Policy: a further one is refused with OVERLOADED."""


class Reads:
    """Reads of all clients.

    Args:
        group: the replica.
        store_of: describes a part's object store; None: it has none.
    """

    def __init__(self, group: Group, store_of: Callable[[Part], pb.TopicStore | None]) -> None:
        self._group, self._store_of = group, store_of
        self._waiting: dict[int, tuple[int, set[asyncio.Event]]] = {}
        """Part → its end, and those who wait for its next block."""
        self.waiting = 0
        self.stopping = False

    def applied(self) -> None:
        """Wake those whose part has grown, was sealed, or is gone."""
        if not self._waiting:
            return
        parts = self._group.store.state.parts
        for number, (end, _) in list(self._waiting.items()):
            part = parts.get(number)
            if part is None or part.sealed or part.end > end:
                self._wake(number)

    def wake_all(self) -> None:
        """Wake everybody: this replica leads no longer, or stops."""
        for part in list(self._waiting):
            self._wake(part)

    def _wake(self, part: int) -> None:
        for event in self._waiting.pop(part)[1]:
            event.set()

    async def read(self, request: pb.TopicReadRequest) -> pb.TopicReadReply:
        """Serve a read. Raises NotLeader, Unavailable, NotServed, WrongPartition, Overloaded."""
        group = self._group
        group.check_reads()
        part = self._part(request)
        offset = await self._start(part, request)
        deadline = asyncio.get_running_loop().time() + min(request.wait_ms, MAX_WAIT_MS) / 1000
        while offset >= part.end and not part.sealed and await self._wait(part, deadline):
            part = self._part(request)
        blocks, following, gap = await self._paced(part, offset, min(request.max_bytes or MAX_BYTES, MAX_BYTES), deadline)
        group.check_reads()
        part, at_end = self._part(request), request.WhichOneof("start") == "end"
        log = group.store.logs.get(part.part) if at_end else None
        reply = pb.TopicReadReply(
            blocks=b"".join(blocks), next=following, first=part.first, committed_end=part.end, sealed=part.sealed,
            children=children_of(part.children), store=self._store_of(part) if at_end else None,
            mean_bytes=-(-log.stored_bytes // (log.end - log.first)) if log is not None and log.end > log.first else 0,
        )  # fmt: skip
        if gap is not None:
            reply.gap_low, reply.gap_high, reply.next = gap.low, gap.high, gap.high
        return reply

    def _part(self, request: pb.TopicReadRequest) -> Part:
        topic = topic_named(self._group.store.state, request.topic)
        part = self._group.store.state.parts.get(part_id(topic.topic, request.part))
        if part is None:
            raise WrongPartition(f"part {request.part} of {topic.name} is not in this group; ask a proxy where it is")
        return part

    async def _start(self, part: Part, request: pb.TopicReadRequest) -> int:
        match request.WhichOneof("start"):
            case "time_us":
                return await self._group.reader.offset_at(part, request.time_us)
            case "end":
                return part.end
            case _:
                return request.offset

    async def _wait(self, part: Part, deadline: float) -> bool:
        """Wait for the part's next block. Returns False if the time is over, or this process stops."""
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0 or self.stopping:
            return False
        if self.waiting >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} reads wait at this replica; try again later", 1000)
        event = asyncio.Event()
        self._waiting.setdefault(part.part, (part.end, set()))[1].add(event)
        self.waiting += 1
        try:
            async with asyncio.timeout(left):
                await event.wait()
        except TimeoutError:
            return False
        finally:
            self.waiting -= 1
            waiting = self._waiting.get(part.part)
            if waiting is not None:
                waiting[1].discard(event)
                if not waiting[1]:
                    del self._waiting[part.part]
        self._group.check_reads()
        return True

    async def _paced(self, part: Part, offset: int, limit: int, deadline: float) -> tuple[list[bytes], int, Gap | None]:
        """Collect by the topic's rate: nothing if that has to wait for longer than the caller waits. One that does not wait does so
        for `PATIENT_S`, or is refused with the time after which to come back."""
        loop, paces = asyncio.get_running_loop(), self._group.core.paces
        until = max(deadline, loop.time() + PATIENT_S)
        while offset < part.end and (wait_s := paces.wait_s(part, time.monotonic())):
            if self.stopping or wait_s > until - loop.time():
                if (left_s := deadline - loop.time()) <= 0:
                    text = f"part {number_of(part.part)} has given what the topic's read rate allows; try again in {wait_s:.3f} s"
                    raise Overloaded(text, math.ceil(min(wait_s, MAX_PACED_S) * 1000))
                await asyncio.sleep(0 if self.stopping else left_s)
                return [], offset, None
            await asyncio.sleep(wait_s)
        limit = paces.read_limit(part, limit, time.monotonic())
        blocks, messages, following, gap = await self._collect(part, offset, limit)
        if blocks:
            paces.read(part, messages, sum(map(len, blocks)), time.monotonic())
        return blocks, following, gap

    async def _collect(self, part: Part, offset: int, limit: int) -> tuple[list[bytes], int, int, Gap | None]:
        """Stored blocks from an offset on, their messages from there on without those that compaction has removed, the offset
        behind them, and the gap that follows, if one does."""
        blocks, messages, took = list[bytes](), 0, 0
        if offset < part.first:
            return blocks, messages, part.first, Gap(offset, part.first)
        end = part.end
        while offset < end and (not blocks or took < limit):
            try:
                found = await self._group.reader.find(part.part, offset)
            except Unavailable:
                if blocks:
                    break
                raise
            if isinstance(found, Gap):
                return blocks, messages, offset, found if found.high > found.low else None
            stamp, block = found
            data = stamped(block.data, stamp)
            if blocks and took + len(data) > limit:
                break
            blocks.append(data)
            took += len(data)
            following = stamp.base + block.count
            messages += 0 if block.flags & Flag.HOLE else following - offset
            offset = following
        return blocks, messages, offset, None


def children_of(children: Sequence[Child]) -> list[pb.TopicPart]:
    """Children of a sealed part on the wire."""
    return [pb.TopicPart(number=number, low=low, high=high, group=group) for number, low, high, group in children]


async def positions(group: Group, request: pb.WriterPositionsRequest) -> pb.WriterPositionsReply:
    """Answer with a writer's last messages in parts, after its other processes are shut out if the request has an epoch. Raises
    NotLeader, Unavailable, StaleWriter."""
    group.check_reads()
    if request.epoch and request.topic in group.store.state.topics:
        answer = await group.request(en.FENCE, en.encode_fence(request.topic, request.writer, request.epoch))
        assert isinstance(answer, Done)
        if not answer.ok:
            raise StaleWriter(answer.why)
        group.check_reads()
    reply = pb.WriterPositionsReply(epoch=group.store.state.fences.get((request.topic, request.writer), 0))
    for number in request.parts:
        part = group.store.state.parts.get(part_id(request.topic, number))
        if part is None or part.opening:
            reply.positions.add()
            continue
        writer = part.writers.get(request.writer)
        if writer is not None:
            found = reply.positions.add(position=writer.position, progress=writer.progress, here=True)
        else:
            found = reply.positions.add(progress=part.inherited_progress(request.writer), here=True)
        for before, position, progress in part.inherited_of(request.writer):
            found.inherited.add(part=before, position=position, progress=progress)
    return reply
