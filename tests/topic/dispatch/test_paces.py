"""Rates at which topics may be read: members and readers are slowed, and nothing is lost or tried too often."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from cluster.topics import entries as en
from pixiu.errors import Overloaded
from pixiu.placement.slots import SLOTS
from pixiu.wire.v1 import topic_pb2 as pb
from tests.topic.builders import PART, Log
from tests.topic.dispatch.test_dispatcher import Bench
from tests.topic.test_compaction import Replica
from topic.clients.reads import Reads
from topic.dispatch.paces import Paces
from topic.storage.reader import Reader


def given(bench: Bench, until: float, at: float = 0.0) -> dict[float, list[int]]:
    """What a member gets that acknowledges at once, by time."""
    found: dict[float, list[int]] = {}
    while at <= until:
        for member, offsets in bench.pump(at):
            found.setdefault(at, []).extend(offsets)
            bench.commit(bench.report(member, *offsets), at)
            bench.dispatcher.wake(PART)
        deadline = bench.dispatcher.next_deadline()
        at = deadline if deadline > at else at + 0.001
    return found


@pytest.mark.parametrize("ordered", [False, True])
def test_a_channel_gives_what_the_rate_allows_and_all_of_it_once(ordered: bool) -> None:
    bench = Bench(*range(100), ordered=ordered, timeout_s=1.0)
    bench.log.topic(read_messages_per_s=20)
    bench.join(1, credit=1000)
    found = given(bench, 10.0)
    assert sorted(offset for offsets in found.values() for offset in offsets) == list(range(100))
    for second in range(4):
        came = sum(len(offsets) for at, offsets in found.items() if at <= second)
        assert 20 * (second + 1) - 2 <= came <= 20 * (second + 1) + 2  # a burst of a second at the beginning


def test_a_rate_that_is_raised_counts_at_once() -> None:
    bench = Bench(*range(100))
    bench.log.topic(read_messages_per_s=20)
    bench.join(1, credit=1000)
    given(bench, 0.0)
    bench.log.topic(read_messages_per_s=0)
    bench.dispatcher.wake(PART)
    assert sum(map(len, given(bench, 0.1, 0.1).values())) >= 70


def test_bytes_count_by_the_size_that_messages_turn_out_to_have() -> None:
    log = Log()
    log.open_part()
    log.topic(read_bytes_per_s=100_000)
    paces, part = Paces(log.store.state), log.store.state.parts[PART]
    took, now = 0, 0.0
    while now < 10.0:
        if wait_s := paces.wait_s(part, now):
            now += wait_s
            continue
        count = paces.limit(part, 1000, now)
        paces.gave(part, count, now)
        paces.cut(part, count, count * 5_000, now)
        took += count * 5_000
    assert 1_000_000 <= took <= 1_150_000 + 50_000


def test_half_of_the_slots_have_half_of_the_rate() -> None:
    log = Log()
    log.open_part(1, 0, SLOTS // 2)
    log.topic(read_messages_per_s=20)
    paces, part = Paces(log.store.state), log.store.state.parts[PART]
    paces.gave(part, 15, 0.0)
    assert paces.wait_s(part, 0.0) == pytest.approx(0.5)
    assert paces.limit(part, 1000, 0.0) == 1


class Group:
    """A leader that readers ask."""

    leader = ""

    def __init__(self, log: Log) -> None:
        self.store, self.core, self.reader = log.store, self, Reader(lambda: log.store, lambda part, gap: None)
        self.paces = Paces(log.store.state)

    def check_reads(self) -> None:
        """It may always read."""


def test_a_reader_waits_for_the_rate_or_is_told_when_to_come_back() -> None:
    log = Log()
    log.open_part()
    log.topic(read_messages_per_s=5)
    for first in (1, 26, 51):
        log.write(*range(25), first=first)
    group: Any = Group(log)

    async def play() -> None:
        reads = Reads(group, lambda _part: None)

        async def read(offset: int, wait_ms: int) -> pb.TopicReadReply:
            return await reads.read(pb.TopicReadRequest(topic="orders", part=1, offset=offset, wait_ms=wait_ms, max_bytes=1))

        assert (await read(0, 0)).next == 25
        with pytest.raises(Overloaded, match="read rate") as refused:
            await read(25, 0)
        assert 3_000 < refused.value.retry_after_ms <= 4_000
        nothing = await read(25, 10)
        assert (nothing.next, nothing.blocks, nothing.committed_end) == (25, b"", 75)
        log.topic(read_messages_per_s=20)
        assert [(await read(offset, 0)).next for offset in (25, 50)] == [50, 75]  # the second one after a moment

    asyncio.run(play())


async def test_what_compaction_has_removed_uses_nothing_of_the_rate() -> None:
    log = Replica(segment_bytes=1)
    log.open_part()
    for first in (1, 26, 51):
        log.write(*range(25), first=first)
        log.store.flush()
    log.apply(en.COMPACT, en.Compaction(PART, [(0, 49)]).encode())
    log.compact()
    log.topic(read_messages_per_s=1)
    reads = Reads(cast(Any, Group(log)), lambda _part: None)
    for offset, following in ((0, 25), (25, 49), (49, 50)):
        reply = await reads.read(pb.TopicReadRequest(topic="orders", part=1, offset=offset, max_bytes=1))
        assert reply.next == following
    await reads.read(pb.TopicReadRequest(topic="orders", part=1, offset=50, max_bytes=1))
    with pytest.raises(Overloaded):
        await reads.read(pb.TopicReadRequest(topic="orders", part=1, offset=50, max_bytes=1))
