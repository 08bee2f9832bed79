"""The SDK's writer in the simulation: the same core as in programs, over requests that are lost, late and repeated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pixiu.client.options import ClientOptions
from pixiu.client.topics.topic_map import TopicMap
from pixiu.client.topics.writing.writer_core import WriterCore
from pixiu.client.topics.writing.writer_events import (
    CloseStream,
    Effect,
    OpenStream,
    PartStream,
    RefreshTopic,
    Resolved,
    Result,
    TopicTicket,
    Verdict,
)
from pixiu.placement.slots import Part
from pixiu.wire.block import encode_message
from pixiu.wire.levels import Level
from tests.sim.topics.clients import NAME, RESEND_S, SLOTS_USED, TOPIC, encoded
from tests.sim.topics.history import Confirmed, Message
from topic import events as ev

if TYPE_CHECKING:
    from tests.sim.topics.world import TopicWorld

PATIENT = ClientOptions(topic_timeout_s=1_000_000.0, backoff_s=0.05, max_backoff_s=0.5)


class SdkWriter:
    """Writes numbers to slots, each slot in order, by `WriterCore`. A stream has one block under way: one that is not answered in
    time is dead, and what was in it may still arrive."""

    def __init__(self, world: TopicWorld, number: int) -> None:
        self.world, self.number = world, number
        self.numbers = dict.fromkeys(SLOTS_USED, 0)
        self.core = WriterCore(PATIENT, self._topic(), number, world.rng.random)
        self._streams: dict[int, int] = {}
        """Stream → group."""
        self._asked: dict[int, tuple[int, float]] = {}
        """Stream → request under way, and when it was sent."""
        self._messages: dict[int, Message] = {}
        self._refresh = False
        world.after(world.rng.uniform(1.0, 2.0), self.turn)

    @property
    def idle(self) -> bool:
        return not self.core.unresolved

    @property
    def streams(self) -> Mapping[int, PartStream]:
        """By part."""
        return self.core._streams

    def _topic(self) -> TopicMap:
        lineage = self.world.admin.lineage
        return TopicMap(NAME, TOPIC, lineage.next_number, lineage, {number: (str(number),) for number in range(2)})

    def turn(self) -> None:
        world, rng = self.world, self.world.rng
        if world.writing and self.core.unresolved < 40:
            for slot in rng.sample(SLOTS_USED, rng.randint(1, 4)):
                self.numbers[slot] += 1
                message = Message(self.number, slot, self.numbers[slot])
                ticket = TopicTicket(encode_message(encoded(message, world.due_us(message))), Level.REPLICATED)
                ticket.watched = True
                effects = self.core.offer(ticket, world.now)
                self._messages[ticket.message_id] = message
                self._apply(effects)
        if self._refresh or rng.random() < 0.1:
            self._refresh = False
            self._apply(self.core.set_topic(self._topic(), world.now))
        for stream, (_, sent_at) in list(self._asked.items()):
            if world.now > sent_at + RESEND_S:
                del self._asked[stream]
                self._streams.pop(stream, None)
                self._apply(self.core.stream_died(stream, world.now, "no answer"))
        self._apply(self.core.tick(world.now))
        self._send()
        world.after(rng.uniform(0.1, 0.5), self.turn)

    def _send(self) -> None:
        for stream, group in list(self._streams.items()):
            if stream not in self._asked and (request := self.core.next_request(stream, self.world.now)) is not None:
                self._asked[stream] = request.request, self.world.now
                self.world.count("blocks sent")
                self.world.send(self.world.groups[group], ev.WriteRequested(self.number, request.request, 42, request.data))

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, OpenStream):
                self._streams[effect.stream] = int(effect.address)
                self._apply(self.core.opened(effect.stream, 1 << 20, self.world.now))
            elif isinstance(effect, CloseStream):
                self._streams.pop(effect.stream, None)
                self._asked.pop(effect.stream, None)
            elif isinstance(effect, Resolved):
                for ticket in effect.tickets:
                    assert ticket.failure is None
                    self.world.judge.take(Confirmed(self._messages.pop(ticket.message_id)))
            elif isinstance(effect, RefreshTopic):
                self._refresh = True

    def on_reply(self, reply: ev.WriteReply) -> None:
        stream = next((stream for stream, (request, _) in self._asked.items() if request == reply.request), None)
        if stream is None:
            return
        del self._asked[stream]
        verdict = Verdict.REFUSED if reply.verdict is None else Verdict(int(reply.verdict))
        if verdict in (Verdict.HOLE, Verdict.SEALED):
            self.world.count(verdict.name.lower())
        children = [Part(number, low, high, group) for number, low, high, group in reply.children]
        result = Result(reply.request, verdict, reply.position, reply.base, reply.refusal, children=children)
        self._apply(self.core.results(stream, [result], self.world.now))
        self._send()
