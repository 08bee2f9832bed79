"""Writers, members and admin, as an SDK and a controller would behave: they send again, and lose requests and answers."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from cluster.topics import entries as en
from pixiu.placement.slots import SLOTS, Lineage, Part, Range
from pixiu.wire import block
from pixiu.wire.levels import Level
from tests.sim.replication.world import Node
from tests.sim.topics.group import Group, body_of
from tests.sim.topics.history import Acknowledged, Confirmed, Message
from topic import events as ev
from topic.events import LoadTest
from topic.state.parts import Verdict
from topic.state.state import Done, Sealed

if TYPE_CHECKING:
    from tests.sim.topics.world import TopicWorld

TOPIC = 1
NAME = "orders"
RESEND_S = 0.8
WINDOW = 3
"""Blocks of a writer that a part has not confirmed."""
SLOTS_USED = (0, 1, 9_999, 20_000, 32_767, 32_768, 40_000, 65_535)


class Stream:
    """What a writer has for one part: blocks in order, the first of which are under way."""

    def __init__(self) -> None:
        self.confirmed = 0
        """Position."""
        self.messages: deque[Message] = deque()
        """Not confirmed: the first has the position `confirmed` + 1."""
        self.blocks: deque[int] = deque()
        """Sizes of those that were sent."""
        self.sent_at = -10.0
        self.ended = False


class Writer:
    """Writes numbers to slots, each slot in order."""

    def __init__(self, world: TopicWorld, number: int) -> None:
        self.world, self.number = world, number
        self.streams: dict[int, Stream] = {}
        self.numbers = dict.fromkeys(SLOTS_USED, 0)
        self.lineage = world.admin.lineage
        world.after(world.rng.uniform(1.0, 2.0), self.turn)

    @property
    def idle(self) -> bool:
        return not any(stream.messages for stream in self.streams.values())

    def turn(self) -> None:
        world, rng = self.world, self.world.rng
        if world.writing and sum(len(stream.messages) for stream in self.streams.values()) < 40:
            for slot in rng.sample(SLOTS_USED, rng.randint(1, 4)):
                self.numbers[slot] += 1
                self._put(Message(self.number, slot, self.numbers[slot]))
        for part, stream in self.streams.items():
            self._send(part, stream)
        world.after(rng.uniform(0.1, 0.5), self.turn)

    def _put(self, message: Message) -> None:
        """Into the stream of the part that takes its slot; behind earlier messages of the slot, wherever those are."""
        part = self.lineage.open_part(message.slot).number
        for number, stream in self.streams.items():
            holder = self.lineage.parts[number]
            if stream.messages and not stream.ended and holder.low <= message.slot < holder.high:
                part = min(part, number)
        self.streams.setdefault(part, Stream()).messages.append(message)

    def _send(self, part: int, stream: Stream) -> None:
        now, rng = self.world.now, self.world.rng
        if stream.ended:
            return
        if stream.blocks and now > stream.sent_at + RESEND_S:
            stream.blocks.clear()  # everything again, cut into blocks as it comes
        while len(stream.blocks) < WINDOW and (left := len(stream.messages) - (done := sum(stream.blocks))) > 0:
            size = min(left, rng.randint(1, 5))
            stream.blocks.append(size)
            stream.sent_at = now
            self.world.count("blocks sent")
            messages = [encoded(each, self.world.due_us(each)) for each in list(stream.messages)[done : done + size]]
            first = stream.confirmed + 1 + done
            data = block.encode(messages, topic=TOPIC, part=part, writer=self.number, first=first)
            group = self.world.groups[self.lineage.parts[part].group]
            level = rng.choice((Level.REPLICATED, Level.REPLICATED, Level.PERSISTED, Level.ACCEPTED))
            self.world.send(group, ev.WriteRequested(self.number, part, 42, data, level))

    def on_reply(self, reply: ev.WriteReply) -> None:
        part, stream = reply.request, self.streams[reply.request]
        if stream.ended or reply.verdict is None:
            return
        if reply.verdict is Verdict.STORED and reply.base < 0:
            self.world.count("answered early")  # it is sent again, to learn whether it is stored
            return
        if reply.verdict in (Verdict.STORED, Verdict.REPEATED, Verdict.HOLE, Verdict.SEALED):
            self._confirm(stream, reply.position)
        if reply.verdict is Verdict.HOLE:
            self.world.count("holes")
            stream.blocks.clear()
        if reply.verdict is Verdict.SEALED:
            self._follow(part, stream)

    def _confirm(self, stream: Stream, position: int) -> None:
        while stream.confirmed < position and stream.messages:
            self.world.judge.take(Confirmed(stream.messages.popleft()))
            stream.confirmed += 1
            if stream.blocks:
                stream.blocks[0] -= 1
                if not stream.blocks[0]:
                    stream.blocks.popleft()

    def _follow(self, part: int, stream: Stream) -> None:
        """A part is sealed: what it did not take goes to its children, once they are known."""
        self.lineage = self.world.admin.lineage
        if self.lineage.parts[part].sealed:
            self.world.count("followed")
            stream.ended = True
            messages, stream.messages = stream.messages, deque()
            for message in messages:
                self._put(message)


class Member:
    """A member of a channel at one group: joins its leader again and again, answers most of what it gets."""

    def __init__(self, world: TopicWorld, channel: int, group: Group, tagged: bool) -> None:
        self.world, self.channel, self.group = world, channel, group
        self.tag = "a" if tagged else ""
        self.number = -1
        self.node: tuple[Node, int] | None = None
        world.after(world.rng.uniform(1.0, 3.0), self.turn)

    def turn(self) -> None:
        world, rng = self.world, self.world.rng
        if self.node is None:
            node = self.group.leader()
            if node is not None and self.group.replicas[node.member].core.epoch:
                world.member_numbers += 1
                self.number, self.node = world.member_numbers, (node, node.start)
                world.members[self.number] = self
                world.tags[self.number] = self.tag
                load_test = LoadTest.PASS if world.channels[self.channel].load_test else LoadTest.BLOCK
                self._ask(ev.Joined(self.number, NAME, str(self.channel), rng.choice((1, 3, 10)), "", self.tag, load_test))
        elif rng.random() < (0.03 if world.writing else 0.005):
            world.count("members left")
            self._ask(ev.Left(self.number))
            self.forget()
        world.after(rng.uniform(0.3, 0.8), self.turn)

    def forget(self) -> None:
        """The connection is gone."""
        world = self.world
        world.members.pop(self.number, None)
        self.node = None

    def _ask(self, event: ev.Event) -> None:
        if self.node is not None:
            self.world.after(self.world.rng.uniform(0.002, 0.02), self.group.request, *self.node, event)

    def on_messages(self, number: int, effect: ev.Deliver) -> None:
        rng = self.world.rng
        if number != self.number or self.node is None:
            return
        chance = rng.random()
        offsets = [offset for run in effect.runs for offset in range(run.low, run.high)]
        if self.world.writing and chance < 0.05:
            self.world.count("never answered")
            return
        refused = [(offset, rng.choice((0.0, 0.5))) for offset in offsets if rng.random() < (0.05 if self.world.writing else 0.0)]
        taken = {offset for offset, _ in refused}
        ranges = [(offset, offset + 1) for offset in offsets if offset not in taken]
        rejected = [(offset, "by chance") for offset, _ in refused[:1] if offset % 5 == 0]
        report = ev.Reported(self.number, 1, effect.part, ranges, refused[len(rejected) :], rejected)
        self.world.after(rng.choice((0.01, 0.2)), self._report, number, report)

    def _report(self, number: int, report: ev.Reported) -> None:
        if number == self.number:
            self._ask(report)

    def on_report(self, reply: ev.ReportReply) -> None:
        found = [offset for low, high in reply.acknowledged for offset in range(low, high)]
        if found:
            self.world.count("acknowledgements confirmed", len(found))
            self.world.judge.take(Acknowledged(self.channel, reply.part, tuple(found)))


def encoded(message: Message, due_us: int) -> block.Message:
    """A message with the fields that follow from its number, and when it is due; 0: at once."""
    headers = [("region", message.region.encode())] if message.region else []
    return block.Message(
        body_of(message), message.slot, headers=headers, deliver_at_us=due_us or None, tag=message.tag or None,
        load_test=message.load_test,
    )  # fmt: skip


class Wish(NamedTuple):
    """An entry that the admin wants in a group's log."""

    group: int
    kind: int
    payload: bytes


