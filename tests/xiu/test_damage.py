"""Damage that a core meets when it decides, writes or trims: it takes nothing before the store is repaired, and then goes on as
if there had been none."""

from __future__ import annotations

import pytest

from pixiu.ids import msg_id
from pixiu.wire.levels import Level
from tests.xiu.parts import NOW_US, MemoryStore
from tests.xiu.world import Xiu, codes, first, results, user
from xiu.events import Result
from xiu.state.dedupe import place_of
from xiu.state.keys import KEY, MARKS, RUNS


def dedupe_key(record: bytes) -> bytes:
    """Of the run that begins with a record, in the store."""
    return KEY.pack(RUNS, place_of(int.from_bytes(record[16:24], "little")))


def committed(*numbers: int) -> Xiu:
    """A leader that stored these."""
    xiu = Xiu()
    for number in numbers:
        xiu.accept(xiu.send(user(number)))
        xiu.commit()
    return xiu


def feed(xiu: Xiu, other: Xiu) -> None:
    """Another replica applies everything of a leader's log."""
    other.log.entries = list(xiu.log.entries)
    other.commit()


def test_a_leader_that_cannot_read_what_it_needs_refuses_until_it_is_repaired_and_then_knows_the_same() -> None:
    xiu = committed(1, 2)
    xiu.store.unreadable = {dedupe_key(user(1))}
    xiu.accept(xiu.send(user(3), position=1))  # decided before the damage is met, committed behind it
    assert codes(xiu.accept(xiu.send(user(1), user(4), position=2))) == ["STORE_DAMAGED"]
    assert xiu.core.stuck
    assert "page" in xiu.core.damaged
    assert codes(xiu.send(user(5), position=9)) == ["STORE_DAMAGED"]
    assert results(xiu.commit()) == [Result(1, 1, "", sequence=first(3))]
    assert xiu.store.head.last == first(2), "nothing is written meanwhile"
    assert xiu.core.waiting == 0

    xiu.store.repaired()
    xiu.core.rewound(xiu.now)
    assert not xiu.core.stuck
    assert xiu.core.damaged == ""
    assert xiu.store.head.last == first(2), "what follows is written when replication says it again"
    xiu.commit()
    assert xiu.store.head.last == first(4)
    xiu.accept(xiu.send(user(1), user(4), user(3), user(6)))
    assert results(xiu.commit()) == [
        Result(1, 1, "", msg_id=msg_id(1, 64, first(1))),
        Result(2, 1, "", msg_id=msg_id(1, 64, first(4))),
        Result(3, 1, "", msg_id=msg_id(1, 64, first(3))),
        Result(4, 1, "", sequence=first(5)),
    ]
    healthy = Xiu(lead=False)
    feed(xiu, healthy)
    assert healthy.store.rows == xiu.store.rows
    assert set(xiu.table.there.values()) == {True}


def test_a_new_leader_that_cannot_decide_what_it_finds_in_the_log_refuses_until_it_is_repaired() -> None:
    leader, xiu = committed(1, 2), Xiu(lead=False)
    feed(leader, xiu)
    leader.accept(leader.send(user(2), user(3)))
    xiu.log.entries = list(leader.log.entries)
    xiu.store.unreadable = {dedupe_key(user(2))}
    assert xiu.elected(4) == []
    assert codes(xiu.send(user(4))) == ["STORE_DAMAGED"]
    xiu.store.repaired()
    xiu.core.rewound(xiu.now)
    xiu.accept(xiu.send(user(4)))
    assert results(xiu.commit()) == [Result(1, 1, "", sequence=first(1, epoch=4))]


@pytest.mark.parametrize("how", ["read", "write"])
def test_a_follower_applies_nothing_past_damage_and_everything_after_the_repair(how: str) -> None:
    leader, xiu = committed(1, 2), Xiu(lead=False)
    feed(leader, xiu)
    before = xiu.store.head
    leader.accept(leader.send(user(1), user(3)))
    leader.commit()
    if how == "read":
        xiu.store.unreadable = {dedupe_key(user(1))}
    else:
        xiu.store.broken = True
    for _ in range(3):
        feed(leader, xiu)
        assert xiu.store.head == before
        assert xiu.core.stuck
    xiu.store.repaired()
    xiu.core.rewound(xiu.now)
    assert xiu.store.head == before
    xiu.commit()
    assert xiu.store.rows == leader.store.rows


def test_a_repaired_store_that_is_older_is_brought_to_where_it_was() -> None:
    xiu = committed(1, 2)
    older = MemoryStore()
    older.rows, older.head = dict(xiu.store.rows), xiu.store.head
    xiu.accept(xiu.send(user(3)))
    xiu.commit()
    written = xiu.store.head
    xiu.store.unreadable = {dedupe_key(user(1))}
    xiu.accept(xiu.send(user(1), position=5))
    xiu.commit()
    xiu.store.repaired()
    xiu.store.rows, xiu.store.head = older.rows, older.head
    xiu.core.rewound(xiu.now)
    assert xiu.store.head == written
    xiu.commit()
    assert xiu.store.head.applied.counter == len(xiu.log.entries)


def test_damage_that_is_met_again_after_a_repair_stops_it_again() -> None:
    xiu = committed(1)
    xiu.store.unreadable = {dedupe_key(user(1))}
    xiu.accept(xiu.send(user(1), level=Level.ACCEPTED))
    xiu.core.rewound(xiu.now)
    assert xiu.core.stuck, "it was not repaired"


def test_unreadable_marks_are_told_and_stop_trims_alone() -> None:
    xiu = committed(1)
    xiu.store.unreadable = {KEY.pack(MARKS, first(1))}
    assert xiu.trim(NOW_US) == []
    assert xiu.core.damaged
    assert not xiu.core.stuck
    assert xiu.core.samples()["damaged"] == 1
    xiu.accept(xiu.send(user(2)))
    assert results(xiu.commit()) == [Result(1, 1, "", sequence=first(2))]
    xiu.store.repaired()
    xiu.core.rewound(xiu.now)
    assert xiu.core.damaged == ""


def test_a_snapshot_that_is_loaded_ends_the_wait() -> None:
    xiu = Xiu(lead=False)
    leader = committed(1, 2)
    feed(leader, xiu)
    xiu.store.broken = True
    leader.accept(leader.send(user(3)))
    leader.commit()
    feed(leader, xiu)
    assert xiu.core.stuck
    xiu.store.repaired()
    xiu.store.rows, xiu.store.head = dict(leader.store.rows), leader.store.head
    xiu.core.replaced()
    assert not xiu.core.stuck
    assert xiu.core.damaged == ""
