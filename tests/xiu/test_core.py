"""The core between writers, the replicated log and the store."""

from __future__ import annotations

from typing import Any, cast

import pytest

from cluster.core.contract import NEVER, Tick
from cluster.core.role import totals
from cluster.replication.model import Entry
from cluster.store.events import Propose
from pixiu.errors import NotLeader, Overloaded, Refusal
from pixiu.ids import msg_id
from pixiu.wire.levels import Level
from pixiu.wire.record import Flag, Kind, encode
from tests.xiu.parts import NOW_MS, NOW_US, NoTable, mail, store
from tests.xiu.world import Xiu, codes, first, only, results, user
from xiu import events as ev
from xiu.core import READ_ENTRIES
from xiu.records.batch import check
from xiu.records.block import MAX_BLOCK_BYTES
from xiu.state.restoring import Step
from xiu.state.state import LAST_COUNTER, Blocked, Head, XiuKind
from xiu.store.reading import Reading


def test_each_level_is_answered_when_it_is_reached_with_the_triple() -> None:
    xiu = Xiu()
    accepted = only(xiu.accept(xiu.send(user(1), user(2), level=Level.ACCEPTED)), ev.Answer)
    assert accepted.results == [ev.Result(1, 2, "", sequence=first(1))]
    assert accepted.triple == (9, 3, 1)
    assert xiu.accept(xiu.send(user(3), position=3, level=Level.PERSISTED)) == []
    assert xiu.accept(xiu.send(user(4), position=4)) == []
    assert results(xiu.persist()) == [ev.Result(3, 1, "", sequence=first(3))]
    replicated = only(xiu.commit(), ev.Answer)
    assert replicated.results == [ev.Result(4, 1, "", sequence=first(4))]
    assert (replicated.triple.committed, replicated.copies) == (4, 2)


def test_what_is_on_fewer_disks_than_min_in_sync_is_stored_and_not_confirmed() -> None:
    xiu = Xiu()
    xiu.accept(xiu.send(user(1), user(2)))
    assert [(each.position, each.count, each.code) for each in results(xiu.commit(copies=0))] == [(1, 2, "UNAVAILABLE")]
    assert [block.count for block in xiu.store.blocks()] == [2]
    xiu.space(False)
    assert codes(xiu.send(user(1))) == ["UNAVAILABLE"]
    assert codes(xiu.send(user(1), level=Level.PERSISTED)) == [""]
    xiu.space(True)
    xiu.accept(xiu.send(user(1)))
    assert [result.msg_id for result in results(xiu.commit())] == [msg_id(1, 64, first(1))]


def test_records_are_in_the_table_when_accepted_and_in_the_store_when_committed() -> None:
    xiu = Xiu()
    xiu.accept(xiu.send(user(1)))
    assert xiu.table.there == {first(1): False}
    assert xiu.store.blocks() == []
    xiu.commit()
    assert xiu.table.there == {first(1): True}
    assert [block.records for block in xiu.store.blocks()] == [user(1)]
    assert xiu.core.waiting == 0


def test_a_repeat_gets_its_msgid_and_a_reused_id_an_error() -> None:
    xiu = Xiu()
    xiu.accept(xiu.send(user(1), user(2)))
    xiu.accept(xiu.send(user(2), user(1, b"other"), user(3), position=3))
    effects = xiu.commit()
    answers = [effect for effect in effects if isinstance(effect, ev.Answer)]
    repeat, reused, new = answers[1].results
    assert (repeat.position, repeat.code, repeat.msg_id) == (3, "", msg_id(1, 64, first(2)))
    assert (reused.position, reused.code) == (4, "ID_REUSED")
    assert (new.position, new.sequence) == (5, first(3))


