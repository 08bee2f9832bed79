"""Gaps: offsets that this replica cannot read. Other replicas of the group may have their blocks; what none has is given up.

    a read, the start, a snapshot ──▶ gap ──▶ other replicas ──▶ blocks are written in place of it
                                                      └── all of them cannot read it either: the leader proposes LOST

A gap is given up only when every replica that the layout wants has answered that it cannot read it, and after a while, since a disk
may fail once and answer again.

Source: docs/topics.md, "Damage".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import grpc.aio

from cluster.process.context import Context
from cluster.topics import entries as en
from cluster.wire.v1 import topic_group_pb2 as pb
from cluster.wire.v1 import topic_group_pb2_grpc as pb_grpc
from pixiu.discovery.node import Node
from pixiu.errors import MalformedData, PixiuError, StorageError, Unavailable
from pixiu.rpc.channels import Channels
from pixiu.wire.block import STAMP_BYTES, Flag, parse_stored, stored_size
from topic.clients.group import Group
from topic.storage.cutting import clipped
from topic.storage.machine import Machine
from topic.storage.segment import Gap, Stored

AGAIN_S: Final = 10.0
"""Interval at which other replicas are asked again."""
GIVE_UP_S: Final = 60.0
"""Age of a gap from which on it may be given up."""
ASK_S: Final = 10.0
MAX_GAPS: Final = 10_000
"""Gaps that are known at a time. Policy: others are found again when they are read."""
FOUND: Final = "topic_gap"
MENDED: Final = "topic_gap_mended"
LOST: Final = "topic_gap_given_up"


class Answer(Enum):
    """Another replica's answer."""

    UNKNOWN = 0
    """None, or it does not know."""
    UNREADABLE = 1


@dataclass(slots=True)
class _Known:
    """A gap."""

    gap: Gap
    since: float
    given_up: bool = False


