"""The core between writers, the replicated log and the store."""

from __future__ import annotations

from typing import TypeVar

import pytest

from cluster.replication.events import Accepted, Committed, Deposed, Leading, Persisted, Propose, Rejected, Rejection
from cluster.replication.model import Entry, EntryKind
from pixiu.ids import msg_id
from pixiu.wire.record import Flag, Kind, encode
from tests.support.effects import only
from tests.xiu.parts import NOW_MS, NOW_US, MemoryLog, MemoryStore, MemoryTable, mail
from xiu.batch import check
from xiu.block import MAX_BLOCK_BYTES
from xiu.core import Core, Settings
from xiu.events import (
    Answer,
    Effect,
    EndStream,
    LayoutChanged,
    Level,
    NeedEpoch,
    Result,
    SpaceChanged,
    StoreReceived,
    TrimDue,
)
from xiu.state import LAST_COUNTER, Blocked, Head
from xiu.state import Kind as EntryKindOfXiu

T = TypeVar("T")
LIMIT = 1 << 20


class Xiu:
    """A core that leads epoch 3; `accept`, `persist` and `commit` say what replication says."""

    def __init__(self, lead: bool = True) -> None:
        self.log, self.store, self.table = MemoryLog(), MemoryStore(), MemoryTable()
        self.core = Core(Settings(partition=1, max_record_bytes=LIMIT, keep_us=60_000_000), self.log, self.store, self.table)
        self.now = 10.0
        self.core.step(LayoutChanged(9, 4, ("a:1", "b:1", "c:1")), self.now)
        self.epoch = 3
        if lead:
            self.lead(3)

    def lead(self, epoch: int) -> list[Effect]:
        self.epoch = epoch
        self.log.entries.append(Entry(epoch, len(self.log.entries) + 1, int(EntryKind.NOOP), 0, b""))
        return self.step(Leading(epoch)) + self.commit()

    def step(self, event: object) -> list[Effect]:
        return self.core.step(event, self.now)  # type: ignore[arg-type]

    def send(
        self, *records: bytes, position: int = 1, level: Level = Level.REPLICATED, epoch: int = 0, count: int = 0
    ) -> list[Effect]:
        return self.step(StoreReceived(7, position, level, epoch, b"".join(records), count or len(records), NOW_US))

    def accept(self, effects: list[Effect]) -> list[Effect]:
        proposal = only(Propose, effects)
        begin = len(self.log.entries) + 1
        for number, (kind, payload) in enumerate(proposal.payloads):
            self.log.entries.append(Entry(self.epoch, begin + number, kind, proposal.at_us, payload))
        return self.step(Accepted(proposal.token, self.epoch, begin, len(self.log.entries)))

    def persist(self) -> list[Effect]:
        return self.step(Persisted(len(self.log.entries)))

    def commit(self) -> list[Effect]:
        return self.step(Committed(len(self.log.entries), 2))


def user(number: int, body: bytes = b"body", **fields: int) -> bytes:
    return mail(number, body, key=5, **fields)


def codes(effects: list[Effect]) -> list[str]:
    return [result.code for result in only(Answer, effects).results]


def first(counter: int, epoch: int = 3) -> int:
    return epoch << 32 | counter


def test_each_level_is_answered_when_it_is_reached_with_the_triple() -> None:
    xiu = Xiu()
    accepted = only(Answer, xiu.accept(xiu.send(user(1), user(2), level=Level.ACCEPTED)))
    assert accepted.results == [Result(1, 2, "", sequence=first(1))]
    assert (accepted.layout_version, accepted.epoch, accepted.committed) == (9, 3, 1)
    assert xiu.accept(xiu.send(user(3), position=3, level=Level.PERSISTED)) == []
    assert xiu.accept(xiu.send(user(4), position=4)) == []
    assert only(Answer, xiu.persist()).results == [Result(3, 1, "", sequence=first(3))]
    replicated = only(Answer, xiu.commit())
    assert replicated.results == [Result(4, 1, "", sequence=first(4))]
    assert (replicated.committed, replicated.copies) == (4, 2)


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
    answers = [effect for effect in effects if isinstance(effect, Answer)]
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
    answer = only(Answer, xiu.accept(xiu.send(*batch)) + xiu.commit())
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
    assert [refusal.code for refusal in checked.refusals] == ["RECORD_TOO_LARGE"]
    assert checked.runs == []


@pytest.mark.parametrize("count", [0, 1, 3])
def test_what_is_no_batch_ends_the_stream(count: int) -> None:
    xiu = Xiu()
    data = user(1) + user(2)[:-1] if count == 3 else user(1) + user(2)
    effects = xiu.step(StoreReceived(7, 1, Level.ACCEPTED, 0, data, count, NOW_US))
    assert only(EndStream, effects).stream == 7
    assert xiu.core.counters.batches_malformed == 1