def test_bad_records_are_refused_one_by_one_and_the_others_stored() -> None:
    xiu = Xiu()
    damaged = bytearray(user(1))
    damaged[-1] ^= 1
    room = encode(Kind.ROOM, 5, b"", 1, flags=Flag.TO_ROOM)
    batch = [user(2), bytes(damaged), room, mail(3, key=6), user(4), user(5)]
    answer = only(xiu.accept(xiu.send(*batch)) + xiu.commit(), ev.Answer)
    assert [(result.position, result.count, result.code) for result in answer.results] == [
        (2, 1, "CHECKSUM_WRONG"),
        (3, 1, "INVALID_ARGUMENT"),
        (4, 1, "WRONG_PARTITION"),
        (1, 1, ""),
        (5, 2, ""),
    ]
    assert "partition 2 of 4, served by c:1; this is 1" in answer.results[2].text
    assert [result.sequence for result in answer.results[3:]] == [first(1), first(2)]


def test_old_and_early_ids_are_refused() -> None:
    xiu = Xiu()
    early, old = user(1, at_ms=NOW_MS + 61_000), user(2, at_ms=NOW_MS - 25 * 3_600_000)
    assert codes(xiu.accept(xiu.send(early, old)) + xiu.commit()) == ["ID_AHEAD", "TOO_OLD"]


def test_a_record_above_the_limit_is_refused_and_nothing_is_proposed() -> None:
    data = user(1, b"x" * 2000)
    checked = check(data, 1, 1, 4, 2000)
    assert checked is not None
    assert [refusal.code for _, refusal in checked.refused] == ["RECORD_TOO_LARGE"]
    assert checked.runs == []


@pytest.mark.parametrize("count", [0, 1, 3])
def test_what_is_no_batch_ends_the_stream(count: int) -> None:
    xiu = Xiu()
    data = user(1) + user(2)[:-1] if count == 3 else user(1) + user(2)
    effects = xiu.send(data, level=Level.ACCEPTED, count=count)
    assert only(effects, ev.EndStream).stream == 7
    assert xiu.core.counters.batches_malformed == 1


def test_a_large_batch_becomes_several_entries_and_one_answer() -> None:
    xiu = Xiu()
    records = [user(number, b"x" * 60_000) for number in range(10)]
    effects = xiu.send(*records)
    payloads = only(effects, Propose).payloads
    assert len(payloads) == 3
    assert all(len(payload) <= MAX_BLOCK_BYTES + 4 for _, payload in payloads)
    answer = only(xiu.accept(effects) + xiu.commit(), ev.Answer)
    assert [(result.position, result.count) for result in answer.results] == [(1, 4), (5, 4), (9, 2)]
    assert b"".join(block.records for block in xiu.store.blocks()) == b"".join(records)


def test_a_traced_record_is_checked_without_its_trailer() -> None:
    xiu = Xiu()
    assert codes(xiu.accept(xiu.send(user(1, flags=Flag.TRACED))) + xiu.commit()) == [""]


def test_a_follower_refuses_writers_and_applies_what_commits() -> None:
    leader, follower = Xiu(), Xiu(lead=False)
    leader.accept(leader.send(user(1), user(2)))
    leader.commit()
    follower.log.entries = leader.log.entries
    assert codes(follower.send(user(3))) == ["NOT_LEADER"]
    follower.commit()
    assert follower.store.rows == leader.store.rows


def test_a_stream_of_an_earlier_epoch_must_send_again() -> None:
    xiu = Xiu()
    assert codes(xiu.send(user(1), epoch=2)) == ["STALE_STREAM"]
    assert isinstance(xiu.send(user(1), epoch=3)[0], Propose)


def test_who_waits_is_told_when_the_leader_goes_and_may_send_again() -> None:
    xiu = Xiu()
    xiu.accept(xiu.send(user(1), mail(9, key=6)))
    effects = xiu.deposed()
    results = only(effects, ev.Answer).results
    assert [(result.position, result.code) for result in results] == [(2, "WRONG_PARTITION"), (1, "NOT_LEADER")]
    assert xiu.table.there == {}
    del xiu.log.entries[1:]  # another leader cut it off
    xiu.lead(5)
    assert xiu.commit() == []
    answer = only(xiu.accept(xiu.send(user(1))) + xiu.commit(), ev.Answer)
    assert answer.results == [ev.Result(1, 1, "", sequence=first(1, 5))]
    assert xiu.core.counters.cut_off == 1


