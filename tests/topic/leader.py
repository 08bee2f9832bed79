"""A leader of topics without a network: its core over a store, and a log that commits when it is asked to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cluster.core.contract import END_OF_TURN, TICK
from cluster.replication.core.events import Accepted
from cluster.store.events import Committed, LeaderChanged, Propose
from cluster.topics import entries as en
from pixiu.wire.block import Block, Stamp
from tests.topic.builders import Log, written
from topic import events as ev
from topic.core import Core


class Leader:
    """A core over a store, and a log that commits when it is asked to."""

    may_read = True

    def __init__(self) -> None:
        self.log = Log()
        self.log.open_part()
        self.core = Core(self.log.store.state, self)
        self.proposed: list[Propose] = []
        self.now = 0.0

    def may_deliver(self) -> bool:
        return self.may_read

    def store_of(self, topic: en.TopicSettings) -> str:
        return topic.store

    def blocks(self, part: int, low: int, high: int) -> Iterable[tuple[Stamp, Block]]:
        return self.log.store.blocks(part, low, high)

    def step(self, *events: ev.Event) -> list[ev.Effect]:
        """Events of one turn. Returns what is not a proposal."""
        found = [effect for event in (*events, END_OF_TURN) for effect in self.core.step(event, self.now)]
        self.proposed += [effect for effect in found if isinstance(effect, Propose)]
        return [effect for effect in found if not isinstance(effect, Propose)]

    def commit(self, copies: int = 2) -> list[ev.Effect]:
        """Everything that is proposed comes into the log and is applied."""
        found = list[ev.Effect]()
        while self.proposed:
            proposal = self.proposed.pop(0)
            first = self.log.store.state.applied + 1
            found += self.step(Accepted(proposal.token, 1, first, first + len(proposal.payloads) - 1))
            answers = [self.log.apply(kind, payload) for kind, payload in proposal.payloads]
            found += self.step(Committed(first, answers, copies))
        return found

    def lead(self) -> None:
        self.step(LeaderChanged(1), TICK)
        self.commit()

    def write(self, *slots: int, first: int = 1, request: int = 1) -> list[ev.Effect]:
        return self.step(ev.WriteRequested(3, request, 42, written(*slots, first=first)))


def joined(member: int = 9, credit: int = 5, **fields: Any) -> ev.Joined:
    return ev.Joined(member, "orders", fields.pop("channel", "c"), credit, **fields)


def ended(effects: list[ev.Effect]) -> tuple[int, str, str]:
    (effect,) = [each for each in effects if isinstance(each, ev.MemberEnded)]
    return effect.member, effect.refusal.code, effect.refusal.text


def given(effects: list[ev.Effect]) -> list[tuple[int, Sequence[ev.Run]]]:
    return [(each.member, each.runs) for each in effects if isinstance(each, ev.Deliver)]
