"""The core of a topic replica: answers stand after commits, refusals leave everything as it was, and a leader begins with an
entry."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cluster.core.contract import NEVER, TICK
from cluster.replication.core.events import Accepted, Persisted
from cluster.store.events import Committed, LeaderChanged, Refused
from cluster.topics import entries as en
from pixiu.errors import Overloaded, Refusal
from pixiu.placement.slots import SLOTS
from pixiu.wire.block import Message, encode
from pixiu.wire.levels import Level, Triple
from tests.topic.builders import CHANNEL, PART, TOPIC, written
from tests.topic.leader import Leader, ended, joined
from topic import core as topic_core
from topic import events as ev
from topic.state.parts import Verdict
from topic.state.state import Done, Sealed
from topic.storage.segment import Gap

LEVELS = (Level.ACCEPTED, Level.PERSISTED, Level.REPLICATED)


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


def test_the_fastest_commit_says_what_time_it_is() -> None:
    leader = Leader()

    def entry(now: float, at_s: float) -> int:
        """An entry of a time is committed now. Returns the leader's clock."""
        leader.now = now
        leader.log.apply(en.BEGIN, b"", int(at_s * 1_000_000))
        leader.step(Committed(leader.log.store.state.applied, [None], 2))
        return leader.core.clock(now) // 1_000_000

    assert entry(100.0, 5_000.0) == 5_000
    assert entry(110.0, 5_009.0) == 5_010
    assert entry(120.0, 5_025.0) == 5_025
    assert entry(130.0, 5_033.5) == 5_035
    assert entry(140.0, 5_035.0) == 5_035, "too late for a commit: the clock was wrong"
    assert entry(150.0, 5_044.0) == 5_045
    assert entry(201.0, 5_095.0) == 5_095, "after a while it counts no longer"


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