def test_what_a_former_leader_left_in_the_log_is_decided_first() -> None:
    old = Xiu()
    old.accept(old.send(user(1)))
    new = Xiu(lead=False)
    new.log.entries = list(old.log.entries)
    new.commit(1)
    new.lead(4)
    answer = only(new.accept(new.send(user(1), user(2))) + new.commit(), ev.Answer)
    assert [(result.msg_id, result.sequence) for result in answer.results] == [(msg_id(1, 64, first(1)), 0), (0, first(1, 4))]


def test_a_refusal_of_replication_reaches_the_writer_as_it_is() -> None:
    xiu = Xiu()
    why = Refusal("OVERLOADED", "more than 9 entries wait", 100)
    wrong, refused = results(xiu.refuse(xiu.send(user(1), mail(2, key=6)), why))
    assert wrong.code == "WRONG_PARTITION"
    assert (refused.code, refused.text, refused.retry_after_ms) == why
    assert xiu.log.entries[1:] == []


def test_a_replica_that_does_not_lead_names_the_leader() -> None:
    xiu = Xiu()
    xiu.deposed()
    (refused,) = results(xiu.send(user(1)))
    assert (refused.code, refused.text) == ("NOT_LEADER", "this replica does not lead; the leader is b:1")


def test_a_table_full_of_unpersisted_records_pushes_back() -> None:
    xiu = Xiu()
    xiu.table.space = False
    assert codes(xiu.send(user(1))) == ["OVERLOADED"]


def test_a_full_store_refuses_writes_and_goes_on_by_itself() -> None:
    xiu = Xiu()
    xiu.accept(xiu.send(user(1)))
    xiu.store.blocked = Blocked("no space", full=True)
    xiu.commit()
    assert codes(xiu.send(user(2))) == ["DISK_FULL"]
    xiu.now += 2
    xiu.commit()
    assert codes(xiu.send(user(2))) == ["DISK_FULL"]
    xiu.store.blocked = None
    xiu.now += 2
    xiu.commit()
    assert [block.records for block in xiu.store.blocks()] == [user(1)]
    assert codes(xiu.accept(xiu.send(user(2))) + xiu.commit()) == [""]
    assert xiu.store.reopened == 0


def test_a_full_store_confirms_what_it_has_to_whoever_sends_it_again() -> None:
    xiu = Xiu()
    xiu.accept(xiu.send(user(1)))
    xiu.commit()
    (stored,) = results(xiu.accept(xiu.send(user(1), position=2)) + xiu.commit())
    xiu.space(False)
    (again,) = results(xiu.send(user(1), position=3))
    assert (again.code, again.msg_id) == ("", stored.msg_id)
    answers = results(xiu.send(user(1), user(2), position=4))
    assert [(each.position, each.code) for each in answers] == [(4, ""), (5, "DISK_FULL")]
    assert len(xiu.store.blocks()) == 1


def test_a_full_store_refuses_nothing_for_good_that_is_on_its_way_into_it() -> None:
    xiu = Xiu()
    xiu.accept(xiu.send(user(1)))  # in the log, and not committed yet
    xiu.space(False)
    assert codes(xiu.send(user(1), position=2)) == ["UNAVAILABLE"]
    xiu.commit()
    assert codes(xiu.send(user(1), position=3)) == [""]