class Admin:
    """Makes the topic, and splits, merges and moves its parts: seals the parents, then opens the children, then says so."""

    def __init__(self, world: TopicWorld) -> None:
        self.world = world
        self.lineage = Lineage.new([Range(0, 32_768, 0), Range(32_768, SLOTS, 1)])
        self.channels = [
            en.ChannelSettings(
                number,
                TOPIC,
                str(number),
                each.ordered,
                max_attempts=2,
                timeout_s=2.0,
                filter=f'[{{"header": "region", "equal": "{each.region}"}}]' if each.region else "",
            )
            for number, each in world.channels.items()
        ]
        self._left: list[deque[Wish]] = [deque() for _ in world.groups]
        """By group: what must be answered, in this order."""
        self._asked: list[Wish] = []
        """By number of the request."""
        self._deleted, self._version = False, 1
        self._told: set[int] = set()
        """Groups that know the topic."""
        self._sealed: list[Sealed] = []
        self._children: list[Part] = []
        self._next = self.lineage
        self._children = list(self.lineage.open_parts())
        self._open_children()
        world.after(0.5, self.turn)

    @property
    def idle(self) -> bool:
        return not any(self._left) and not self._children and not self._deleted

    def turn(self) -> None:
        world, rng = self.world, self.world.rng
        if not any(self._left) and not self._children and (world.writing or self._deleted) and (chance := rng.random()) < 0.5:
            if self._deleted:
                self._set_deleted(False)
            elif chance < 0.2:
                self._resize()
            elif chance < 0.3:
                self._seek()
            elif chance < 0.38:
                self._resend()
            elif chance < 0.46:
                self._drop()
            elif chance < 0.5:
                self._set_deleted(True)
        for group, left in zip(world.groups, self._left, strict=True):
            if left:
                self._asked.append(left[0])
                world.send(group, ev.Requested(len(self._asked) - 1, left[0].kind, left[0].payload, force=True))
        world.after(rng.uniform(0.2, 0.6), self.turn)

    def _wish(self, group: int, kind: int, payload: bytes) -> None:
        self._left[group].append(Wish(group, kind, payload))

    def _set_deleted(self, deleted: bool) -> None:
        self._deleted, self._version = deleted, self._version + 1
        payload = en.TopicSettings(TOPIC, NAME, deleted=deleted, version=self._version).encode()
        for group in sorted(self._told):
            self._wish(group, en.TOPIC, payload)

    def _seek(self) -> None:
        """In open parts: in others a seek would move a channel behind what it has read after them."""
        rng, judge = self.world.rng, self.world.judge
        part, channel = rng.choice(self.lineage.open_parts()), rng.choice(self.channels)
        number = en.part_id(TOPIC, part.number)
        offset = rng.randint(0, judge.end(number))
        self._wish(part.group, en.SEEK, en.encode_seek(channel.channel, number, offset))

    def _resend(self) -> None:
        for group in self.world.groups:
            for (channel, part), progress in group.truth.progress.items():
                if progress.dead:
                    self._wish(group.number, en.RESEND, en.encode_resend(channel, part))
                    return

    def _drop(self) -> None:
        """A sealed part that everybody has, and no writer writes to; the oldest first, as `pixiu.placement.slots` says."""
        world = self.world
        for part in self.lineage.parts.values():
            number = en.part_id(TOPIC, part.number)
            done = all(world.judge.is_done(channel, number) for channel in world.channels)
            followed = all(part.number not in each.streams or each.streams[part.number].ended for each in world.writers)
            first = all(en.part_id(TOPIC, parent) in world.dropped for parent in part.parents)
            if part.sealed and first and done and followed and number not in world.dropped:
                self._wish(part.group, en.DROP, en.encode_drop(number))
                return

    def _resize(self) -> None:
        rng, parts = self.world.rng, self.lineage.open_parts()
        first = rng.randrange(len(parts))
        last = min(first + rng.choice((0, 0, 1)), len(parts) - 1)
        low, high = parts[first].low, parts[last].high
        cuts = [low, high]
        if rng.random() < 0.6 and len(parts) < 5 and high - low > 100:
            cuts.insert(1, rng.choice([slot for slot in (*SLOTS_USED, low + (high - low) // 2) if low < slot < high]))
        ranges = [Range(a, b, rng.randrange(len(self.world.groups))) for a, b in pairwise(cuts)]
        sealed = [part.number for part in parts[first : last + 1]]
        self._next = self.lineage.resized(sealed, ranges)
        self._children = [part for number, part in self._next.parts.items() if number not in self.lineage.parts]
        children = [en.Child(part.number, part.low, part.high, part.group) for part in self._children]
        self._sealed = []
        for number in sealed:
            self._wish(self.lineage.parts[number].group, en.SEAL, en.encode_seal(en.part_id(TOPIC, number), children))
        self.world.count("resized")

    def on_reply(self, reply: ev.Reply) -> None:
        wish = self._asked[reply.request]
        left = self._left[wish.group]
        if reply.answer is None or not left or left[0] is not wish:
            return
        if isinstance(reply.answer, Done) and not reply.answer.ok and wish.kind != en.DROP:
            return
        left.popleft()
        if isinstance(reply.answer, Sealed):
            self._sealed.append(reply.answer)
        if any(self._left):
            return
        if self._sealed:
            self._open_children()
        elif self._children:
            self.lineage, self._children = self._next, []
            self.world.count("opened")

    def _open_children(self) -> None:
        for group in sorted({part.group for part in self._children} - self._told):
            self._told.add(group)
            self._wish(group, en.TOPIC, en.TopicSettings(TOPIC, NAME, version=self._version).encode())
        for part in self._children:
            writers = [writer for sealed in self._sealed if en.number_of(sealed.part) in part.parents for writer in sealed.writers]
            opening = en.Opening(en.part_id(TOPIC, part.number), part.low, part.high, part.parents, writers, self.channels)
            self._wish(part.group, en.OPEN, opening.encode())
        self._sealed = []
