"""A topic over two groups, with writers, channels of both modes and an admin that resizes it, under faults of replication.

python -m tests.sim.topics.world 17     one seed: what happened, and what was wrong
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tests.sim.replication.schedule import Schedule, heal
from tests.sim.replication.world import Node
from tests.sim.topics.clients import Admin, Member, Writer
from tests.sim.topics.group import Group
from tests.sim.topics.history import Channel, Ended, Finished, Given, Judge, Message
from tests.sim.topics.sdk_writer import SdkWriter
from tests.support.simulation import Simulation
from topic import events as ev
from topic.core import Core
from topic.storage.store import Store

FAULTS_S = 20.0
HEALING_S = 120.0
CHANNELS = {1: Channel(False), 2: Channel(True), 3: Channel(False, "eu", False), 4: Channel(True, "eu", False)}


class TopicWorld(Simulation):
    """One run.

    Args:
        seed: of everything random.
        core: the class of the replicas' cores; a test puts a broken one here.
        store: that of their stores.
    """

    def __init__(self, seed: int, core: type[Core] = Core, store: type[Store] = Store) -> None:
        super().__init__(seed)
        self.core_class, self.store_class = core, store
        self.channels = CHANNELS
        self.judge = Judge(self.channels)
        self.counts: Counter[str] = Counter()
        self.writing = True
        self.members: dict[int, Member] = {}
        self.member_numbers = 0
        self.tags: dict[int, str] = {}
        """Of all members that ever were, by number."""
        self.dropped: set[int] = set()
        self._due_us: dict[Message, int] = {}
        self.groups = [Group(self, number, self.rng.randrange(1 << 32)) for number in range(2)]
        for group in self.groups:
            schedule = Schedule(group)
            schedule.faults = [fault for fault in schedule.faults if fault != "rot"] or ["kill", "power"]
            schedule.begin()
        self.admin = Admin(self)
        self.writers = Writer(self, 1), SdkWriter(self, 2)
        for channel in self.channels:
            for group in self.groups:
                for tagged in (False, True):
                    Member(self, channel, group, tagged)

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] += number

    def due_us(self, message: Message) -> int:
        """When a message is due; 0: at once, as most are. The first one who asks decides."""
        if message.number % 6 == 1 and message not in self._due_us:
            self._due_us[message] = self.groups[0].true_us + int(self.rng.choice((0.3, 2.0, 9.0)) * 1_000_000)
        return self._due_us.get(message, 0)

    # --- between clients and groups

    def send(self, group: Group, event: ev.Event) -> None:
        """A request to a group's leader: lost, late or twice at times."""
        node = group.leader()
        rng = self.rng
        if node is None or (self.writing and rng.random() < 0.05):
            return
        delay = rng.uniform(0.002, 0.03) if not self.writing or rng.random() < 0.95 else rng.uniform(0.0, 3.0)
        self.after(delay, group.request, node, node.start, event)
        if self.writing and rng.random() < 0.03:
            self.after(rng.uniform(0.0, 2.0), group.request, node, node.start, event)

    def perform(self, group: Group, node: Node, effect: Any) -> None:
        """What a core says reaches who it is for, or nobody."""
        rng = self.rng
        self.note(type(effect).__name__.encode())
        lost = self.writing and rng.random() < 0.03
        delay = rng.uniform(0.002, 0.03)
        if isinstance(effect, ev.WriteReply):
            if not lost:
                self.after(delay, self.writers[effect.stream - 1].on_reply, effect)
        elif isinstance(effect, ev.Reply):
            if not lost:
                self.after(delay, self.admin.on_reply, effect)
        elif isinstance(effect, ev.Deliver):
            self._deliver(group, node, effect, delay)
        elif isinstance(effect, ev.ReportReply):
            member = self.members.get(effect.member)
            if member is not None:
                member.on_report(effect)
        elif isinstance(effect, ev.MemberEnded):
            member = self.members.get(effect.member)
            self.judge.take(Ended(effect.member))
            if member is not None:
                self.count("members ended")
                member.forget()
        elif isinstance(effect, ev.PartsFinished):
            member = self.members.get(effect.member)
            if member is not None:
                self.count("parts finished", len(effect.parts))
                for part in effect.parts:
                    self.judge.take(Finished(member.channel, part))
        elif isinstance(effect, ev.AskParent):
            self.after(delay, self._ask_parent, group, node, node.start, effect)

    def _deliver(self, group: Group, node: Node, effect: ev.Deliver, delay: float) -> None:
        offsets = tuple(offset for run in effect.runs for offset in range(run.low, run.high))
        replica = group.replicas[node.member]
        messages = tuple(replica.message_at(effect.part, offset) for offset in offsets)
        leader = group.number, node.member, replica.core.epoch
        tag = self.tags[effect.member]
        early = tuple(at for at, each in zip(offsets, messages, strict=True) if each and self._due_us.get(each, 0) > group.true_us)
        self.judge.take(Given(effect.channel, effect.part, effect.member, offsets, messages, leader, tag, early))
        self.count("given", len(offsets))
        self.count("given again", sum(run.high - run.low for run in effect.runs if run.attempts > 1))
        member = self.members.get(effect.member)
        if member is not None:
            self.after(delay, member.on_messages, effect.member, effect)

    def _ask_parent(self, asking: Group, node: Node, start: int, effect: ev.AskParent) -> None:
        """Whoever leads the parent's group, or believes so, may answer: what is finished stays so. A dropped part is finished."""
        if effect.part in self.dropped:
            asking.request(node, start, ev.ParentFinished(effect.channel, effect.part))
            return
        for group in self.groups:
            for replica in group.replicas.values():
                if replica.node.core is not None and replica.core.finished(effect.channel, effect.part):
                    asking.request(node, start, ev.ParentFinished(effect.channel, effect.part))
                    return

    def broke(self, group: Group, node: Node) -> None:
        """A process is gone, or leads no longer: its members notice."""
        for member in [each for each in self.members.values() if each.node is not None and each.node[0] is node]:
            if member.group is group:
                member.forget()

    # --- the end

    def well(self) -> bool:
        return (
            all(group.history.well() for group in self.groups)
            and self.admin.idle
            and all(writer.idle for writer in self.writers)
            and self.judge.all_done()
        )


@dataclass
class Verdict:
    """What a run came to."""

    seed: int
    violations: list[tuple[str, str]]
    counts: Counter[str]
    trace: str


def run(seed: int, core: type[Core] = Core, store: type[Store] = Store) -> Verdict:
    """Play one seed."""
    world = TopicWorld(seed, core, store)
    world.run_until(FAULTS_S)
    world.writing = False
    for group in world.groups:
        heal(group)
        group.clients = True
    world.run_until(FAULTS_S + HEALING_S, world.well)
    judge = world.judge
    judge.finish()
    if world.well():
        for group in world.groups:
            group.check_end()
    violations = [*judge.violations, *(each for group in world.groups for each in group.history.violations)]
    if not world.well():
        idle = world.admin.idle, [writer.idle for writer in world.writers], judge.all_done()
        violations.append(("stuck", f"{[group.history.well() for group in world.groups]} {idle}"))
    counts = sum((group.counts for group in world.groups), world.counts.copy())
    counts["stored"], counts["confirmed"] = judge.stored, judge.confirmed
    return Verdict(seed, violations, counts, world.trace)


if __name__ == "__main__":
    for number in sys.argv[1:] or ["0"]:
        verdict = run(int(number))
        print(number, verdict.violations[:6], dict(sorted(verdict.counts.items())))
