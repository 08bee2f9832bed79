"""Groups of a topic in one process: the real rules of parts and writers, without a log; streams that lose what is in them."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from cluster.topics.entries import part_id
from pixiu.client.topics.topic_map import TopicMap
from pixiu.client.topics.writing.writer_core import WriterCore
from pixiu.client.topics.writing.writer_events import (
    CloseStream,
    Effect,
    OpenStream,
    RefreshTopic,
    Request,
    Resolved,
    Result,
    TopicTicket,
    Verdict,
)
from pixiu.errors import NotLeader, Overloaded, Refusal
from pixiu.placement.slots import SLOTS, Lineage, Range
from pixiu.wire.block import parse
from topic.state.parts import Part

TOPIC = 7


@dataclass
class Stored:
    """A part in a group."""

    part: Part
    log: list[tuple[int, bytes]] = field(default_factory=list)
    """(slot, body) by offset."""


class Cluster:
    """Parts with their contents, and the topic's description, which clients may learn late."""

    def __init__(self, parts: int = 2, groups: int = 2) -> None:
        self.groups = groups
        cuts = [SLOTS * number // parts for number in range(parts + 1)]
        self.lineage = Lineage.new([Range(cuts[at], cuts[at + 1], at % groups) for at in range(parts)])
        self.version = 1
        self.names_children = True
        """True if leaders say which parts follow a sealed one."""
        self.stored: dict[int, Stored] = {}
        self._open()

    def _open(self) -> None:
        for part in self.lineage.parts.values():
            if part.number not in self.stored:
                self.stored[part.number] = Stored(Part(part_id(TOPIC, part.number), part.low, part.high, part.parents))

    def topic(self) -> TopicMap:
        """The description now."""
        addresses = {group: (f"g{group}a", f"g{group}b") for group in range(self.groups)}
        return TopicMap("orders", TOPIC, self.version, self.lineage, addresses)

    def resize(self, sealed: list[int], ranges: list[Range]) -> None:
        """Seal parts and open others."""
        for number in sealed:
            self.stored[number].part.sealed = True
        self.lineage = self.lineage.resized(sealed, ranges)
        self.version += 1
        self._open()

    def write(self, group: int, request: Request) -> Result:
        """The answer of a group's leader to a block."""
        block = parse(request.data)
        found = self.stored.get(block.part)
        if found is None or self.lineage.parts[block.part].group != group:
            return Result(request.request, Verdict.NOT_HERE)
        assert found.part.holds(block)
        answer, _ = found.part.append(block, 0)
        if int(answer.verdict) == Verdict.STORED:
            assert answer.base == len(found.log)
            found.log += [(message.slot, message.body) for message in (block.message(number) for number in range(block.count))]
        children = self.lineage.children(block.part) if self.names_children else ()
        return Result(request.request, Verdict(int(answer.verdict)), answer.position, answer.base, children=children)

    def in_order(self, slot: int) -> list[bytes]:
        """The messages of a slot as a reader gets them: parents before children."""
        return [body for number in sorted(self.stored) for each, body in self.stored[number].log if each == slot]


class Network:
    """Drives a writer's core against the groups, at random: late, lost, refused."""

    def __init__(self, cluster: Cluster, core: WriterCore, rng: random.Random) -> None:
        self.cluster, self.core, self.rng = cluster, core, rng
        self.now = 0.0
        self.streams: dict[int, tuple[int, bool]] = {}
        """Stream → group, whether it is opened."""
        self.going: dict[int, deque[Request]] = {}
        self.coming: dict[int, deque[Result]] = {}
        self.resolved: list[TopicTicket] = []
        self.refresh = False
        self.faults = True

    def apply(self, effects: list[Effect]) -> None:
        """Do what the core wants."""
        for effect in effects:
            if isinstance(effect, OpenStream):
                self.streams[effect.stream] = int(effect.address[1:-1]), False
                self.going[effect.stream], self.coming[effect.stream] = deque(), deque()
            elif isinstance(effect, CloseStream):
                self.late(effect.stream)
            elif isinstance(effect, Resolved):
                self.resolved += effect.tickets
            elif isinstance(effect, RefreshTopic):
                self.refresh = True

    def late(self, stream: int) -> None:
        """A stream is gone for the writer; some of what is in it still reaches the leader."""
        group, _ = self.streams.pop(stream)
        going = self.going.pop(stream)
        self.coming.pop(stream)
        for request in list(going)[: self.rng.randint(0, len(going))]:
            self.cluster.write(group, request)

    def turn(self) -> None:
        """One thing happens."""
        rng, core = self.rng, self.core
        self.now += rng.choice((0.0, 0.001, 0.004, 0.05))
        self.apply(core.tick(self.now))
        if self.refresh and rng.random() < 0.5:
            self.refresh = False
            self.apply(core.set_topic(self.cluster.topic(), self.now))
        for stream in list(self.streams):
            if stream not in self.streams:
                continue
            group, opened = self.streams[stream]
            chance = rng.random()
            if self.faults and chance < 0.03:
                self.late(stream)
                self.apply(core.stream_died(stream, self.now, "broken", f"g{group}b" if rng.random() < 0.3 else ""))
            elif not opened:
                self.streams[stream] = group, True
                self.apply(core.opened(stream, rng.choice((1_000, 100_000)), self.now))
            elif chance < 0.4:
                request = core.next_request(stream, self.now)
                if request is not None:
                    self.going[stream].append(request)
            elif chance < 0.7:
                self._serve(stream, group)
            elif self.coming[stream]:
                count = rng.randint(1, len(self.coming[stream]))
                self.apply(core.results(stream, [self.coming[stream].popleft() for _ in range(count)], self.now))
            elif self.faults and chance > 0.995:
                self.apply(core.draining(stream, self.now))

    def _serve(self, stream: int, group: int) -> None:
        going, rng = self.going[stream], self.rng
        if not going:
            return
        request, chance = going.popleft(), rng.random()
        if self.faults and chance < 0.04:
            self.coming[stream].append(Result(request.request, Verdict.REFUSED, refusal=Refusal(Overloaded.code, "later", 5)))
        elif self.faults and chance < 0.06:
            refusal = Refusal(NotLeader.code, "not me")
            self.coming[stream].append(Result(request.request, Verdict.REFUSED, refusal=refusal, leader=f"g{group}b"))
        elif self.faults and chance < 0.08:
            return  # lost, and never answered: the blocks after it are holes
        else:
            self.coming[stream].append(self.cluster.write(group, request))