def test_what_is_committed_and_has_no_space_in_the_store_is_read_all_the_same() -> None:
    xiu = Xiu()
    reading = Reading(1, cast(Any, xiu.store), NoTable(), xiu.core.owed)
    ids = [msg_id(1, 64, first(number)) for number in range(1, 5)]
    xiu.store.blocked = Blocked("no space", full=True)
    xiu.accept(xiu.send(user(1), user(2)))
    assert [found.code for found in reading.fetch(ids)] == ["NOT_YET"] * 4
    xiu.accept(xiu.send(user(3), position=3))
    assert codes(xiu.commit(2)) == [""]  # whether the third stays is not known yet
    assert reading.fetch(ids) == [("", user(1)), ("", user(2)), ("NOT_YET", b""), ("NOT_YET", b"")]
    for _ in range(3):
        xiu.now += 2
        xiu.commit(2)
    assert xiu.store.reopened == 1  # with nothing in it, as nothing was flushed
    assert reading.fetch(ids[:2]) == [("", user(1)), ("", user(2))]
    xiu.store.blocked = None
    xiu.now += 2
    xiu.commit()
    assert xiu.core.owed(first(1)) is None
    assert reading.fetch(ids[:3]) == [("", user(1)), ("", user(2)), ("", user(3))]


def test_a_new_leader_decides_a_long_log_in_slices() -> None:
    xiu = Xiu(lead=False)
    xiu.log.entries += [store(number, user(number - 1), epoch=2) for number in range(1, 1001)]
    xiu.elected(3)
    assert 0 < xiu.core.waiting <= READ_ENTRIES
    assert codes(xiu.send(user(2))) == ["OVERLOADED"]
    with pytest.raises(Overloaded):
        xiu.core.restore_entry(Step.BEGIN)
    xiu.space(False)
    assert codes(xiu.send(user(2))) == ["OVERLOADED"]  # what its log has is not called new, and so not refused for good
    xiu.space(True)
    xiu.commit(300)
    turns = 0
    while xiu.core.next_deadline() < NEVER:
        before = xiu.core.waiting
        assert xiu.step(Tick()) == []
        assert xiu.core.waiting - before <= READ_ENTRIES
        turns += 1
    assert turns >= 2
    xiu.commit()
    assert codes(xiu.accept(xiu.send(user(2))) + xiu.commit()) == [""]


def test_a_store_that_stays_closed_is_opened_again_and_filled_from_the_log() -> None:
    xiu = Xiu()
    xiu.accept(xiu.send(user(1)))
    xiu.commit()
    xiu.store.flush()
    xiu.accept(xiu.send(user(2), position=2))
    xiu.commit()
    xiu.store.blocked = Blocked("no space", full=True)
    xiu.accept(xiu.send(user(3), position=3))
    assert codes(xiu.commit()) == [""]  # it is in the log, synced and replicated
    for _ in range(3):
        xiu.now += 2
        xiu.commit()
    assert xiu.store.reopened == 1
    xiu.store.blocked = None
    xiu.now += 2
    xiu.commit()
    assert [block.records for block in xiu.store.blocks()] == [user(1), user(2), user(3)]
    assert [block.first for block in xiu.store.blocks()] == [first(1), first(2), first(3)]


def test_the_reserve_of_the_disk_refuses_writes_before_it_is_full() -> None:
    xiu = Xiu()
    xiu.space(False)
    assert codes(xiu.send(user(1))) == ["DISK_FULL"]
    xiu.space(True)
    assert codes(xiu.accept(xiu.send(user(1))) + xiu.commit()) == [""]


def test_a_busy_store_is_asked_again_and_nobody_is_refused() -> None:
    xiu = Xiu()
    xiu.accept(xiu.send(user(1)))
    xiu.store.blocked = Blocked("write stall", full=False)
    assert codes(xiu.commit()) == [""]
    xiu.accept(xiu.send(user(2), position=2))
    xiu.store.blocked = None
    xiu.now += 1
    xiu.commit()
    xiu.commit()
    assert [block.first for block in xiu.store.blocks()] == [first(1), first(2)]


