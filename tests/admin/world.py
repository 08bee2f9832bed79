"""An admin in a world of its own: a registry with compare-and-set, groups made of the real state, answers late or lost, deaths."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from admin import entries
from admin import events as ev
from admin.core import Core
from cluster.core.contract import NEVER, TICK
from cluster.replication.model import Entry
from cluster.topics import entries as en
from pixiu.discovery.topics import ENDED, SETTINGS, Numbers, PartState, TopicNode
from pixiu.errors import MalformedData
from pixiu.placement.slots import Lineage, Part
from pixiu.wire.block import Message, Stamp, encode
from topic.state.parts import Appended, Verdict
from topic.state.state import Done, Sealed, State

WALL_MS = 1_750_000_000_000
MOVES_PER_HOUR = 60


class Segments:
    """Takes blocks and forgets them."""

    def append(self, part: int, stamp: Stamp, block: bytes, count: int) -> None:
        """Forget it."""

    def trim(self, part: int, first: int) -> None:
        """Nothing to remove."""

    def compact(self, part: int, ranges: list[tuple[int, int]], digests: Sequence[bytes]) -> None:
        """Nothing to remove."""

    def drop(self, part: int) -> None:
        """Nothing to remove."""


class Group:
    """A group's leader, whose entries are committed at once."""

    def __init__(self, number: int, log: list[tuple[int, int, object]]) -> None:
        self.number, self.state, self.log = number, State(Segments()), log
        self.up = True
        self.counter = 0
        self.members = 0

    def apply(self, kind: int, payload: bytes) -> object:
        """Append and apply an entry."""
        self.counter += 1
        try:
            answer = self.state.apply(Entry(1, self.counter, kind, self.counter, payload))
        except MalformedData as error:
            answer = Done(False, str(error))
        if kind == en.OPEN and isinstance(answer, Done) and answer.ok:
            self.log.append((self.number, kind, en.Opening.decode(payload)))
        elif kind == en.SEAL and isinstance(answer, Sealed):
            self.log.append((self.number, kind, answer.part))
        return answer

    def loads(self) -> dict[int, ev.Load]:
        """Its parts."""
        return {
            number: ev.Load(part.sealed, part.first, part.end, members=self.members) for number, part in self.state.parts.items()
        }

    def append(self, token: int, kind: int, payload: bytes) -> ev.Appended:
        """Answer the admin as a leader's service does."""
        answer = self.apply(kind, payload)
        if isinstance(answer, Sealed):
            data = json.dumps({"end": answer.end, "children": answer.children, "writers": answer.writers}).encode()
            return ev.Appended(token, True, writers=entries.writers_of(data))
        assert isinstance(answer, Done)
        return ev.Appended(token, answer.ok, answer.why)


@dataclass
class Registry:
    """Nodes with versions; a write of a former epoch fails."""

    epoch: int = 0
    nodes: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    numbers: Numbers = field(default_factory=Numbers)

    def read(self, name: str) -> tuple[int, TopicNode | None]:
        """Version and topic of a node."""
        found = self.nodes.get(name)
        return (-1, None) if found is None else (found[0], TopicNode.from_json(name, found[1]))

    def write(self, epoch: int, write: ev.WriteTopic) -> None:
        """Do a write if its epoch and version are right."""
        version = self.nodes.get(write.name, (-1, b""))[0]
        if epoch != self.epoch or version != write.expected:
            return
        before = self.numbers
        self.numbers = Numbers(max(before.topic, write.numbers.topic), max(before.channel, write.numbers.channel))
        if write.node is None:
            del self.nodes[write.name]
        else:
            assert write.node.topic <= write.numbers.topic
            assert all(channel.channel <= write.numbers.channel for channel in write.node.channels)
            self.nodes[write.name] = version + 1, write.node.to_json()
            # What clients take for usable holds every slot once, too: parts that are opening do not count, sealing ones do.
            usable = [part for part in write.node.parts if part.state is not PartState.OPENING]
            if usable:
                Lineage(
                    Part(part.number, part.low, part.high, part.group, part.parents, part.state in ENDED - {PartState.SEALING})
                    for part in usable
                )


