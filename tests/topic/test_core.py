"""The core of a topic replica: answers stand after commits, refusals leave everything as it was, and a leader begins with an
entry."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.core.contract import END_OF_TURN, NEVER, TICK
from cluster.replication.core.events import Accepted
from cluster.store.events import Committed, LeaderChanged, Propose, Refused
from pixiu.errors import Overloaded, Refusal
from pixiu.wire.block import Block, Stamp
from pixiu.wire.levels import Triple
from tests.topic.builders import CHANNEL, PART, Log, written
from topic import core as topic_core
from topic import entries as en
from topic import events as ev
from topic.core import Core
from topic.state.parts import Verdict
from topic.state.state import Done, Sealed
from topic.storage.segment import Gap


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

    def blocks(self, part: int, low: int, high: int) -> Sequence[tuple[Stamp, Block]]:
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


def test_a_block_is_answered_when_it_is_applied() -> None:
    leader = Leader()
    leader.lead()
    assert leader.write(1, 2) == []
    (reply,) = leader.commit()
    assert reply == ev.WriteReply(3, 1, Triple(0, 1, 4), 2, 0, Verdict.STORED, [])
    assert (leader.core.counters.blocks, leader.core.counters.messages) == (1, 2)


def test_a_follower_refuses_with_the_leaders_address() -> None:
    leader = Leader()
    leader.step(LeaderChanged(0, "host:1"))
    (reply,) = leader.write(1)
    assert isinstance(reply, ev.WriteReply)
    assert reply.refusal is not None
    assert reply.refusal.code == "NOT_LEADER"
    assert "host:1" in reply.refusal.text
    assert leader.core.next_deadline() == NEVER


def test_what_cannot_be_a_block_is_refused_and_counted() -> None:
    leader = Leader()
    leader.lead()
    (reply,) = leader.step(ev.WriteRequested(3, 1, 42, written(1)[:-1]))
    assert isinstance(reply, ev.WriteReply)
    assert reply.refusal is not None
    assert (reply.refusal.code, leader.core.counters.malformed, leader.proposed) == ("MALFORMED", 1, [])


def test_slots_of_another_part_are_refused() -> None:
    leader = Leader()
    leader.log.open_part(2, 0, 100)
    leader.lead()
    (reply,) = leader.step(ev.WriteRequested(3, 1, 42, written(99, 100, part=2)))
    assert isinstance(reply, ev.WriteReply)
    assert reply.refusal is not None
    assert "does not hold" in reply.refusal.text


def test_after_a_refused_block_those_behind_it_are_holes() -> None:
    leader = Leader()
    leader.lead()
    leader.write(1, 2)
    (proposal,) = leader.proposed
    leader.proposed.clear()
    (refused,) = leader.step(Refused(proposal.token, Refusal.of(Overloaded("later"))))
    assert isinstance(refused, ev.WriteReply)
    assert refused.refusal is not None
    (hole,) = leader.write(3, first=3)
    assert isinstance(hole, ev.WriteReply)
    assert (hole.verdict, hole.position, leader.proposed) == (Verdict.HOLE, 0, [])
    leader.write(1, 2)
    (stored,) = leader.commit()
    assert isinstance(stored, ev.WriteReply)
    assert stored.verdict is Verdict.STORED


def test_a_repeated_block_is_answered_with_its_offset() -> None:
    leader = Leader()
    leader.lead()
    leader.write(1, 2)
    leader.write(1, 2, request=2)
    first, second = leader.commit()
    assert isinstance(first, ev.WriteReply)
    assert isinstance(second, ev.WriteReply)
    assert (first.base, second.base, second.verdict) == (0, 0, Verdict.REPEATED)


def test_with_too_few_disks_the_outcome_is_unknown() -> None:
    leader = Leader()
    leader.lead()
    leader.write(1)
    (reply,) = leader.commit(copies=0)
    assert isinstance(reply, ev.WriteReply)
    assert reply.refusal is not None
    assert reply.refusal.code == "OUTCOME_UNKNOWN"


def test_a_lost_office_leaves_outcomes_unknown_and_members_to_the_next() -> None:
    leader = Leader()
    leader.log.channel()
    leader.lead()
    leader.step(ev.Joined(9, "orders", "c", 5))
    leader.write(1)
    reply, ended = leader.step(LeaderChanged(0))
    assert isinstance(reply, ev.WriteReply)
    assert reply.refusal is not None
    assert reply.refusal.code == "OUTCOME_UNKNOWN"
    assert isinstance(ended, ev.MemberEnded)
    assert (ended.member, ended.refusal.code) == (9, "NOT_LEADER")
    (answer,) = leader.step(ev.Reported(9, 1, PART, [(0, 1)]))
    assert isinstance(answer, ev.ReportReply)
    assert answer.refusal is not None
    assert answer.refusal.code == "NOT_LEADER"


def test_members_get_messages_after_the_leaders_first_entry_and_answers_after_the_commit() -> None:
    leader = Leader()
    leader.log.channel()
    leader.log.write(1, 2)
    leader.step(LeaderChanged(1), ev.Joined(9, "orders", "c", 5), TICK)
    assert [effect for effect in leader.step(TICK) if isinstance(effect, ev.Deliver)] == []
    (deliver,) = leader.commit()
    assert deliver == ev.Deliver(9, CHANNEL, PART, [ev.Run(0, 2, 1)])
    assert leader.step(ev.Reported(9, 4, PART, [(0, 2)])) == []
    (reply,) = leader.commit()
    assert reply == ev.ReportReply(9, 4, PART, [(0, 2)], [])


def test_nothing_is_delivered_without_the_lease() -> None:
    leader = Leader()
    leader.log.channel()
    leader.log.write(1)
    leader.lead()
    leader.may_read = False
    assert leader.step(ev.Joined(9, "orders", "c", 5)) == []
    leader.may_read = True
    (deliver,) = leader.step(TICK)
    assert isinstance(deliver, ev.Deliver)


def test_a_refused_begin_is_tried_again() -> None:
    leader = Leader()
    leader.step(LeaderChanged(1), TICK)
    (proposal,) = leader.proposed
    leader.proposed.clear()
    leader.step(Refused(proposal.token, Refusal.of(Overloaded("the time is not known yet"))))
    assert leader.core.next_deadline() == topic_core.BEGIN_AGAIN_S
    leader.now = 1.0
    leader.step(TICK)
    leader.commit()
    assert leader.core.delivers


def test_admin_is_answered_with_what_the_log_made_of_it() -> None:
    leader = Leader()
    leader.lead()
    child = en.Child(2, 0, 65_536, 0)
    leader.write(1)
    leader.step(ev.Requested(7, en.SEAL, en.encode_seal(PART, [child])))
    leader.step(ev.Requested(8, en.TRIM, en.encode_trim(PART, 1)))
    _, sealed, trimmed = leader.commit()
    assert sealed == ev.Reply(7, Sealed(PART, 1, (child,), [en.KnownWriter(1, 5, 1, 0)], []))
    assert trimmed == ev.Reply(8, Done(True))
    leader.write(2, first=2)
    (refused,) = leader.commit()
    assert isinstance(refused, ev.WriteReply)
    assert (refused.verdict, refused.children, refused.position) == (Verdict.SEALED, [child], 1)


def test_parents_of_other_groups_are_asked_for() -> None:
    leader = Leader()
    leader.log.channel(ordered=True)
    leader.log.open_part(5, parents=(4,))
    leader.log.write(1, part=5)
    leader.lead()
    leader.step(ev.Joined(9, "orders", "c", 5))
    leader.now = 2.0
    assert leader.step(TICK) == [ev.AskParent(CHANNEL, en.part_id(1, 4))]
    (deliver,) = leader.step(ev.ParentFinished(CHANNEL, en.part_id(1, 4)))
    assert isinstance(deliver, ev.Deliver)
    assert not leader.core.finished(CHANNEL, en.part_id(1, 5))


def test_more_than_may_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Leader()
    leader.lead()
    monkeypatch.setattr(topic_core, "MAX_WAITING_BYTES", 100)
    leader.write(1)
    (reply,) = leader.write(2, first=2)
    assert isinstance(reply, ev.WriteReply)
    assert reply.refusal is not None
    assert reply.refusal.code == "OVERLOADED"


def test_an_ordered_channel_goes_on_after_a_gap_that_nobody_can_fill() -> None:
    leader = Leader()
    leader.log.channel(ordered=True)
    for first in (1, 3, 5):
        leader.log.write(7, 7, first=first)
    leader.log.store.flush()
    (segment,) = leader.log.store.logs[PART].segments
    second = segment.size // 3
    leader.log.files._file(segment.path).do((second + 60, b"\xff"))
    leader.log.store.cache.clear()
    leader.lead()
    (deliver,) = leader.step(ev.Joined(9, "orders", "c", 2))
    assert isinstance(deliver, ev.Deliver)
    assert deliver.runs == [(0, 2, 1)]
    leader.step(ev.Reported(9, 1, PART, [(0, 2)]))
    assert [effect for effect in leader.commit() if isinstance(effect, ev.Deliver)] == []
    (gap,) = leader.log.store.logs[PART].read(2, 1)
    assert isinstance(gap, Gap)
    leader.step(ev.Requested(1, en.LOST, en.encode_lost(PART, *gap)))
    found = leader.commit()
    assert ev.Reply(1, Done(True)) in found
    assert leader.log.store.state.progress[CHANNEL, PART].lost == gap.high - gap.low
    assert leader.log.store.state.finished(CHANNEL, PART) is False