def test_the_end_of_an_epochs_sequences_asks_for_another() -> None:
    xiu = Xiu()
    xiu.store.head = Head(applied=xiu.store.head.applied, clock_us=NOW_US, last=first(LAST_COUNTER))
    xiu.deposed()
    xiu.elected(3)
    effects = xiu.accept(xiu.send(user(1)))
    assert only(effects, ev.NeedEpoch) == ev.NeedEpoch()
    assert codes(xiu.commit()) == ["UNAVAILABLE"]


def test_old_records_are_trimmed_by_an_entry() -> None:
    xiu = Xiu()
    xiu.accept(xiu.send(user(1)))
    xiu.commit()
    later = NOW_US + 120_000_000
    xiu.accept(xiu.send(user(2, at_ms=later // 1000), position=2, level=Level.ACCEPTED, at_us=later))
    xiu.commit()
    effects = xiu.trim(later)
    assert only(effects, Propose).payloads[0][0] == XiuKind.TRIM
    xiu.accept(effects)
    xiu.commit()
    assert [block.first for block in xiu.store.blocks()] == [first(1), first(2)]  # the last mark that is old enough stays
    xiu.accept(xiu.send(user(3, at_ms=later // 1000), position=3, level=Level.ACCEPTED, at_us=later + 61_000_000))
    xiu.commit()
    xiu.accept(xiu.trim(later + 61_000_000))
    xiu.commit()
    assert [block.first for block in xiu.store.blocks()] == [first(2), first(3)]
    assert xiu.table.there == {first(2): True, first(3): True}
    assert xiu.trim(later)[0]


def test_a_follower_trims_nothing_by_itself() -> None:
    xiu = Xiu(lead=False)
    assert xiu.trim(NOW_US) == []
    with pytest.raises(NotLeader):
        xiu.core.trim_before(first(9))


def test_an_operator_trims_at_a_mark_at_or_below_his_position() -> None:
    xiu = Xiu()
    for number in range(4):  # a minute apart: a mark each
        at_us = NOW_US + number * 61_000_000
        xiu.accept(xiu.send(user(number + 1, at_ms=at_us // 1000), position=number + 1, at_us=at_us))
        xiu.commit()
    assert xiu.core.trim_before(first(1)) is None, "nothing lies before it"

    def trim(position: int) -> None:
        entry = xiu.core.trim_before(position)
        assert entry is not None
        xiu.log.entries.append(Entry(xiu.epoch, len(xiu.log.entries) + 1, entry[0], NOW_US, entry[1]))
        xiu.commit()

    trim(first(3))
    assert [block.first for block in xiu.store.blocks()] == [first(3), first(4)]
    assert xiu.core.trim_before(first(3)) is None, "once"
    trim(first(400))
    assert [block.first for block in xiu.store.blocks()] == [first(4)], "what lies behind the last mark stays"


def test_samples_name_what_operators_watch() -> None:
    core = Xiu().core
    samples = {**totals(core.counters), **core.samples()}
    assert {"stored_total", "refused_total", "stored_bytes", "waiting_entries", "epoch", "committed"} <= samples.keys()


def test_what_is_committed_is_taken_whole_or_given_again() -> None:
    xiu = Xiu(lead=False)
    leader = Xiu()
    for number in range(1, 6):
        leader.accept(leader.send(user(number)))
    leader.commit()
    xiu.log.entries = list(leader.log.entries)
    xiu.store.blocked = Blocked("write stall", full=False)
    xiu.commit(3)
    assert not xiu.taken
    assert xiu.core.why_not == "the store is busy"
    xiu.store.blocked = None
    xiu.now += 1
    xiu.commit(2)
    assert xiu.taken
    assert xiu.store.head.applied.counter == 2, "no more than what was given, though more is decided"
    xiu.commit()
    assert xiu.taken
    assert xiu.store.rows == leader.store.rows
    assert xiu.core.waiting == 0


def test_it_waits_for_no_time() -> None:
    assert Xiu().core.next_deadline() == NEVER
