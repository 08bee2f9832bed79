"""Relays are told of inboxes that have grown: at once, again, and to whom it is in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from cluster.core.contract import END_OF_TURN
from pixiu.placement.partition import rendezvous
from proxy import mail_events as ev
from proxy.notices import mail_notices
from proxy.notices.mail_notices import (
    ANSWER_S,
    GIVEN_UP_S,
    MAX_BATCH,
    MAX_BATCH_BYTES,
    MAX_RECORD_BYTES,
    RETRY_S,
    UNKNOWN_S,
    Notices,
)

A, B = 11, 12
NORMAL = 1 << 54


def grew(*uins: int, seqs: Sequence[int] = (1,), record: bytes = b"r" * 60, msg_id: int = NORMAL) -> ev.InboxesGrew:
    """One mail to these."""
    wanted = list(seqs) * len(uins) if len(seqs) == 1 else list(seqs)
    return ev.InboxesGrew(uins, wanted, [msg_id] * len(uins), record, [len(record)], [0] * len(uins))


class Driven(Notices):
    """The core, and its events as calls."""

    def grown(self, event: ev.InboxesGrew, now: float) -> None:
        """Inboxes grew."""
        assert self.step(event, now) == []

    def owners(self, partitions: int, relays: Mapping[int, Sequence[int]], now: float) -> list[ev.NoticesEffect]:
        """Other relays run."""
        return self.step(ev.OwnersChanged(partitions, relays), now)

    def taken(self, relay: int, number: int, elsewhere: Sequence[int], now: float) -> None:
        """A relay answers."""
        assert self.step(ev.NoticesTaken(relay, number, elsewhere), now) == []

    def broken(self, relay: int, now: float) -> None:
        """A stream ends."""
        assert self.step(ev.RelayLost(relay), now) == []

    def flush(self, now: float) -> list[ev.NoticesEffect]:
        """The turn ends."""
        return self.step(END_OF_TURN, now)


def running(*relays: int, partitions: int = 1) -> Driven:
    """A proxy that knows its relays."""
    notices = Driven()
    notices.owners(partitions, dict.fromkeys(range(partitions), relays), 0.0)
    return notices


def sent(notices: Driven, now: float) -> list[ev.SendNotices]:
    """What is said now."""
    return [effect for effect in notices.flush(now) if isinstance(effect, ev.SendNotices)]


def test_what_one_turn_brings_leaves_as_one_batch_a_relay_to_the_owner_of_each_user() -> None:
    notices = running(A, B)
    notices.grown(grew(*range(1, 20)), 0.0)
    notices.grown(grew(*range(20, 40)), 0.0)
    batches = sent(notices, 0.0)
    assert {batch.relay for batch in batches} == {A, B}
    assert len(batches) == 2
    for batch in batches:
        assert {rendezvous(notice.uin, (A, B)) for notice in batch.notices} == {batch.relay}
    assert sum(len(batch.notices) for batch in batches) == notices.waiting == 39
    assert notices.waiting_bytes == 39 * 60
    for batch in batches:
        notices.taken(batch.relay, batch.number, (), 0.1)
    assert (notices.waiting, notices.waiting_bytes, sent(notices, 100.0)) == (0, 0, [])


def test_what_is_not_answered_is_told_again_after_pauses_and_then_given_up() -> None:
    notices = running(A)
    notices.grown(grew(7), 0.0)
    now = 0.0
    for pause in RETRY_S:
        (batch,) = sent(notices, now)
        assert [notice.uin for notice in batch.notices] == [7]
        notices.broken(A, now)
        assert sent(notices, now + pause - 0.001) == []
        now += pause
        assert notices.next_deadline() <= now
    (batch,) = sent(notices, now)
    notices.broken(A, now)
    assert sent(notices, now + 10) == []
    assert (notices.waiting, notices.waiting_bytes, notices.counters.notices_given_up) == (0, 0, 1)
    assert notices.counters.notices_retried == len(RETRY_S)


def test_what_was_given_up_is_told_to_the_next_owner() -> None:
    notices = running(A)
    for seq in (1, 2):
        notices.grown(grew(7, seqs=[seq]), 0.0)
    now = 0.0
    for pause in (*RETRY_S, 0.0):
        sent(notices, now)
        notices.broken(A, now)
        now += pause
    assert notices.counters.notices_given_up == 2
    notices.owners(1, {0: (A,)}, now)
    assert sent(notices, now + 1) == []
    notices.owners(1, {0: (B,)}, now + 1)
    (batch,) = sent(notices, now + 2)
    assert batch.relay == B
    assert [(notice.uin, notice.seqs, notice.records) for notice in batch.notices] == [(7, [2], [b""])]


def test_what_was_given_up_long_ago_is_not_told() -> None:
    notices = running()
    notices.grown(grew(7), 0.0)
    now = 0.0
    for pause in (*RETRY_S, 0.0):
        assert sent(notices, now) == []
        now += pause
    assert notices.counters.notices_given_up == 1
    notices.owners(1, {0: (B,)}, now + GIVEN_UP_S)
    assert sent(notices, now + GIVEN_UP_S + 1) == []


def test_users_that_are_served_elsewhere_are_told_to_the_owner_of_the_moment() -> None:
    notices = running(A)
    notices.grown(grew(7, 8), 0.0)
    (batch,) = sent(notices, 0.0)
    notices.taken(A, batch.number, [8, 9], 0.0)
    notices.taken(A, batch.number, [7], 0.0)  # it was answered
    notices.owners(1, {0: (B,)}, 0.0)
    (again,) = sent(notices, RETRY_S[0])
    assert (again.relay, [notice.uin for notice in again.notices]) == (B, [8])
    assert again.number != batch.number


def test_a_relay_that_goes_or_hangs_is_left() -> None:
    notices = running(A)
    notices.grown(grew(7), 0.0)
    sent(notices, 0.0)
    assert notices.next_deadline() == ANSWER_S
    assert notices.flush(ANSWER_S - 0.001) == []
    assert notices.flush(ANSWER_S) == [ev.LeaveRelay(A)]
    (batch,) = sent(notices, ANSWER_S + RETRY_S[0])
    assert notices.owners(1, {0: (B,)}, 10.0) == [ev.LeaveRelay(A)]
    (again,) = sent(notices, 10.0 + RETRY_S[1])
    assert (batch.relay, again.relay) == (A, B)


def test_mail_without_a_number_is_told_a_moment_later_and_without_its_record() -> None:
    notices = running(A)
    notices.grown(grew(7, seqs=()), 0.0)
    assert sent(notices, 0.0) == []
    (batch,) = sent(notices, UNKNOWN_S)
    assert [(notice.seqs, notice.records) for notice in batch.notices] == [([0], [b""])]


def test_large_records_and_large_batches_are_told_without() -> None:
    notices = running(A)
    notices.grown(grew(7, record=b"r" * (MAX_RECORD_BYTES + 1)), 0.0)
    (batch,) = sent(notices, 0.0)
    assert [notice.records for notice in batch.notices] == [[b""]]
    notices.taken(A, batch.number, (), 0.0)
    notices.grown(grew(*range(1, MAX_BATCH + 2), record=b"r" * MAX_RECORD_BYTES), 0.0)
    first, second = sent(notices, 0.0)
    assert (len(first.notices), len(second.notices)) == (MAX_BATCH, 1)
    assert sum(notice.size for notice in first.notices) == MAX_BATCH_BYTES
    assert notices.waiting_bytes == MAX_BATCH_BYTES + MAX_RECORD_BYTES
    notices.taken(A, first.number, (), 0.0)
    notices.taken(A, second.number, (), 0.0)
    assert (notices.waiting, notices.waiting_bytes) == (0, 0)


def test_what_comes_to_a_lane_in_a_turn_is_one_notice() -> None:
    notices = running(A)
    for seq in (1, 2, 4):
        notices.grown(grew(7, 8, seqs=[seq, seq + 10]), 0.0)
    notices.grown(grew(7, seqs=[9], msg_id=5), 0.0)
    (batch,) = sent(notices, 0.0)
    assert [(notice.uin, notice.lane, notice.seqs, len(notice.records)) for notice in batch.notices] == [
        (7, 1, [1, 2, 4], 3),
        (8, 1, [11, 12, 14], 3),
        (7, 0, [9], 1),
    ]
    assert (notices.waiting, notices.waiting_bytes, notices.counters.notices_sent) == (7, 7 * 60, 7)
    notices.grown(grew(7, seqs=[5]), 0.0)
    assert [notice.seqs for batch in sent(notices, 0.0) for notice in batch.notices] == [[5]]
    notices.broken(A, 0.0)
    assert (notices.waiting, notices.waiting_bytes, notices.counters.notices_retried) == (8, 8 * 60, 8)
    assert [notice.seqs for batch in sent(notices, RETRY_S[0]) for notice in batch.notices] == [[1, 2, 4], [11, 12, 14], [9], [5]]


def test_a_notice_goes_on_in_the_next_batch_when_one_is_full() -> None:
    notices = running(A)
    for seq in range(1, MAX_BATCH + 3):
        notices.grown(grew(7, seqs=[seq], record=b"r"), 0.0)
    notices.grown(grew(8, record=b"r"), 0.0)
    batches = sent(notices, 0.0)
    told = [[(notice.uin, notice.seqs) for notice in batch.notices] for batch in batches]
    assert told == [[(7, list(range(1, MAX_BATCH + 1)))], [(7, [MAX_BATCH + 1, MAX_BATCH + 2]), (8, [1])]]
    assert notices.waiting == notices.waiting_bytes == MAX_BATCH + 3
    for batch in batches:
        notices.taken(A, batch.number, (), 0.0)
    assert (notices.waiting, notices.waiting_bytes) == (0, 0)


@pytest.mark.slow
def test_what_is_beyond_the_bound_is_counted() -> None:
    notices = running(A)
    uins = range(1, mail_notices.MAX_NOTICES + 3)
    notices.grown(grew(*uins, record=b"r" * MAX_RECORD_BYTES), 0.0)
    assert (notices.waiting, notices.counters.notices_overflowed) == (mail_notices.MAX_NOTICES, 2)
    assert notices.waiting_bytes <= mail_notices.MAX_BYTES


def test_a_cluster_without_relays_tells_nobody() -> None:
    notices = Driven()
    notices.grown(grew(7), 0.0)
    assert (notices.flush(0.0), notices.waiting) == ([], 0)