def test_a_large_batch_becomes_several_entries_and_one_answer() -> None:
    xiu = Xiu()
    records = [user(number, b"x" * 60_000) for number in range(10)]
    effects = xiu.send(*records)
    payloads = only(Propose, effects).payloads
    assert len(payloads) == 3
    assert all(len(payload) <= MAX_BLOCK_BYTES + 4 for _, payload in payloads)
    answer = only(Answer, xiu.accept(effects) + xiu.commit())
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
    follower.step(Committed(len(follower.log.entries), 0))
    assert follower.store.rows == leader.store.rows


def test_a_stream_of_an_earlier_epoch_must_send_again() -> None:
    xiu = Xiu()
    assert codes(xiu.send(user(1), epoch=2)) == ["STALE_STREAM"]
    assert isinstance(xiu.send(user(1), epoch=3)[0], Propose)


def test_who_waits_is_told_when_the_leader_goes_and_may_send_again() -> None:
    xiu = Xiu()
    xiu.accept(xiu.send(user(1), mail(9, key=6)))
    effects = xiu.step(Deposed(3))
    results = only(Answer, effects).results
    assert [(result.position, result.code) for result in results] == [(2, "WRONG_PARTITION"), (1, "NOT_LEADER")]
    assert xiu.table.there == {}
    del xiu.log.entries[1:]  # another leader cut it off
    xiu.lead(5)
    assert xiu.commit() == []
    answer = only(Answer, xiu.accept(xiu.send(user(1))) + xiu.commit())
    assert answer.results == [Result(1, 1, "", sequence=first(1, 5))]
    assert xiu.core.counters.cut_off == 1


def test_what_a_former_leader_left_in_the_log_is_decided_first() -> None:
    old = Xiu()
    old.accept(old.send(user(1)))
    new = Xiu(lead=False)
    new.log.entries = list(old.log.entries)
    new.step(Committed(1, 0))
    new.lead(4)
    answer = only(Answer, new.accept(new.send(user(1), user(2))) + new.commit())
    assert [(result.msg_id, result.sequence) for result in answer.results] == [(msg_id(1, 64, first(1)), 0), (0, first(1, 4))]


@pytest.mark.parametrize("reason", list(Rejection))
def test_every_rejection_has_a_code_and_a_text(reason: Rejection) -> None:
    xiu = Xiu()
    proposal = only(Propose, xiu.send(user(1), mail(2, key=6)))
    answer = only(Answer, xiu.step(Rejected(proposal.token, reason)))
    wrong, rejected = answer.results
    assert wrong.code == "WRONG_PARTITION"
    assert rejected.code
    assert rejected.text
    assert xiu.log.entries[1:] == []


def test_a_table_full_of_unpersisted_records_pushes_back() -> None:
    xiu = Xiu()
    xiu.table.room = False
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
    xiu.step(SpaceChanged(False))
    assert codes(xiu.send(user(1))) == ["DISK_FULL"]
    xiu.step(SpaceChanged(True))
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
    xiu.step(Deposed(3))
    xiu.step(Leading(3))
    effects = xiu.accept(xiu.send(user(1)))
    assert only(NeedEpoch, effects) == NeedEpoch()
    assert codes(xiu.commit()) == ["UNAVAILABLE"]


def test_old_records_are_trimmed_by_an_entry() -> None:
    xiu = Xiu()
    xiu.accept(xiu.send(user(1)))
    xiu.commit()
    later = NOW_US + 120_000_000
    xiu.accept(xiu.step(StoreReceived(7, 2, Level.ACCEPTED, 0, user(2, at_ms=later // 1000), 1, later)))
    xiu.commit()
    effects = xiu.step(TrimDue(later))
    assert only(Propose, effects).payloads[0][0] == EntryKindOfXiu.TRIM
    xiu.accept(effects)
    xiu.commit()
    assert [block.first for block in xiu.store.blocks()] == [first(1), first(2)]  # the last mark that is old enough stays
    xiu.accept(xiu.step(StoreReceived(7, 3, Level.ACCEPTED, 0, user(3, at_ms=later // 1000), 1, later + 61_000_000)))
    xiu.commit()
    xiu.accept(xiu.step(TrimDue(later + 61_000_000)))
    xiu.commit()
    assert [block.first for block in xiu.store.blocks()] == [first(2), first(3)]
    assert xiu.table.there == {first(2): True, first(3): True}
    assert xiu.step(TrimDue(later))[0]


def test_a_follower_trims_nothing_by_itself() -> None:
    xiu = Xiu(lead=False)
    assert xiu.step(TrimDue(NOW_US)) == []


def test_samples_name_what_operators_watch() -> None:
    samples = Xiu().core.samples()
    assert {"stored_total", "refused_total", "stored_bytes", "waiting_entries", "epoch", "committed"} <= samples.keys()
