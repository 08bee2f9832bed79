"""Checks of everything that a replica stores: slowly in the background, at once for an operator; and what an operator gives up.

    scrub, `pixiu repair` ──▶ every block is read ──▶ gaps ──▶ `topic.mending`: other replicas' blocks take their place

Replicas are not compared with each other: every block and every row has a CRC.

Source: docs/topics.md, "Damage", docs/operations.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

from cluster.process.context import Context
from cluster.replication.replica import Replica
from cluster.store.repair.digests import Digests
from cluster.store.repair.repairer import StoreRepairer
from cluster.topics import entries as en
from cluster.wire.v1 import repair_pb2 as pb
from pixiu.errors import InvalidArgument
from topic.clients.group import Group
from topic.mending import Mending
from topic.storage.check import damaged_in
from topic.storage.machine import Machine
from topic.storage.part_log import PartLog
from topic.storage.segment import Gap, Segment

IDLE_S: Final = 10.0
"""Pause of the scrub where there is nothing to check."""
MAX_NAMED: Final = 1000
"""Gaps named in an answer to an operator."""
GIVEN_UP: Final = "topic_gaps_given_up"


class Repairer(StoreRepairer):
    """Checks and repairs one replica.

    Args:
        context: of the process.
        replica: its log.
        group: the replica.
        machine: its state.
        mending: its gaps.
    """

    RANGES = "parts"

    def __init__(
        self, context: Context[Any], replica: Replica, group: Group, machine: Machine, mending: Mending
    ) -> None:  # fmt: skip
        super().__init__(context, replica)
        self._group, self._machine, self._mending = group, machine, mending
        self.scrubbed = 0
        """Bytes that the scrub has checked."""

    @property
    def opened(self) -> bool:
        """True while the state can be read."""
        return self._machine.opened

    async def scrub(self, bytes_per_s: int) -> None:
        """Check all closed segments, again and again."""
        while bytes_per_s:
            checked = 0
            for part, log, segment in self._segments():
                if segment is log.segments[-1] or self._group.store.logs.get(part) is not log:
                    continue
                await self._check(part, log, segment)
                checked += 1
                self.scrubbed += segment.size
                await asyncio.sleep(segment.size / bytes_per_s)
            if not checked:
                await asyncio.sleep(IDLE_S)

    def _segments(self) -> Iterator[tuple[int, PartLog, Segment]]:
        for part, log in list(self._group.store.logs.items()):
            for segment in log.segments:
                yield part, log, segment

    async def _check(self, part: int, log: PartLog, segment: Segment) -> list[Gap]:
        """Read a segment, as far as it is written."""
        files, end = self._group.store.files, segment.end
        gaps = await asyncio.to_thread(damaged_in, files, segment.path, segment.base, end)
        state = self._group.store.state.parts.get(part)
        if state is None or self._group.store.logs.get(part) is not log or segment not in log.segments:
            return []
        gaps = [Gap(max(gap.low, state.first), gap.high) for gap in gaps if gap.high > state.first]
        for gap in gaps:
            self._mending.found(part, gap)
        return gaps

    async def verify(self, repair: bool) -> pb.VerifyReply:
        """See `StoreRepairer`. `checked` are segments."""
        await self._machine.flush()
        checked, damaged = 0, 0
        for part, log, segment in self._segments():
            damaged += len(await self._check(part, log, segment))
            checked += 1
        before = len(self._mending)
        if repair and before:
            await self._mending.look()
        left = len(self._mending)
        return pb.VerifyReply(
            checked=checked, damaged=max(damaged, before), repaired=before - left, left=left, text=self._mending.text
        )

    def mark(self) -> int:
        """See `StoreRepairer`."""
        raise InvalidArgument("replicas of topics are not compared: each block and each row has a CRC")

    async def digests(self, mark: int, *, leads: bool) -> Digests:
        """See `StoreRepairer`."""
        raise InvalidArgument("replicas of topics are not compared: each block and each row has a CRC")

    async def give_up(self, operator: str, reason: str) -> tuple[int, list[str]]:
        """Give up every gap of the leader that no replica that answers can fill. Audited first."""
        if not operator or not reason:
            raise InvalidArgument("giving up data needs an operator and a reason")
        self._replica.check_leader()
        await self._mending.look()
        found = self._mending.open()
        names = [
            f"part {en.number_of(part)} of topic {en.topic_of(part)}, offsets {gap.low} to {gap.high - 1}"
            for part, gap in found[:MAX_NAMED]
        ]
        if found:
            await asyncio.to_thread(self._replica.audit, operator, reason, {"gave_up": len(found), "gaps": names})
            self._context.log.error(GIVEN_UP, operator=operator, reason=reason, gaps=len(found), first=names[0])
            await self._mending.give_up(found)
        return len(found), names
