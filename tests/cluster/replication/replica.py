"""Replicas without a network: what a core asks for is done at once, or kept for the test to look at."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from cluster.replication.core import events as ev
from cluster.replication.core.core import Core
from cluster.replication.core.messages import Append, Appended
from cluster.replication.model import Damage, Entry, EntryKind, Forced, MemberID, PartitionState, Position, Presence, Versioned
from cluster.replication.options import ReplicationOptions
from tests.sim.replication.disk import Disk, MemoryLog
from tests.support.effects import only

A, B, C = MemberID(1), MemberID(2), MemberID(3)
OPTIONS = ReplicationOptions()
T = TypeVar("T")


def state(epoch: int, leader: MemberID, *in_sync: MemberID, incarnation: int = 1) -> PartitionState:
    return PartitionState(epoch, leader, incarnation, frozenset(in_sync))


def entries(epoch: int, first: int, last: int) -> list[Entry]:
    return [Entry(epoch, counter, EntryKind.DATA, 0, b"%d" % counter) for counter in range(first, last + 1)]


class Replica:
    """A core over a log in memory. `sync` False: the test says when the disk is done."""

    def __init__(
        self, member: MemberID = A, log: list[Entry] | None = None, options: ReplicationOptions = OPTIONS,
        damage: Damage | None = None, applied: int = 0,
    ) -> None:  # fmt: skip
        self.now = 100.0
        self.disk = Disk()
        self.disk.image.entries = list(log or [])
        self.disk.image.unclean = damage is not None
        self.log = MemoryLog(self.disk)
        self.core = Core(member=member, incarnation=1, log=self.log, options=options, applied=applied, now=self.now, damage=damage)
        self.sync = True
        self.live = [Presence(int(member), member, 1)]
        self.step(ev.SessionStarted(int(member), 1))
        self.present()

    def present(self, *members: MemberID) -> list[ev.Effect]:
        """Exactly these are live, and this one."""
        mine = [presence for presence in self.live if presence.member == self.core.context.member]
        self.live = mine + [Presence(int(member), member, 1) for member in members]
        return self.step(ev.PresenceChanged(tuple(self.live)))

    def step(self, event: ev.Event) -> list[ev.Effect]:
        out = self.core.step(event, self.now)
        done = list(out)
        while self.sync and (tickets := [effect.ticket for effect in out if isinstance(effect, ev.Sync)]):
            self.log.sync(self.log.issued)
            out = self.core.step(ev.Synced(tickets[-1]), self.now)
            done += out
        return done

    def wait(self, seconds: float) -> list[ev.Effect]:
        """Ticks for so long."""
        done: list[ev.Effect] = []
        until = self.now + seconds
        while self.now < until:
            self.now += 0.25
            done += self.step(ev.Tick())
        return done

    def read(self, version: int, what: PartitionState | None) -> list[ev.Effect]:
        return self.step(ev.StateRead(Versioned(version, what)))

    def append(
        self, epoch: int, sender: MemberID, previous: tuple[int, int] | None, new: list[Entry], committed: int = 0, end: int = 0,
        forced: tuple[Forced, ...] = (),
    ) -> list[ev.Effect]:  # fmt: skip
        before = Position(*previous) if previous is not None else None
        end = end or (previous[1] if previous is not None else 0) + len(new)
        return self.step(ev.Received(Append(epoch, sender, before, new, committed, end, self.now, forced=forced)))

    def appended(self, sender: MemberID, matched: int, incarnation: int = 1, space: bool = False) -> list[ev.Effect]:
        return self.step(ev.Received(Appended(self.core.epoch, sender, incarnation, matched, self.now, space=space)))

    def propose(self, *payloads: bytes) -> list[ev.Effect]:
        return self.step(ev.Propose(1, [(int(EntryKind.DATA), payload) for payload in payloads], 0))

    def lead(self, *others: MemberID) -> None:
        """Promoted in epoch 2 with these in sync, state version 6, and the first entry acknowledged by them."""
        self.present(*others)
        member = self.core.context.member
        self.read(5, state(1, MemberID(9), member, *others))
        swap = only(ev.CompareAndSet, self.wait(20.0))
        assert swap.state == replace(state(2, member, member, *others), incarnation=1)
        self.step(ev.Swapped(swap.token, ev.CompareAndSetOutcome.OK))
        for other in others:
            self.appended(other, self.log.last.counter)


def kinds(effects: list[ev.Effect]) -> set[type]:
    return {type(effect) for effect in effects}


def sent(effects: list[ev.Effect], kind: type[T]) -> list[T]:
    return [effect.message for effect in effects if isinstance(effect, ev.Send) and isinstance(effect.message, kind)]
