"""Measure the core of topics alone, per CPU second: `python -m benchmarks.cores.topic_core`.

Estimate, written before the first run. Mode `any`, blocks of 256 messages, one member that acknowledges ranges: each block is one
range from end to end, and 256 messages cost what one range costs, 40 µs for check, entry, dispatch, report and settlement:
6 million. Messages acknowledged one by one, 1 µs each: 700 000. Mode `ordered`, slots at random: 2 µs a message for its lane, so
350 000. A filter by one value looks for its bytes: 5 million looked at; by a pattern, 2.5 µs a message: 400 000. A turn in which
one of 1,000 parts grows, with ten channels that have members: 10 channels, 50 µs, whatever the other parts have.

First runs (2 shared, loaded cores, python 3.11), the block's check at its leader included: 3,300,000 in ranges, 660,000 shared by
ten members, 2,300,000 acknowledged one by one (joined again before anything is done with them; 355,000 before that was so), 520,000
and 200,000 to 260,000 in mode `ordered`. With headers, whose check alone takes 1.3 µs a message: 770,000 without a filter, 570,000
by a value, 250,000 by a pattern. A message of one part: 34 µs for each channel, with 10 parts and with 1,000; a turn in which
nothing happens, 3 µs.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from cluster.core.contract import END_OF_TURN, TICK
from cluster.replication.core.events import Accepted
from cluster.replication.model import Entry
from cluster.store.events import Committed, LeaderChanged, Propose
from cluster.topics import entries as en
from pixiu.wire import block, filters
from topic import events as ev
from topic.core import Core
from topic.state.state import State

TOPIC = 1
BLOCK = 256
BLOCKS = 800
AT_US = 1_750_000_000_000_000
EU = '[{"header": "region", "equal": "eu"}]'
LIKE_EU = '[{"header": "region", "glob": "e?"}]'


class Leader:
    """A core whose log commits at once, with blocks in memory."""

    def __init__(self, parts: int, channels: Sequence[en.ChannelSettings]) -> None:
        self.state = State(self)
        self.stored: dict[int, list[tuple[block.Stamp, block.Block]]] = defaultdict(list)
        self.bases: dict[int, list[int]] = defaultdict(list)
        self.core = Core(self.state, self)
        self.now = 0.0
        self.cpu = 0.0
        """CPU seconds of the core and the state."""
        self.delivered: list[ev.Deliver] = []
        self.apply(en.TOPIC, en.TopicSettings(TOPIC, "orders").encode())
        for number in range(parts):
            self.apply(en.OPEN, en.Opening(en.part_id(TOPIC, number), 0, 65_536).encode())
        for channel in channels:
            self.apply(en.CHANNEL, channel.encode())
        self.step(LeaderChanged(1), TICK)

    def apply(self, kind: int, payload: bytes) -> object:
        return self.state.apply(Entry(1, self.state.applied + 1, kind, AT_US, payload))

    # --- as `Blocks` of the state and `Parts` of the core

    def append(self, part: int, stamp: block.Stamp, data: bytes, count: int) -> None:
        self.stored[part].append((stamp, block.Block.checked(data)))
        self.bases[part].append(stamp.base)

    def trim(self, part: int, first: int) -> None:
        pass

    def compact(self, part: int, ranges: list[tuple[int, int]], digests: Sequence[bytes]) -> None:
        pass

    def drop(self, part: int) -> None:
        pass

    def store_of(self, topic: en.TopicSettings) -> str:
        """See `Parts`."""
        return topic.store

    def may_deliver(self) -> bool:
        return True

    def blocks(self, part: int, low: int, high: int) -> Sequence[tuple[block.Stamp, block.Block]]:
        bases = self.bases[part]
        return self.stored[part][max(bisect_right(bases, low) - 1, 0) : bisect_right(bases, high - 1)]

    # --- turns

    def step(self, *events: ev.Event) -> None:
        """One turn, with everything that it proposes."""
        began = time.process_time()
        pending = [*events, END_OF_TURN]
        while pending:
            effects = [effect for event in pending for effect in self.core.step(event, self.now)]
            pending = []
            for effect in effects:
                if isinstance(effect, Propose):
                    first = self.state.applied + 1
                    answers = [self.apply(kind, payload) for kind, payload in effect.payloads]
                    accepted = Accepted(effect.token, 1, first, self.state.applied)
                    pending += [accepted, Committed(first, answers, 2), END_OF_TURN]
                elif isinstance(effect, ev.Deliver):
                    self.delivered.append(effect)
        self.cpu += time.process_time() - began

    def take(self) -> list[ev.Deliver]:
        """Deliveries since the last call."""
        found, self.delivered = self.delivered, []
        return found


def written(part: int, number: int, slot: Callable[[], int], headers: Callable[[], list[tuple[str, bytes]]]) -> ev.WriteRequested:
    """The n-th block of a writer."""
    messages = [block.Message(bytes(100), slot(), headers=headers()) for _ in range(BLOCK)]
    return ev.WriteRequested(1, 1, 1, block.encode(messages, topic=TOPIC, part=part, writer=1, first=1 + number * BLOCK))


def through(name: str, members: int = 1, singly: bool = False, share: float = 0.0, slots: int = 65_536, **settings: Any) -> str:
    """Messages that are written, dispatched and acknowledged, in turns of four blocks."""
    chance = random.Random(1)
    leader = Leader(1, [en.ChannelSettings(1, TOPIC, "c")._replace(**settings)])
    for member in range(members):
        leader.step(ev.Joined(member + 1, "orders", "c", 10_000))

    def headers() -> list[tuple[str, bytes]]:
        return [("region", b"eu" if chance.random() < share else b"us")] if share else []

    blocks = [written(0, number, lambda: chance.randrange(slots), headers) for number in range(BLOCKS)]
    given = 0
    for at in range(0, len(blocks), 4):
        leader.now += 0.01
        leader.step(*blocks[at : at + 4], TICK)
        while found := leader.take():
            given += sum(high - low for each in found for low, high, _ in each.runs)
            leader.step(*(report(each, singly) for each in found))
    leader.now += 2.0
    leader.step(TICK)
    settled = leader.state.progress[1, en.part_id(TOPIC, 0)].acks.floor
    assert settled == BLOCKS * BLOCK, (settled, given)
    return f"{name:48s} {settled / leader.cpu:12,.0f} messages, {given:,} of {settled:,} delivered"


def report(delivered: ev.Deliver, singly: bool) -> ev.Reported:
    """A member acknowledges what it got."""
    ranges = [(low, high) for low, high, _ in delivered.runs]
    if singly:
        ranges = [(offset, offset + 1) for low, high in ranges for offset in range(low, high)]
    return ev.Reported(delivered.member, 1, delivered.part, ranges)


def looked_at(name: str, text: str) -> str:
    """Messages that a filter looks at."""
    chance = random.Random(1)
    event = written(0, 0, lambda: 1, lambda: [("region", b"eu" if chance.random() < 0.01 else b"us")])
    found, filter_ = block.Block.checked(event.block), filters.parse(text)
    began = time.process_time()
    for _ in range(400):
        filter_.matching(found, 0, BLOCK)
    return f"{name:48s} {400 * BLOCK / (time.process_time() - began):12,.0f} messages"


def idle(parts: int, channels: int, turns: int = 2000) -> str:
    """Turns in which one part of many grows by a message, which every channel gets and acknowledges."""
    leader = Leader(parts, [en.ChannelSettings(number, TOPIC, str(number)) for number in range(1, channels + 1)])
    for number in range(1, channels + 1):
        leader.step(ev.Joined(number, "orders", str(number), 100))
    blocks = [block.encode([block.Message(bytes(100), 1)], topic=TOPIC, part=7, writer=1, first=1 + each) for each in range(turns)]
    leader.cpu = 0.0
    for data in blocks:
        leader.now += 0.001
        leader.step(ev.WriteRequested(1, 1, 1, data), TICK)
        leader.step(*(report(each, False) for each in leader.take()))
    busy, leader.cpu = leader.cpu, 0.0
    for _ in range(turns):
        leader.now += 0.001
        leader.core.next_deadline()
        leader.step(TICK)
    return (
        f"{parts} parts × {channels} channels with members: {busy / turns * 1e6:.0f} µs a message "
        f"({busy / turns / channels * 1e6:.1f} a channel), {leader.cpu / turns * 1e6:.1f} µs an idle turn"
    )


def main() -> None:
    """Print all rows."""
    print(through("any, one member, ranges"))
    print(through("any, ten members, ranges", members=10))
    print(through("any, one member, one by one", singly=True))
    print(through("ordered, one member, 65,536 slots", ordered=True))
    print(through("ordered, ten members, 65,536 slots, one by one", members=10, singly=True, ordered=True))
    print(through("ordered, ten members, 100 slots", members=10, slots=100, ordered=True))
    print(through("any, a filter by value, 1 % match", share=0.01, filter=EU))
    print(through("any, a filter by pattern, 1 % match", share=0.01, filter=LIKE_EU))
    print(through("any, headers and no filter", share=0.01))
    print(looked_at("a filter by value alone", EU))
    print(looked_at("a filter by pattern alone", LIKE_EU))
    print(idle(10, 10))
    print(idle(1000, 10))
    print(idle(100, 100))


if __name__ == "__main__":
    main()