class Mending:
    """The gaps of one replica.

    Args:
        context: of the process.
        group: the replica.
        machine: its state.
        now: monotonic seconds.
    """

    def __init__(
        self, context: Context[Any], group: Group, machine: Machine, now: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self._context, self._group, self._machine, self._now = context, group, machine, now
        self._channels = Channels("topic", own=context.tls)
        self._gaps: dict[tuple[int, int], _Known] = {}
        """By part and first offset."""
        self._wake = asyncio.Event()
        self._looking = asyncio.Lock()
        self.mended = self.lost = 0

    def __len__(self) -> int:
        return len(self._gaps)

    @property
    def text(self) -> str:
        """Report for an operator; empty: there is no gap."""
        if not self._gaps:
            return ""
        (part, _), known = next(iter(self._gaps.items()))
        first = f"part {en.number_of(part)} of topic {en.topic_of(part)}, offsets {known.gap.low} to {known.gap.high - 1}"
        count = f"{len(self._gaps)} gaps in stored topics, first {first};"
        if all(each.given_up for each in self._gaps.values()):
            return f"{count} no replica can read them, and they are given up; this disk or its memory is failing"
        return f"{count} waiting for a replica that can read them"

    def found(self, part: int, gap: Gap) -> None:
        """Note a gap: a read failed."""
        key = part, gap.low
        if gap.high > gap.low and key not in self._gaps and len(self._gaps) < MAX_GAPS:
            self._gaps[key] = _Known(gap, self._now())
            self._context.log.error(FOUND, part=part, low=gap.low, high=gap.high)
            log = self._group.store.logs.get(part)
            if log is not None and gap not in log.gaps:
                log.gaps.append(gap)
            self._wake.set()

    def replaced(self) -> None:
        """Begin with a new store."""
        self._gaps.clear()
        for part, log in self._group.store.logs.items():
            for gap in list(log.gaps):
                self.found(part, gap)

    async def run(self) -> None:
        """Mend what can be mended, for ever."""
        while True:
            try:
                async with asyncio.timeout(AGAIN_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await self.look()

    async def look(self) -> None:
        """Try to fill all gaps, now."""
        async with self._looking:
            for (part, low), known in list(self._gaps.items()):
                if await self._look(part, known):
                    self._gaps.pop((part, low), None)

    def open(self) -> list[tuple[int, Gap]]:
        """Gaps that are not given up, by part."""
        return [(part, known.gap) for (part, _), known in self._gaps.items() if not known.given_up]

    def given_up_at(self, part: int, offset: int) -> int:
        """The end of a gap of this part that was given up and has an offset; 0: there is none."""
        found = (known.gap.high for (number, _), known in self._gaps.items() if number == part and known.given_up
                 and known.gap.low <= offset < known.gap.high)  # fmt: skip
        return next(found, 0)

    async def give_up(self, gaps: Sequence[tuple[int, Gap]]) -> None:
        """Give up gaps that an operator does not want to wait for. Raises PixiuError."""
        for part, gap in gaps:
            known = self._gaps.get((part, gap.low))
            if known is not None:
                await self._lose(part, known)

    async def close(self) -> None:
        """Close connections."""
        await self._channels.close()

    async def _look(self, part: int, known: _Known) -> bool:
        """Try to fill a gap. Returns True if it is none any more."""
        state, gap = self._group.store.state.parts.get(part), known.gap
        if state is None or state.first >= gap.high:
            return True
        gap = Gap(max(gap.low, state.first), gap.high)  # nobody has what retention has dropped
        if known.given_up:
            return False
        if not isinstance(stored := await self._from_store(part, gap), Answer):
            return await self._fill(part, gap, stored)
        log = self._group.store.logs.get(part)
        if log is not None and state.flags & Flag.HOLE:  # replicas may have it in other blocks
            gap = Gap(max(await asyncio.to_thread(log.begin_of, gap.low), state.first), gap.high)
        answers = list[Answer]()
        for node in self._others():
            found = await self._ask(node, part, gap)
            if not isinstance(found, Answer):
                return await self._fill(part, gap, found)
            answers.append(found)
        wanted = self._context.view.layout.roles["topic"].replicas if "topic" in self._context.view.layout.roles else 0
        nobody = answers.count(Answer.UNREADABLE) == len(answers) >= max(wanted, 1) - 1
        if nobody and self._group.core.delivers and self._now() >= known.since + GIVE_UP_S:
            with suppress(PixiuError):  # it is tried again
                await self._lose(part, known)
        return False

    async def _from_store(self, part: int, gap: Gap) -> list[Stored] | Answer:
        """All blocks of a gap, of the object store."""
        found, at = list[Stored](), gap.low
        while at < gap.high:
            state = self._group.store.state.parts.get(part)
            there = state.object_at(at) if state is not None else None
            try:
                blocks = await self._group.reader.fetch(part, there, at) if there is not None else []
            except Unavailable:
                return Answer.UNKNOWN
            if not blocks or not follows(blocks[0], at, begun=bool(found)):
                return Answer.UNREADABLE
            found += [each for each in blocks if each.stamp.base < gap.high]
            at = found[-1].stamp.base + found[-1].block.count
        return found

    def _others(self) -> list[Node]:
        own = self._context.membership.node
        nodes = self._context.view.replicas("topic", self._context.options.partition)
        return [node for node in nodes if own is None or node.member != own.member]

    async def _ask(self, node: Node, part: int, gap: Gap) -> list[Stored] | Answer:
        """All blocks of a gap, of another replica."""
        found, at = list[Stored](), gap.low
        connection = self._channels.acquire(node.address)
        try:
            while at < gap.high:
                request = pb.BlocksRequest(part=part, low=at, high=gap.high)
                reply = await pb_grpc.TopicGroupsStub(connection).Blocks(request, timeout=ASK_S)
                if reply.unreadable or not reply.blocks:
                    return Answer.UNREADABLE if reply.unreadable else Answer.UNKNOWN
                for each in blocks_in(reply.blocks):
                    if not follows(each, at, begun=bool(found)):
                        return Answer.UNKNOWN
                    found.append(each)
                    at = each.stamp.base + each.block.count
        except (grpc.aio.AioRpcError, MalformedData):
            return Answer.UNKNOWN
        finally:
            await self._channels.release(connection)
        return found

    async def _fill(self, part: int, gap: Gap, found: list[Stored]) -> bool:
        state = self._group.store.state.parts.get(part)
        if state is not None and state.flags & Flag.HOLE:
            found = clipped(found, gap.low, gap.high)
        self._group.store.keep(part, found)
        try:
            if not await self._machine.mend(part, found):
                return False
        except StorageError:
            return False
        self.mended += 1
        self._context.log.info(MENDED, part=part, low=gap.low, high=gap.high)
        return True

    async def _lose(self, part: int, known: _Known) -> None:
        await self._group.request(en.LOST, en.encode_lost(part, *known.gap))
        known.given_up = True
        self.lost += 1
        self._context.log.error(LOST, part=part, low=known.gap.low, high=known.gap.high)


def follows(each: Stored, at: int, *, begun: bool) -> bool:
    """True if a block has an offset, as its first one if others have come before it, and so leads on."""
    base = each.stamp.base
    return (base == at if begun else base <= at) and base + each.block.count > at


def blocks_in(data: bytes) -> list[Stored]:
    """Stored blocks end to end, checked. Raises MalformedData."""
    found, at = list[Stored](), 0
    while at < len(data):
        size = stored_size(data[at : at + STAMP_BYTES])
        if not size:
            raise MalformedData("these are no stored blocks")
        each = data[at : at + size]
        found.append(Stored(*parse_stored(each), each))
        at += size
    return found
