"""The core of a topic replica: answers stand after commits, refusals leave everything as it was, and a leader begins with an
entry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from cluster.core.contract import END_OF_TURN, NEVER, TICK
from cluster.replication.core.events import Accepted, Persisted
from cluster.store.events import Committed, LeaderChanged, Propose, Refused
from cluster.topics import entries as en
from pixiu.errors import Overloaded, Refusal
from pixiu.placement.slots import SLOTS
from pixiu.wire.block import Block, Message, Stamp, encode
from pixiu.wire.levels import Level, Triple
from tests.topic.builders import CHANNEL, PART, TOPIC, Log, said, written
from topic import core as topic_core
from topic import events as ev
from topic import parked
from topic.core import Core
from topic.dispatch import channels
from topic.dispatch.dispatcher import SKIPPED_S
from topic.state.parts import Verdict
from topic.state.state import Done, Sealed
from topic.storage.segment import Gap

LEVELS = (Level.ACCEPTED, Level.PERSISTED, Level.REPLICATED)


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


def joined(member: int = 9, credit: int = 5, **fields: Any) -> ev.Joined:
    return ev.Joined(member, "orders", fields.pop("channel", "c"), credit, **fields)


def ended(effects: list[ev.Effect]) -> tuple[int, str, str]:
    (effect,) = [each for each in effects if isinstance(each, ev.MemberEnded)]
    return effect.member, effect.refusal.code, effect.refusal.text


def given(effects: list[ev.Effect]) -> list[tuple[int, Sequence[ev.Run]]]:
    return [(each.member, each.runs) for each in effects if isinstance(each, ev.Deliver)]


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


@pytest.mark.parametrize(
    ("event", "code", "text"),
    [
        (ev.Joined(2, "other", "c", 1), "NOT_SERVED", "nothing of a topic other"),
        (joined(2, channel="x"), "NOT_SERVED", "no channel x"),
        (joined(2, filter='[{"header": "a", "equal": "y"}]'), "INVALID_ARGUMENT", "has the filter"),
        (joined(2, load_test=ev.LoadTest.PASS), "INVALID_ARGUMENT", "load_test = block"),
    ],
)
def test_members_learn_why_they_are_refused(event: ev.Joined, code: str, text: str) -> None:
    leader = Leader()
    leader.log.channel(filter='[{"header": "a", "equal": "x"}]')
    leader.step(LeaderChanged(1), event, joined(1, filter='[{"equal": "x", "header": "a"}]'), TICK)
    if event.load_test is ev.LoadTest.PASS:  # of two, the first decides
        assert ended(leader.commit())[:2] == (1, "INVALID_ARGUMENT")
        return
    found = ended(leader.commit())
    assert found[:2] == (2, code)
    assert text in found[2]
    assert leader.core.describe(CHANNEL)[0].members == [ev.MemberView("", "", 5, 0)]


def test_a_removed_channel_ends_its_members_and_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_MEMBERS", 1)
    leader = Leader()
    leader.log.channel()
    leader.lead()
    leader.step(joined())
    assert ended(leader.step(joined(10)))[:2] == (10, "OVERLOADED")
    leader.step(ev.Requested(7, en.CHANNEL, en.ChannelSettings(CHANNEL, TOPIC, "c", removed=True).encode()))
    assert ended(leader.commit())[:2] == (9, "NOT_SERVED")
    assert leader.core.next_deadline() != float("-inf")


def test_a_filter_is_checked_before_it_comes_into_the_log() -> None:
    leader = Leader()
    leader.lead()
    (reply,) = leader.step(ev.Requested(7, en.CHANNEL, en.ChannelSettings(CHANNEL, TOPIC, "c", filter="[]").encode()))
    assert isinstance(reply, ev.Reply)
    assert reply.refusal is not None
    assert (reply.refusal.code, leader.proposed) == ("INVALID_ARGUMENT", [])
    (reply,) = leader.step(ev.Requested(7, en.CHANNEL, en.ChannelSettings(CHANNEL, TOPIC, "c", filter="size = 1").encode()))
    assert isinstance(reply, ev.Reply)
    assert reply.refusal is not None
    assert "column 6" in reply.refusal.text
    (reply,) = leader.step(ev.Requested(7, en.SEAL, b"[]"))
    assert isinstance(reply, ev.Reply)
    assert reply.refusal is not None
    assert reply.refusal.code == "MALFORMED"


@pytest.mark.parametrize("ordered", [False, True])
def test_a_seek_voids_what_members_have(ordered: bool) -> None:
    leader = Leader()
    leader.log.channel(ordered=ordered)
    leader.log.write(1, 2, 3)
    leader.lead()
    assert given(leader.step(joined())) == [(9, [(0, 3, 1)])]
    seek = ev.Requested(7, en.SEEK, en.encode_seek(CHANNEL, PART, 1))
    (refused,) = leader.step(seek)
    assert isinstance(refused, ev.Reply)
    assert refused.refusal is not None
    assert "force" in refused.refusal.text
    leader.step(ev.Reported(9, 1, PART, [(0, 1)]), ev.Requested(7, en.SEEK, seek.payload, force=True))
    assert leader.step(ev.Reported(9, 2, PART, [(1, 3)])) == [ev.ReportReply(9, 2, PART)]
    assert leader.core.describe(CHANNEL)[0].stuck == ["a seek is on its way"]
    found = leader.commit()
    assert ev.Reply(7, Done(True)) in found
    assert given(found) == [(9, [(1, 3, 1)])]
    assert leader.core.describe(CHANNEL)[0].with_members == 2


def test_what_a_load_test_left_is_washed_out_by_consuming_back() -> None:
    leader = Leader()
    leader.log.channel()
    leader.log.apply(en.BLOCK, en.encode_block(42, said({"load_test": True}, {}, {"load_test": True}, {})))
    leader.lead()
    assert given(leader.step(joined(load_test=ev.LoadTest.PASS))) == [(9, [(0, 4, 1)])]
    leader.step(ev.Reported(9, 1, PART, [(0, 4)]))
    leader.commit()
    leader.step(ev.Left(9), ev.Requested(7, en.SEEK, en.encode_seek(CHANNEL, PART, 0)))
    leader.commit()
    assert given(leader.step(joined(10))) == [(10, [(1, 2, 1), (3, 4, 1)])]
    leader.step(ev.Reported(10, 1, PART, [(0, 4)]))
    leader.commit()
    leader.now += SKIPPED_S
    leader.step(TICK)
    leader.commit()
    assert leader.core.describe(CHANNEL)[0].unacknowledged == 0


def test_a_channel_without_a_filter_gets_everything() -> None:
    leader = Leader()
    leader.log.channel(filter='[{"header": "region", "equal": "eu"}]')
    leader.log.channel(channel=CHANNEL + 1, name="all")
    messages: list[dict[str, Any]] = [{"headers": [("region", b"us")]}, {}, {"headers": [("region", b"eu")]}]
    leader.log.apply(en.BLOCK, en.encode_block(42, said(*messages)))
    leader.lead()
    assert given(leader.step(joined(9), joined(10, channel="all"))) == [(9, [(2, 3, 1)]), (10, [(0, 3, 1)])]
    leader.step(ev.Reported(9, 1, PART, [(2, 3)]))
    leader.commit()
    leader.now = SKIPPED_S
    leader.step(TICK)
    leader.commit()
    assert [leader.core.describe(each)[0].unacknowledged for each in (CHANNEL, CHANNEL + 1)] == [0, 3]


def test_a_leader_that_does_not_deliver_yet_takes_no_seek() -> None:
    """It could not void what it gives before the seek commits."""
    leader = Leader()
    leader.log.channel()
    leader.step(LeaderChanged(1))
    (reply,) = leader.step(ev.Requested(7, en.SEEK, en.encode_seek(CHANNEL, PART, 0), force=True))
    assert isinstance(reply, ev.Reply)
    assert reply.refusal is not None
    assert reply.refusal.code == "OVERLOADED"


def test_a_refused_seek_leaves_the_channel_where_it_was() -> None:
    leader = Leader()
    leader.log.channel()
    leader.log.write(1, 2)
    leader.lead()
    leader.step(ev.Requested(7, en.SEEK, en.encode_seek(CHANNEL, PART, 2)))
    (proposal,) = leader.proposed
    leader.proposed.clear()
    assert given(leader.step(joined())) == []
    assert given(leader.step(Refused(proposal.token, Refusal.of(Overloaded("later"))))) == [(9, [(0, 2, 1)])]


@pytest.mark.parametrize("ordered", [False, True])
def test_resent_dead_letters_are_delivered_as_if_for_the_first_time(ordered: bool) -> None:
    leader = Leader()
    leader.log.channel(ordered=ordered, max_attempts=1)
    leader.log.write(1, 2, 3)
    leader.lead()
    leader.step(joined())
    leader.step(ev.Reported(9, 1, PART, [(1, 2)], [(0, 0.0), (2, 0.0)]))
    leader.commit()
    assert leader.core.describe(CHANNEL)[0].dead == 2
    for _ in range(2):
        leader.step(ev.Requested(7, en.RESEND, en.encode_resend(CHANNEL, PART, [2])))
    assert given(leader.commit()) == [(9, [(2, 3, 1)])]
    leader.step(ev.Requested(7, en.RESEND, en.encode_resend(CHANNEL, PART)))
    assert given(leader.commit()) == [(9, [(0, 1, 1)])]
    assert leader.core.describe(CHANNEL)[0].unacknowledged == 2
    leader.step(ev.Reported(9, 1, PART, [(0, 3)]))
    leader.commit()
    assert leader.core.describe(CHANNEL)[0].unacknowledged == 0


GONE = {
    "trimmed": (en.TRIM, en.encode_trim(PART, 10)),
    "lost": (en.LOST, en.encode_lost(PART, 0, 10)),
    "superseded": (en.COMPACT, en.Compaction(PART, [(0, 1)]).encode()),
}


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("gone", GONE)
def test_resent_dead_letters_that_go_before_anybody_has_room_hold_up_no_others(ordered: bool, gone: str) -> None:
    leader = Leader()
    leader.log.channel(ordered=ordered, max_attempts=1)
    for number in range(3):
        leader.log.write(*range(10), first=1 + 10 * number)
        leader.log.store.flush()
        leader.log.store.logs[PART].roll()
    leader.log.settle((1, 20), (21, 29), dead=[en.Dead(0, 1, 1), en.Dead(20, 1, 1)])
    leader.lead()
    assert given(leader.step(joined(credit=1))) == [(9, [(29, 30, 1)])]
    leader.step(ev.Requested(7, en.RESEND, en.encode_resend(CHANNEL, PART)))
    leader.commit()
    leader.step(ev.Requested(8, *GONE[gone]))
    leader.commit()
    leader.log.store.flush()
    leader.log.store.cache.drop(PART)
    assert given(leader.step(ev.Credited(9, 10))) == [(9, [(20, 21, 1)])]


def test_members_learn_which_parts_are_finished() -> None:
    leader = Leader()
    leader.log.channel(ordered=True)
    leader.log.open_part(2, parents=(1,))
    leader.log.write(1)
    leader.log.write(1, part=2)
    leader.lead()
    assert given(leader.step(joined())) == [(9, [(0, 1, 1)])]
    leader.step(ev.Reported(9, 1, PART, [(0, 1)]))
    leader.commit()
    leader.step(ev.Requested(7, en.SEAL, en.encode_seal(PART, ())))
    found = leader.commit()
    assert ev.PartsFinished(9, [PART]) in found
    assert [each.part for each in found if isinstance(each, ev.Deliver)] == [en.part_id(TOPIC, 2)]
    assert ev.PartsFinished(10, [PART]) in leader.step(joined(10))


def test_a_channel_says_why_its_messages_wait() -> None:
    leader = Leader()
    leader.log.channel()
    leader.log.write(1, 2, 3)
    (view,) = leader.core.describe(CHANNEL)
    assert (view.unacknowledged, view.stuck) == (3, ["no member is here"])
    leader.lead()
    leader.step(joined(credit=1, name="slow"))
    (view,) = leader.core.describe(CHANNEL)
    assert (view.with_members, view.members) == (1, [ev.MemberView("slow", "", 1, 1)])
    assert view.stuck == ["every member has as many messages as its credit allows, and reports none: slow"]
    leader.step(ev.Credited(9, 2))
    assert leader.core.describe(CHANNEL)[0].with_members == 2
    assert leader.core.describe(99) == []


def test_what_the_log_refuses_to_put_off_is_put_off_after_a_pause() -> None:
    """While the disk is full every settlement is refused at once."""
    leader = Leader()
    leader.log.channel()
    leader.lead()
    leader.step(joined(credit=1))
    leader.write(1)
    leader.commit()
    leader.now = 1_000.0
    leader.step(TICK)
    (proposal,) = leader.proposed
    leader.proposed.clear()
    leader.step(Refused(proposal.token, Refusal.of(Overloaded("later"))))
    assert leader.core.next_deadline() > leader.now
    leader.now = leader.core.next_deadline()
    leader.step(TICK)
    assert len(leader.proposed) == 1


def opening(number: int, *, more: bool = False) -> ev.Requested:
    part = en.part_id(TOPIC, number)
    return ev.Requested(9, en.OPEN, en.Opening(part, 0, SLOTS, more=more).encode())


def verdicts(effects: list[ev.Effect]) -> list[Verdict | None]:
    return [each.verdict for each in effects if isinstance(each, ev.WriteReply)]


def test_blocks_of_a_part_that_is_about_to_open_wait_for_it_in_order() -> None:
    leader = Leader()
    leader.lead()
    blocks = [written(1, first=number, part=2) for number in (1, 2)]
    assert leader.step(*(ev.WriteRequested(3, number, 42, block) for number, block in enumerate(blocks, 1))) == []
    leader.step(opening(2, more=True))
    assert len(leader.commit()) == 1
    leader.step(opening(2))
    stored = [each for each in leader.commit() if isinstance(each, ev.WriteReply)]
    assert [(each.request, each.verdict, each.base) for each in stored] == [(1, Verdict.STORED, 0), (2, Verdict.STORED, 1)]


def test_blocks_of_a_part_that_does_not_open_are_refused_after_a_moment() -> None:
    leader = Leader()
    leader.lead()
    assert leader.step(ev.WriteRequested(3, 1, 42, written(1, part=2))) == []
    leader.now = leader.core.next_deadline()
    assert verdicts(leader.step(TICK)) == [Verdict.NOT_HERE]
    assert leader.core.next_deadline() > leader.now
    leader.step(ev.WriteRequested(3, 2, 42, written(1, part=2)))
    (refused,) = leader.step(LeaderChanged(0, "other:1"))
    assert isinstance(refused, ev.WriteReply)
    assert refused.refusal is not None
    assert refused.refusal.code == "NOT_LEADER"


def test_only_so_much_waits_for_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked, "MAX_PARKED_BYTES", 100)
    leader = Leader()
    leader.lead()
    assert leader.step(ev.WriteRequested(3, 1, 42, written(1, part=2))) == []
    assert verdicts(leader.step(ev.WriteRequested(3, 2, 42, written(1, part=3)))) == [Verdict.NOT_HERE]


def test_a_writer_whose_name_was_opened_again_is_shut_out_at_once() -> None:
    """What it had in the log before the fence counts; nothing does that comes after it, though the fence is not applied yet."""
    leader = Leader()
    leader.lead()

    def write(epoch: int, first: int) -> ev.WriteRequested:
        return ev.WriteRequested(3, first, 42, written(1, first=first), epoch=epoch)

    def codes(effects: list[ev.Effect]) -> list[str]:
        writes = [each for each in effects if isinstance(each, ev.WriteReply)]
        return [each.refusal.code if each.verdict is None and each.refusal else "STORED" for each in writes]

    leader.step(write(10, 1))
    fence = ev.Requested(7, en.FENCE, en.encode_fence(TOPIC, 5, 20))
    assert codes(leader.step(fence, write(10, 2))) == ["STALE_WRITER"]
    assert codes(leader.commit()) == ["STORED"]
    assert leader.log.store.state.fences == {(TOPIC, 5): 20}
    assert codes(leader.step(write(10, 2))) == codes(leader.step(write(0, 2))) == ["STALE_WRITER"]
    leader.step(write(20, 2))
    assert codes(leader.commit()) == ["STORED"]


def test_a_fence_that_did_not_come_into_the_log_shuts_nobody_out() -> None:
    leader = Leader()
    leader.lead()
    leader.step(ev.Requested(7, en.FENCE, en.encode_fence(TOPIC, 5, 20)))
    (proposal,) = leader.proposed
    leader.proposed.clear()
    leader.step(Refused(proposal.token, Refusal("DISK_FULL", "no space", 0)))
    leader.step(ev.WriteRequested(3, 1, 42, written(1), epoch=10))
    assert verdicts(leader.commit()) == [Verdict.STORED]


def test_a_group_learns_the_epoch_of_a_writer_that_it_did_not_know() -> None:
    leader = Leader()
    leader.lead()
    leader.step(*(ev.WriteRequested(3, number, 42, written(1, first=number), epoch=20) for number in (1, 2)))
    assert [kind for kind, _ in leader.proposed[0].payloads] == [en.FENCE, en.BLOCK, en.BLOCK]
    leader.commit()
    assert leader.log.store.state.fences == {(TOPIC, 5): 20}