def test_a_topic_has_its_own_rate() -> None:
    """Half of its slots have half of it; what is refused comes in later, and other topics see nothing of it."""
    leader = Leader()
    leader.log.topic(messages_per_s=20)
    leader.log.open_part(2, 0, SLOTS // 2)
    leader.log.apply(en.TOPIC, en.TopicSettings(5, "others").encode())
    leader.log.apply(en.OPEN, en.Opening(en.part_id(5, 1), 0, SLOTS).encode())
    leader.lead()

    def write(count: int, first: int, topic: int = TOPIC) -> list[ev.Effect]:
        messages = [Message(b"x", 0)] * count
        block = encode(messages, topic=topic, part=2 if topic == TOPIC else 1, writer=5, first=first)
        return leader.step(ev.WriteRequested(3, first, 42, block)) + leader.commit()

    def refusal(effects: list[ev.Effect]) -> Refusal:
        (reply,) = effects
        assert isinstance(reply, ev.WriteReply)
        assert reply.refusal is not None
        return reply.refusal

    def stored(effects: list[ev.Effect]) -> bool:
        (reply,) = effects
        return isinstance(reply, ev.WriteReply) and reply.verdict is Verdict.STORED

    assert stored(write(15, 1))
    code, text, wait_ms = refusal(write(1, 16))
    assert (code, wait_ms) == ("OVERLOADED", 500)
    assert "part 2 of topic orders takes 10 messages a second" in text
    (again,) = write(15, 1)
    assert isinstance(again, ev.WriteReply)
    assert again.verdict is Verdict.REPEATED  # what is stored already is not charged
    assert stored(write(1000, 1, topic=5))
    assert stored(write(1, 1001, topic=5))
    leader.now = 0.4
    assert refusal(write(1, 16)).retry_after_ms == 100
    leader.now = 0.6
    assert stored(write(1, 16))
    leader.step(ev.Requested(7, en.TOPIC, en.TopicSettings(TOPIC, "orders", bytes_per_s=1 << 20).encode()))
    leader.commit()
    assert stored(write(10_000, 17))
    assert stored(write(10_000, 10_017))


def test_parents_of_a_part_that_is_opened_are_asked_for_soon_and_then_more_and_more_seldom() -> None:
    leader = Leader()
    leader.log.channel(ordered=True)
    leader.lead()
    leader.step(ev.Joined(9, "orders", "c", 5), TICK)
    leader.now = 2.0
    leader.step(TICK)
    settings = leader.log.store.state.channels_of(TOPIC)
    opening = en.Opening(en.part_id(TOPIC, 5), 0, 10, parents=(4,), channels=settings)
    leader.step(ev.Requested(1, en.OPEN, opening.encode()))
    leader.commit()
    leader.step(TICK)
    asked = [leader.now]
    for _ in range(9):
        leader.now = leader.core.next_deadline()
        if any(isinstance(effect, ev.AskParent) for effect in leader.step(TICK)):
            asked.append(leader.now)
    waits = [after - before for before, after in pairwise(asked)]
    assert waits[0] < topic_core.ASK_AGAIN_S / 10
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(topic_core.ASK_AGAIN_S)


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


def test_lower_levels_are_answered_once_and_earlier() -> None:
    leader = Leader()
    leader.lead()
    found = leader.step(
        *(ev.WriteRequested(3, number, 42, written(number, first=number), level) for number, level in enumerate(LEVELS, 1))
    )
    (proposal,) = leader.proposed
    assert (found, proposal.replicated) == ([], True)
    first = leader.log.store.state.applied + 1
    (accepted,) = leader.step(Accepted(proposal.token, 1, first, first + 2))
    assert accepted == ev.WriteReply(3, 1, Triple(0, 1, first - 1), 1, -1, Verdict.STORED)
    assert leader.step(Persisted(first)) == []
    (persisted,) = leader.step(Persisted(first + 2))
    assert isinstance(persisted, ev.WriteReply)
    assert (persisted.request, persisted.position) == (2, 2)
    answers = [leader.log.apply(kind, payload) for kind, payload in proposal.payloads]
    (replicated,) = leader.step(Committed(first, answers, 2))
    assert isinstance(replicated, ev.WriteReply)
    assert (replicated.request, replicated.base, leader.core.counters.blocks) == (3, 2, 3)


def test_a_turn_of_lower_levels_needs_no_other_replica() -> None:
    leader = Leader()
    leader.lead()
    leader.step(ev.WriteRequested(3, 1, 42, written(1), Level.ACCEPTED))
    assert not leader.proposed[0].replicated


def test_what_may_be_refused_later_is_answered_late() -> None:
    """A repetition, and a block behind a seal. A hole is refused at once."""
    leader = Leader()
    leader.lead()
    leader.write(1)
    leader.commit()
    assert leader.step(ev.WriteRequested(3, 2, 42, written(1), Level.ACCEPTED)) == []
    (hole,) = leader.step(ev.WriteRequested(3, 3, 42, written(1, first=9), Level.ACCEPTED))
    assert isinstance(hole, ev.WriteReply)
    assert hole.verdict is Verdict.HOLE
    leader.step(ev.Requested(7, en.SEAL, en.encode_seal(PART, ())))
    leader.step(ev.WriteRequested(3, 4, 42, written(2, first=2), Level.ACCEPTED))
    verdicts = [each.verdict for each in leader.commit() if isinstance(each, ev.WriteReply)]
    assert verdicts == [Verdict.REPEATED, Verdict.SEALED]


def test_a_deleted_topic_refuses_writers_and_ends_its_members() -> None:
    leader = Leader()
    leader.log.channel()
    leader.lead()
    leader.step(joined())
    leader.step(ev.Requested(7, en.TOPIC, en.TopicSettings(TOPIC, "orders", deleted=True).encode()))
    leader.write(1)
    found = leader.commit()
    assert ended(found)[:2] == (9, "NOT_SERVED")
    (reply,) = [each for each in found if isinstance(each, ev.WriteReply)]
    assert reply.refusal is not None
    assert "deleted" in reply.refusal.text
    assert "deleted" in ended(leader.step(joined(10)))[2]
