"""Writers of level stored: answered once the object store has their block, and never left waiting; others are held for space."""

from __future__ import annotations

import pytest

from cluster.replication.core.events import Accepted
from cluster.store.events import LeaderChanged
from cluster.topics import entries as en
from pixiu.errors import InvalidArgument, OutcomeUnknown, Refusal
from pixiu.objects.manifest import StoredObject
from pixiu.wire.levels import Level
from tests.topic.builders import PART, TOPIC, written
from tests.topic.leader import Leader
from topic import events as ev
from topic.state.parts import Verdict

URL = "memory://s"


def leading() -> Leader:
    leader = Leader()
    leader.log.topic(store=URL)
    leader.step(LeaderChanged(1, ""))
    leader.commit()
    return leader


def write(leader: Leader, request: int, first: int, count: int = 2, level: Level = Level.STORED) -> list[ev.Effect]:
    return leader.step(ev.WriteRequested(1, request, 42, written(*[1] * count, first=first), level))


def upload(leader: Leader, base: int, end: int) -> list[ev.Effect]:
    payload = en.encode_objects(PART, [StoredObject(base, end, 1, 0, 1, 1, 1, URL)])
    leader.step(ev.Requested(9, en.UPLOADED, payload))
    return leader.commit()


def answers(effects: list[ev.Effect]) -> list[tuple[int, Verdict | None, int]]:
    return [(each.request, each.verdict, each.base) for each in effects if isinstance(each, ev.WriteReply)]


def test_a_block_is_answered_when_the_store_has_it() -> None:
    leader = leading()
    assert write(leader, 1, 1) == []
    assert answers(leader.commit()) == []
    write(leader, 2, 3)
    write(leader, 3, 5, level=Level.REPLICATED)
    assert answers(leader.commit()) == [(3, Verdict.STORED, 4)]
    assert list(leader.core.stored.parts) == [PART]
    assert answers(upload(leader, 0, 2)) == [(1, Verdict.STORED, 0)]
    assert answers(upload(leader, 2, 6)) == [(2, Verdict.STORED, 2)]
    assert not leader.core.stored.parts


def test_a_repeated_block_waits_as_well_and_one_that_the_store_has_does_not() -> None:
    leader = leading()
    write(leader, 1, 1)
    leader.commit()
    write(leader, 2, 1)
    assert answers(leader.commit()) == []
    assert answers(upload(leader, 0, 2)) == [(1, Verdict.STORED, 0), (2, Verdict.REPEATED, 0)]
    write(leader, 3, 1)
    assert answers(leader.commit()) == [(3, Verdict.REPEATED, 0)]


def test_what_retention_or_an_operator_drops_is_not_waited_for() -> None:
    leader = leading()
    write(leader, 1, 1)
    leader.commit()
    leader.step(ev.Requested(8, en.TRIM, en.encode_trim(PART, 2)))
    assert answers(leader.commit()) == [(1, Verdict.STORED, 0)]
    write(leader, 2, 3)
    leader.commit()
    leader.step(ev.Requested(8, en.SEAL, en.encode_seal(PART, [])))
    leader.commit()
    leader.step(ev.Requested(8, en.DROP, en.encode_drop(PART)))
    assert answers(leader.commit()) == [(2, Verdict.STORED, 2)]


@pytest.mark.parametrize("event", [LeaderChanged(0, "b"), ev.StoreLeft(Refusal.of(OutcomeUnknown("draining")))])
def test_nobody_waits_for_a_leader_that_goes(event: ev.Event) -> None:
    leader = leading()
    write(leader, 1, 1)
    leader.commit()
    replies = [each for each in leader.step(event) if isinstance(each, ev.WriteReply)]
    assert [(each.request, each.refusal and each.refusal.code) for each in replies] == [(1, OutcomeUnknown.code)]
    assert not leader.core.stored.parts


def test_without_a_store_the_level_is_refused() -> None:
    leader = leading()
    leader.log.topic(store="")
    (reply,) = write(leader, 1, 1)
    assert isinstance(reply, ev.WriteReply)
    assert reply.refusal is not None
    assert reply.refusal.code == "INVALID_ARGUMENT"
    assert "--store" in reply.refusal.text


def test_a_compacted_topic_is_not_told_to_take_a_store() -> None:
    leader = leading()
    leader.log.topic(store="", compact=60)
    (reply,) = write(leader, 1, 1)
    assert isinstance(reply, ev.WriteReply)
    assert reply.refusal is not None
    assert "it is compacted" in reply.refusal.text
    assert "--store" not in reply.refusal.text


def test_nobody_waits_for_a_store_that_the_topic_has_no_longer() -> None:
    leader = leading()
    write(leader, 1, 1)
    leader.commit()
    settings = leader.log.store.state.topics[TOPIC]
    leader.step(ev.Requested(8, en.TOPIC, settings._replace(retention_s=5).encode()))
    assert answers(leader.commit()) == []
    leader.step(ev.Requested(8, en.TOPIC, settings._replace(store="").encode()))
    (reply,) = [each for each in leader.commit() if isinstance(each, ev.WriteReply)]
    assert reply.refusal is not None
    assert (reply.request, reply.refusal.code) == (1, OutcomeUnknown.code)
    assert not leader.core.stored.parts


def test_only_topics_with_a_store_are_held_for_space_and_told_when_to_come_back() -> None:
    leader = leading()
    leader.core.stored.hold = "5 bytes wait"
    (reply,) = write(leader, 1, 1, level=Level.REPLICATED)
    assert isinstance(reply, ev.WriteReply)
    assert reply.refusal == Refusal("OVERLOADED", "5 bytes wait", 1000)
    leader.log.topic(store="")
    assert write(leader, 2, 1, level=Level.REPLICATED) == []
    assert answers(leader.commit()) == [(2, Verdict.STORED, 0)]


def test_an_unusable_store_is_told_to_writers_of_level_stored_alone() -> None:
    leader = leading()
    write(leader, 1, 1)
    leader.commit()
    away = Refusal(OutcomeUnknown.code, "away", 5000)
    assert leader.step(ev.StoreLeft(away, PART + 1)) == []
    (reply,) = leader.step(ev.StoreLeft(away, PART))
    assert isinstance(reply, ev.WriteReply)
    assert (reply.request, reply.refusal) == (1, away)
    leader.core.stored.unusable[URL] = f"the store {URL} needs a package"
    (reply,) = write(leader, 2, 3)
    assert isinstance(reply, ev.WriteReply)
    assert reply.refusal is not None
    assert reply.refusal.code == InvalidArgument.code
    assert "needs a package; level stored needs it" in reply.refusal.text
    assert write(leader, 3, 3, level=Level.REPLICATED) == []
    assert answers(leader.commit()) == [(3, Verdict.STORED, 2)]


def test_level_stored_is_proposed_as_replicated() -> None:
    leader = leading()
    write(leader, 1, 1)
    (propose,) = leader.proposed
    assert propose.replicated
    assert leader.step(Accepted(propose.token, 1, 4, 4)) == []
