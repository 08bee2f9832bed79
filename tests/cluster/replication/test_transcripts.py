"""Replicas of one partition in texts: the production core, a network and a ZooKeeper that do only what the text says.

start a log=1:1-3         a replica with three entries of epoch 1; all see it
pass 1.5                  time passes on all, in steps of a quarter of a second
zookeeper                 answers what was asked of it, until nothing is asked any more
deliver [a→b]             messages under way arrive, until there are none; or those of one direction, once
lose a→b                  they do not
propose a x y             a writer's payloads
held a, synced a          its disk keeps what it is told to sync, and is done with it
gone a                    its session is over, and all see it
show                      every replica's state, epoch, log and what is committed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from cluster.replication.core import events as ev
from cluster.replication.core.core import Core
from cluster.replication.core.messages import Append, Appended, Message, Mismatch, Refused
from cluster.replication.model import Entry, EntryKind, MemberID, PartitionState, Position, Presence, Versioned
from cluster.replication.options import ReplicationOptions
from tests.sim.replication.disk import Disk, MemoryLog
from tests.support.transcript import check

FOLDER = Path(__file__).parent / "transcripts"
NAMES = "abc"
STEP_S = 0.25


def name(member: MemberID) -> str:
    return NAMES[member - 1] if 0 < member <= len(NAMES) else "nobody"


def at(position: Position | None) -> str:
    return "-" if position is None else f"{position.epoch}:{position.counter}"


def text_of(entry: Entry) -> str:
    payload = entry.payload.decode() if entry.kind == EntryKind.DATA else "first of its epoch"
    return f"{at(entry.position)} {payload}"


def state_text(state: PartitionState | None) -> str:
    if state is None:
        return "nothing"
    return f"epoch {state.epoch}, leader {name(state.leader)}, in sync {' '.join(map(name, sorted(state.in_sync)))}"


def message_text(message: Message) -> str:
    match message:
        case Append(epoch, _, previous, entries, committed):
            what = f"after {at(previous)} [{', '.join(map(text_of, entries))}]" if entries else f"heartbeat at {at(previous)}"
            return f"epoch {epoch}, {what}, committed {committed}"
        case Appended(epoch, _, _, matched):
            return f"epoch {epoch}, has {matched}"
        case Mismatch(epoch, _, _, hint):
            return f"epoch {epoch}, lacks it, try {hint}"
        case Refused(epoch):
            return f"refused, promised epoch {epoch}"


def effect_text(effect: ev.Effect) -> str:
    match effect:
        case ev.Sync():
            return "syncs"
        case ev.Send(to, message):
            return f"→ {name(to)}: {message_text(message)}"
        case ev.CompareAndSet(_, expected, state):
            return f"asks for version {expected + 1}: {state_text(state)}"
        case ev.Accepted(_, epoch, first, last):
            return f"accepted {epoch}:{first} to {epoch}:{last}"
        case ev.Rejected(_, reason):
            return f"rejected: {reason.value}"
        case ev.Persisted(counter):
            return f"persisted {counter}"
        case ev.Committed(counter, copies):
            return f"committed {counter}" + (f", {copies} have it" if copies else "")
        case ev.ReadState():
            return "reads the state"
        case ev.Leading(epoch) | ev.Deposed(epoch):
            return f"{type(effect).__name__.lower()} in epoch {epoch}"
        case _:
            return type(effect).__name__


class Replica:
    """A core and its disk."""

    def __init__(self, member: MemberID, log: list[Entry], now: float) -> None:
        self.member, self.held = member, False
        self.disk = Disk()
        self.disk.image.entries = log
        self.log = MemoryLog(self.disk)
        self.core = Core(member=member, incarnation=1, log=self.log, options=ReplicationOptions(), applied=0, now=now)
        self.committed = 0
        self.tickets: list[int] = []
        self.asked: list[ev.ReadState | ev.CompareAndSet] = []


class Partition:
    """Replicas, what is under way between them, and the state in ZooKeeper."""

    def __init__(self) -> None:
        self.now = 0.0
        self.replicas: dict[str, Replica] = {}
        self.under_way: list[tuple[str, str, Message]] = []
        self.version, self.state = -1, PartitionState(0, MemberID(0), 0, frozenset())

    def do(self, command: str) -> Iterable[str]:
        """Carry out a command; what came of it."""
        verb, *words = command.split()
        lines: Iterator[str] = getattr(self, f"do_{verb}")(*words)
        return list(lines)

    def do_start(self, which: str, log: str = "") -> Iterator[str]:
        entries: list[Entry] = []
        for part in filter(None, log.removeprefix("log=").split(",")):
            epoch, _, counters = part.partition(":")
            first, _, last = counters.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            entries += [Entry(int(epoch), number, EntryKind.DATA, 0, b"%d" % number) for number in numbers]
        member = MemberID(NAMES.index(which) + 1)
        self.replicas[which] = Replica(member, entries, self.now)
        yield from self.step(which, ev.SessionStarted(int(member), 1))
        yield from self.present()

    def present(self) -> Iterator[str]:
        live = tuple(Presence(int(replica.member), replica.member, 1) for replica in self.replicas.values())
        for each in list(self.replicas):
            yield from self.step(each, ev.PresenceChanged(live))

    def do_gone(self, which: str) -> Iterator[str]:
        del self.replicas[which]
        self.under_way = [each for each in self.under_way if which not in each[:2]]
        yield from self.present()

    def do_pass(self, seconds: str) -> Iterator[str]:
        for _ in range(int(float(seconds) / STEP_S)):
            self.now += STEP_S
            for which in list(self.replicas):
                yield from self.step(which, ev.Tick())

    def do_zookeeper(self) -> Iterator[str]:
        while asking := [(which, replica) for which, replica in self.replicas.items() if replica.asked]:
            for which, replica in asking:
                effect = replica.asked.pop(0)
                if isinstance(effect, ev.ReadState):
                    yield from self.step(which, ev.StateRead(self.read()))
                elif effect.expected == self.version:
                    self.version, self.state = self.version + 1, effect.state
                    yield f"the state is version {self.version}: {state_text(effect.state)}"
                    yield from self.step(which, ev.Swapped(effect.token, ev.CompareAndSetOutcome.OK))
                    for other in list(self.replicas):
                        yield from self.step(other, ev.StateRead(self.read()))
                else:
                    yield from self.step(which, ev.Swapped(effect.token, ev.CompareAndSetOutcome.CONFLICT))

    def read(self) -> Versioned:
        return Versioned(self.version, self.state if self.version >= 0 else None)

    def do_deliver(self, way: str = "") -> Iterator[str]:
        if way:
            source, _, target = way.partition("→")
            chosen = [each for each in self.under_way if each[:2] == (source, target)]
            self.under_way = [each for each in self.under_way if each[:2] != (source, target)]
            for _, to, message in chosen:
                yield from self.step(to, ev.Received(message))
        while not way and self.under_way:
            _, to, message = self.under_way.pop(0)
            yield from self.step(to, ev.Received(message))

    def do_lose(self, way: str) -> Iterator[str]:
        source, _, target = way.partition("→")
        for each in [each for each in self.under_way if each[:2] == (source, target)]:
            self.under_way.remove(each)
            yield f"{way} lost: {message_text(each[2])}"

    def do_propose(self, which: str, *payloads: str) -> Iterator[str]:
        yield from self.step(which, ev.Propose(1, [(int(EntryKind.DATA), payload.encode()) for payload in payloads], 0))

    def do_held(self, which: str) -> Iterator[str]:
        self.replicas[which].held = True
        yield from ()

    def do_synced(self, which: str) -> Iterator[str]:
        replica = self.replicas[which]
        replica.held = False
        yield from self.sync(which, replica)

    def do_show(self) -> Iterator[str]:
        for which, replica in self.replicas.items():
            log = ", ".join(map(text_of, replica.log.entries))
            yield f"{which} {replica.core.state.value}, epoch {replica.core.epoch}, committed {replica.committed}, log [{log}]"

    def sync(self, which: str, replica: Replica) -> Iterator[str]:
        tickets, replica.tickets = replica.tickets, []
        if tickets:
            replica.log.sync(replica.log.issued)
            yield from self.step(which, ev.Synced(tickets[-1]))

    def step(self, which: str, event: ev.Event) -> Iterator[str]:
        replica = self.replicas[which]
        before = replica.core.state
        for effect in replica.core.step(event, self.now):
            yield f"{which} {effect_text(effect)}"
            if isinstance(effect, ev.Sync):
                replica.tickets.append(effect.ticket)
            elif isinstance(effect, ev.Send):
                if name(effect.to) in self.replicas:
                    self.under_way.append((which, name(effect.to), effect.message))
            elif isinstance(effect, ev.ReadState | ev.CompareAndSet):
                replica.asked.append(effect)
            elif isinstance(effect, ev.Committed):
                replica.committed = effect.counter
        if replica.core.state is not before:
            yield f"{which} is {replica.core.state.value}"
        if not replica.held:
            yield from self.sync(which, replica)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_a_transcript_is_what_happens(path: Path) -> None:
    check(path, Partition().do)
