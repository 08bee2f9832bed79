"""What an operator is told of a replica that may not lead, and of one that is not in sync."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.replication.core import events as ev
from cluster.replication.core.fitness import hindrance, left_out
from cluster.replication.core.messages import Appended, Mismatch
from cluster.replication.model import Damage, Presence
from tests.cluster.replication.replica import OPTIONS, A, B, C, Replica, entries, state

DAMAGE = Damage(entries(1, 1, 1)[0].position, entries(1, 2, 2)[0].position, "a wrong CRC")


def following(*in_sync: int) -> Replica:
    replica = Replica(A, entries(1, 1, 3))
    replica.present(B)
    replica.read(3, state(2, B, *(B if member == B else A for member in in_sync)))
    return replica


def test_a_leader_and_a_follower_in_sync_may_lead() -> None:
    assert hindrance(following(A, B).core) == ""
    leader = Replica(A)
    leader.lead(B)
    assert hindrance(leader.core) == ""


def _unregistered(replica: Replica) -> None:
    replica.step(ev.PresenceChanged((Presence(int(B), B, 1),)))


def _without_space(replica: Replica) -> None:
    replica.step(ev.Tick(0, False))


def _drained(replica: Replica) -> None:
    replica.step(ev.Drain())


def _halted(replica: Replica) -> None:
    replica.step(ev.LogFailed("the disk is gone"))


@pytest.mark.parametrize(
    ("happens", "said"),
    [(_unregistered, "registry"), (_without_space, "disk space"), (_drained, "drains"), (_halted, "halted")],
)
def test_what_happened_to_a_follower_is_why_it_may_not_lead(happens: Callable[[Replica], None], said: str) -> None:
    replica = following(A, B)
    happens(replica)
    assert said in hindrance(replica.core)


def test_who_is_not_in_sync_or_not_whole_may_not_lead() -> None:
    assert hindrance(following(B).core) == "it is not in sync"
    damaged = Replica(A, entries(1, 1, 1), damage=DAMAGE)
    damaged.read(3, state(2, B, B))
    assert "missing" in hindrance(damaged.core)
    lost = Replica(A, entries(1, 1, 1))
    assert "has not read" in hindrance(lost.core)
    lost.read(-1, None)
    assert "no state" in hindrance(lost.core)


def leading() -> Replica:
    """Alone in sync, with a follower beside it that has not answered."""
    replica = Replica(A, options=replace(OPTIONS, join_within=1))
    replica.lead()
    replica.present(C)
    return replica


def why_out(replica: Replica) -> str:
    assert replica.core.leader is not None
    return left_out(replica.core.leader, replica.now)[C]


def test_why_a_follower_is_not_in_sync() -> None:
    replica = leading()
    assert why_out(replica) == "it does not answer"
    replica.step(ev.Received(Mismatch(replica.core.epoch, C, 1, 0, replica.now, True)))
    assert why_out(replica) == "its disk is full"
    replica.propose(*[b"x"] * 5)
    replica.step(ev.Received(Appended(replica.core.epoch, C, 1, 0, replica.now)))
    assert why_out(replica) == f"it is {replica.log.last.counter} entries behind"
    replica.appended(C, replica.log.last.counter)
    assert why_out(replica) == "it joins"
    replica.now += OPTIONS.silence_s + 1
    assert why_out(replica) == "it does not answer"


def test_who_is_in_sync_is_not_left_out() -> None:
    replica = Replica(A)
    replica.lead(B)
    assert replica.core.leader is not None
    assert left_out(replica.core.leader, replica.now) == {}