class World:
    """Everything; what happens next is chosen by the seed. Args: groups: number of groups."""

    def __init__(self, seed: int, groups: int = 3) -> None:
        self.random = random.Random(seed)
        self.now = 100.0
        self.registry = Registry()
        self.log: list[tuple[int, int, object]] = []
        self.groups = [Group(number, self.log) for number in range(groups)]
        self.core = Core(MOVES_PER_HOUR)
        self.moves = 0
        """Of parts by load, of all admins but the last."""
        self.pending: list[tuple[int, Callable[[bool], None]]] = []
        """What is under way: epoch of the admin, and what happens (argument: whether the answer arrives)."""
        self.answers: dict[int, ev.Answer] = {}
        self.asked: dict[int, tuple[str, ev.Change]] = {}
        self.requests = 0
        self.positions: dict[tuple[int, int], int] = {}
        """(part, writer) → last stored position."""
        self.elect()

    # --- what happens

    def elect(self) -> None:
        """Another admin leads; the former one is gone, and what it had under way may still happen."""
        self.moves += self.core.counters.moves
        self.core = Core(MOVES_PER_HOUR)
        self.registry.epoch += 1
        topics = {name: self.registry.read(name) for name in self.registry.nodes}
        found = {name: (version, node) for name, (version, node) in topics.items() if node is not None}
        self.step(ev.GroupsChanged(range(len(self.groups)), [group.number for group in self.groups if group.up]))
        self.step(ev.Elected(self.registry.epoch, self.wall_ms, self.registry.numbers, found))

    @property
    def wall_ms(self) -> int:
        """Time of day."""
        return WALL_MS + int(self.now * 1000)

    def step(self, event: ev.Event) -> None:
        """Give the core an event, and take its effects."""
        for effect in self.core.step(event, self.now):
            self.perform(effect)
        assert self.core.next_deadline() > -NEVER

    def perform(self, effect: ev.Effect) -> None:
        """Have an effect happen later."""
        epoch = self.registry.epoch
        match effect:
            case ev.Answer():
                assert effect.request not in self.answers, "answered twice"
                self.answers[effect.request] = effect
            case ev.WriteTopic():

                def write(arrives: bool, write: ev.WriteTopic = effect) -> None:
                    if arrives or self.random.random() < 0.5:
                        self.registry.write(epoch, write)
                    if epoch == self.registry.epoch:  # the shell reads until it knows
                        self.step(ev.Written(write.token, *self.registry.read(write.name)))

                self.pending.append((epoch, write))
            case ev.Append():

                def append(arrives: bool, append: ev.Append = effect) -> None:
                    group = self.groups[append.group]
                    answer = group.append(append.token, append.kind, append.payload) if group.up else None
                    if epoch != self.registry.epoch:
                        return
                    if answer is None or not arrives:
                        answer = ev.Appended(append.token, failure="no answer in time")
                        if self.random.random() < 0.5:  # it is applied once more, much later
                            self.pending.append((-1, lambda _: self.late(append)))
                    self.step(answer)

                self.pending.append((epoch, append))
            case ev.AskLoad():

                def ask(arrives: bool, number: int = effect.group) -> None:
                    group = self.groups[number]
                    if epoch == self.registry.epoch:
                        self.step(ev.LoadRead(number, group.loads() if group.up and arrives else None, number / 2))

                self.pending.append((epoch, ask))

    def late(self, append: ev.Append) -> None:
        """An entry is applied that nobody waits for any more."""
        self.groups[append.group].apply(append.kind, append.payload)

    def request(self, name: str, change: ev.Change) -> int:
        """Ask for a change; returns its number."""
        self.requests += 1
        self.asked[self.requests] = name, change
        self.step(ev.ChangeRequested(self.requests, name, change))
        return self.requests

    def happen(self, at: int = 0, *, arrives: bool = True) -> None:
        """One of the things under way happens."""
        _, what = self.pending.pop(at)
        what(arrives)

    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        if self.core.next_deadline() <= self.now:
            self.step(TICK)

    def settle(self) -> None:
        """Let everything happen until nothing is left to be done."""
        for group in self.groups:
            group.up = True
        self.step(ev.GroupsChanged(range(len(self.groups)), range(len(self.groups))))
        for _ in range(10_000):
            while self.pending:
                self.happen()
            if not self.core.under_way():
                return
            self.pass_time(max(self.core.next_deadline() - self.now, 0.01))
        raise AssertionError(f"never settled: {self.core.under_way()}")

    def write_block(self, node: TopicNode, number: int, writer: int) -> None:
        """A writer sends one message to a part."""
        part = node.part(number)
        assert part is not None
        key = en.part_id(node.topic, number), writer
        first = self.positions.get(key, 0) + 1
        block = encode([Message(b"", slot=part.low)], topic=node.topic, part=number, writer=writer, first=first)
        answer = self.groups[part.group].apply(en.BLOCK, en.encode_block(1, block))
        if isinstance(answer, Appended) and answer.verdict is Verdict.STORED:
            self.positions[key] = answer.position

    def nodes(self) -> dict[str, TopicNode]:
        """Topics in the registry."""
        found = {name: self.registry.read(name)[1] for name in self.registry.nodes}
        return {name: node for name, node in found.items() if node is not None}

    # --- judging

    def check_order(self) -> None:
        """No part was opened before all of its parents were sealed, with what they knew of their writers."""
        sealed: set[int] = set()
        for _, kind, what in self.log:
            if kind == en.SEAL:
                assert isinstance(what, int)
                sealed.add(what)
            else:
                assert isinstance(what, en.Opening)
                topic = en.topic_of(what.part)
                assert {en.part_id(topic, parent) for parent in what.parents} <= sealed, f"opened before its parents: {what}"

    def check_agreement(self) -> None:
        """Registry and groups say the same."""
        nodes = self.nodes()
        wanted = {en.part_id(node.topic, part.number): (node, part) for node in nodes.values() for part in node.parts}
        held = {number: (group, part) for group in self.groups for number, part in group.state.parts.items()}
        assert held.keys() == wanted.keys()
        for number, (node, part) in wanted.items():
            group, found = held[number]
            assert group.number == part.group
            assert (found.low, found.high, found.sealed) == (part.low, part.high, part.state.value == "sealed"), (part, found)
            known = group.state.topics[node.topic]
            assert (known.name, known.deleted) == (node.name, bool(node.deleted_at_ms))
            assert [getattr(known, each) for each in SETTINGS] == [getattr(node, each) for each in SETTINGS]
            channels = {each.channel: (each.name, each.max_attempts, each.filter) for each in group.state.channels_of(node.topic)}
            assert channels == {each.channel: (each.name, each.max_attempts, each.filter) for each in node.channels}
            for channel in node.channels:
                assert (channel.channel, number) in group.state.progress
            for parent in part.parents:
                for (key, writer), position in self.positions.items():
                    if key == en.part_id(node.topic, parent):
                        assert found.inherited[parent, writer][0] == position
        for node in nodes.values():
            assert node.settled == node.version
            node.lineage()
