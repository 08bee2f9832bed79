"""The core of a topic replica and its channels: who may join, seeks, dead letters, and what members learn."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.core.contract import TICK
from cluster.store.events import LeaderChanged, Refused
from cluster.topics import entries as en
from pixiu.errors import Overloaded, Refusal
from tests.topic.builders import CHANNEL, PART, TOPIC, said
from tests.topic.leader import Leader, ended, given, joined
from topic import events as ev
from topic.dispatch import channels
from topic.dispatch.dispatcher import SKIPPED_S
from topic.state.state import Done


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
