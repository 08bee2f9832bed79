"""The core of receiving mail: once to the application, in order, acknowledged in ranges, bounded."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any

import pytest

from pixiu.client.inbox.core import (
    ACKNOWLEDGE_AFTER_S,
    ACKNOWLEDGE_AT,
    MAX_DAMAGED,
    MAX_HELD,
    REMEMBERED,
    GapReason,
    Held,
    MailGap,
    MailIntake,
)
from pixiu.ids import snowflake
from pixiu.rpc.deadline_timer import NEVER
from pixiu.wire.envelope import GAP, REDELIVERED, encode
from pixiu.wire.record import Flag, Kind
from pixiu.wire.record import encode as record_of
from tests.support.for_each import for_each

UIN = 7
SENT_MS = 1_700_000_000_000
NOW_MS = SENT_MS + 1_000


def mail(seq: int, msg: int = 0, lane: int = 1, session: int = 1, flags: int = 0, uin: int = UIN, **fields: Any) -> bytes:
    record = record_of(Kind.MAIL, UIN, b"%d" % seq, snowflake(SENT_MS, 3, seq % 1024), type=lane << 6, **fields)
    return encode(msg or 1000 * lane + 5 * seq, seq, uin, session, 1, lane, flags, record)


def gap(seq: int, msg: int = 0, lane: int = 1) -> bytes:
    return encode(msg, seq, UIN, 1, 1, lane, GAP, b"")


def opened(*streams: Hashable) -> MailIntake:
    intake = MailIntake(UIN)
    for stream in streams or ("a",):
        intake.opened(stream)
    return intake


def take(intake: MailIntake, now_ms: int = NOW_MS) -> list[Held]:
    found: list[Held] = []
    while (held := intake.take(now_ms)) is not None:
        found.append(held)
    return found


def payloads(found: list[Held]) -> list[bytes]:
    return [held.message.payload for held in found if held.message is not None]


def acknowledged(intake: MailIntake) -> dict[Hashable, list[tuple[int, int, int]]]:
    return dict(intake.acknowledgements())


def test_mail_comes_in_order_the_first_lane_first() -> None:
    intake = opened()
    assert intake.arrived("a", mail(1) + mail(2) + mail(1, lane=0) + mail(3), 4, 0.0)
    found = take(intake)
    assert [(held.lane, held.seq, held.msg_id) for held in found] == [(0, 1, 5), (1, 1, 1005), (1, 2, 1010), (1, 3, 1015)]
    assert [held.redelivered for held in found] == [False] * 4
    assert intake.counters.received == intake.held == 4


def test_only_the_lanes_asked_for_are_taken() -> None:
    intake = opened()
    intake.arrived("a", mail(1, lane=3) + mail(1, lane=2), 2, 0.0)
    assert not intake.waiting(range(2))
    assert intake.take(NOW_MS, range(2)) is None
    assert intake.waiting(range(3, 4))
    held = intake.take(NOW_MS, range(3, 4))
    assert held is not None
    assert held.lane == 3


def test_what_comes_again_unacknowledged_is_with_the_application_already() -> None:
    intake = opened("a", "b")
    intake.arrived("a", mail(1) + mail(2), 2, 0.0)
    (first,) = take(intake)[:1]
    intake.closed("a")
    intake.arrived("b", mail(1, flags=REDELIVERED, session=2) + mail(2, flags=REDELIVERED, session=2) + mail(3, session=2), 3, 0.0)
    assert payloads(take(intake)) == [b"3"]
    assert intake.counters.repeated == 2
    assert intake.acknowledge(first, 0.0)
    assert acknowledged(intake) == {"b": [(1, 1, 1)]}, "by the stream that it came by last"


def test_what_comes_again_acknowledged_is_acknowledged_again_and_not_shown() -> None:
    intake = opened("a", "b")
    intake.arrived("a", mail(1), 1, 0.0)
    (held,) = take(intake)
    intake.closed("a")
    assert intake.acknowledge(held, 0.0)
    assert acknowledged(intake) == {}, "its stream is gone"
    intake.arrived("b", mail(1, flags=REDELIVERED, session=2), 1, 0.0)
    assert take(intake) == []
    assert acknowledged(intake) == {"b": [(1, 1, 1)]}


def test_the_mark_of_a_repeat_shows_when_this_process_did_not_have_it() -> None:
    intake = opened()
    intake.arrived("a", mail(1, flags=REDELIVERED) + mail(2), 2, 0.0)
    assert [held.redelivered for held in take(intake)] == [True, False]


def test_one_mail_at_two_places_of_an_inbox_is_one_for_the_application() -> None:
    intake = opened()
    intake.arrived("a", mail(1, msg=50) + mail(4, msg=50), 2, 0.0)
    (held,) = take(intake)
    intake.acknowledge(held, 0.0)
    assert acknowledged(intake) == {"a": [(1, 1, 1), (1, 4, 4)]}
    intake.arrived("a", mail(9, msg=50), 1, 0.0)
    assert take(intake) == []
    assert acknowledged(intake) == {"a": [(1, 9, 9)]}


def test_acknowledging_twice_changes_nothing() -> None:
    intake = opened()
    intake.arrived("a", mail(1), 1, 0.0)
    (held,) = take(intake)
    assert intake.acknowledge(held, 0.0)
    assert acknowledged(intake) == {"a": [(1, 1, 1)]}
    assert not intake.acknowledge(held, 0.0)
    assert acknowledged(intake) == {}
    assert intake.counters.acknowledged == 1


def test_acknowledgements_leave_as_ranges_after_a_moment_or_when_there_are_many() -> None:
    intake = opened()
    intake.arrived("a", b"".join(mail(seq) for seq in range(1, 61)), 60, 0.0)
    found = take(intake)
    assert intake.next_deadline() == NEVER
    for place in (4, 2, 0, 3, 9):
        intake.acknowledge(found[place], 5.0)
    intake.acknowledge(found[10], 5.01)
    assert intake.next_deadline() == 5.0 + ACKNOWLEDGE_AFTER_S
    assert acknowledged(intake) == {"a": [(1, 1, 1), (1, 3, 5), (1, 10, 11)]}
    assert intake.next_deadline() == NEVER
    for held in found[20 : 20 + ACKNOWLEDGE_AT]:
        assert intake.next_deadline() in (NEVER, 6.0 + ACKNOWLEDGE_AFTER_S)
        intake.acknowledge(held, 6.0)
    assert intake.next_deadline() == 0.0, "at once"


def test_a_stream_that_ends_takes_its_acknowledgements_with_it() -> None:
    intake = opened("a", "b")
    intake.arrived("a", mail(1), 1, 0.0)
    intake.arrived("b", mail(1, lane=0), 1, 0.0)
    for held in take(intake):
        intake.acknowledge(held, 0.0)
    intake.closed("a")
    assert intake.next_deadline() == ACKNOWLEDGE_AFTER_S
    assert acknowledged(intake) == {"b": [(0, 1, 1)]}
    intake.closed("b")
    intake.closed("never opened")
    assert intake.next_deadline() == NEVER


def test_gaps_are_told_once_in_their_place_and_acknowledged_like_mail() -> None:
    intake = opened()
    intake.arrived("a", mail(1) + gap(5) + mail(6) + gap(7, msg=99), 4, 0.0)
    intake.arrived("a", gap(5), 1, 0.0)
    found = take(intake)
    assert [held.gap for held in found] == [
        None, MailGap(1, 5, GapReason.DROPPED), None, MailGap(1, 7, GapReason.GONE, 99),
    ]  # fmt: skip
    assert (intake.counters.gaps, intake.counters.received) == (2, 2)
    for held in found:
        intake.acknowledge(held, 0.0)
    assert acknowledged(intake) == {"a": [(1, 1, 1), (1, 5, 7)]}
    assert intake.counters.acknowledged == 2
    intake.arrived("a", gap(5) + gap(7, msg=99), 2, 0.0)
    assert take(intake) == []
    assert acknowledged(intake) == {"a": [(1, 5, 5), (1, 7, 7)]}


def test_a_gap_of_what_is_here_already_is_none() -> None:
    intake = opened()
    intake.arrived("a", mail(1) + mail(2) + gap(2), 3, 0.0)
    found = take(intake)
    assert payloads(found) == [b"1", b"2"]
    assert acknowledged(intake) == {"a": [(1, 2, 2)]}
    intake.arrived("a", gap(1, msg=found[0].msg_id), 1, 0.0)
    assert take(intake) == [], "the application has it, although the cluster has not"
    intake.arrived("a", gap(3), 1, 0.0)
    assert [held.gap for held in take(intake)] == [MailGap(1, 3, GapReason.DROPPED)]


def test_mail_whose_lifetime_is_over_when_it_is_taken_is_a_gap() -> None:
    intake = opened()
    late = record_of(Kind.MAIL, UIN, b"derived", 5, type=64, lifetime_min=1, flags=Flag.DERIVED_ID)
    intake.arrived("a", mail(1, lifetime_min=1) + mail(2) + mail(3, lifetime_min=2) + encode(77, 4, UIN, 1, 1, 1, 0, late), 4, 0.0)
    found = take(intake, SENT_MS + 60_000)
    assert [held.gap.reason if held.gap else held.seq for held in found] == [GapReason.EXPIRED, 2, 3, 4]
    assert found[0].gap == MailGap(1, 1, GapReason.EXPIRED, 1005)
    assert (intake.counters.expired, intake.counters.gaps) == (1, 1)
    assert opened().take(SENT_MS) is None
    other = opened()
    other.arrived("a", mail(1, lifetime_min=1), 1, 0.0)
    assert payloads(take(other, SENT_MS + 59_999)) == [b"1"]


def test_damaged_mail_is_asked_for_again_and_told_as_a_gap_after_some_times() -> None:
    intake = opened("a", "b", "c", "d", "e")
    whole = mail(2)
    bad = whole[:-1] + bytes([whole[-1] ^ 1])
    for stream in ("a", "b", "c")[:MAX_DAMAGED]:
        assert not intake.arrived(stream, mail(1) + bad + mail(3), 3, 0.0)
        intake.closed(stream)
    assert payloads(take(intake)) == [b"1"], "nothing overtakes it"
    assert intake.arrived("d", mail(1) + bad + mail(3), 3, 0.0)
    found = take(intake)
    assert [held.gap for held in found] == [MailGap(1, 2, GapReason.DAMAGED, 1010), None]
    assert intake.counters.damaged == MAX_DAMAGED + 1
    assert intake.arrived("e", mail(4), 1, 0.0)


@pytest.mark.parametrize(("data", "count"), [(b"rubbish", 1), (mail(1), 2), (mail(1)[:-3], 1), (b"", 4_000_000_000), (mail(1), 0)])
def test_a_malformed_batch_is_counted_and_the_stream_is_to_be_left(data: bytes, count: int) -> None:
    intake = opened()
    assert intake.arrived("a", data, count, 0.0) is (not data)
    assert take(intake) == []
    assert intake.counters.damaged == (1 if data else 0)


def test_mail_of_others_and_of_lanes_that_are_none_is_left_out() -> None:
    intake = opened()
    assert intake.arrived("a", mail(1, uin=8) + mail(1, lane=1, msg=4)[:30] + b"\x04" + mail(1)[31:] + mail(2), 3, 0.0)
    assert payloads(take(intake)) == [b"2"]
    assert intake.counters.foreign == 2


def test_what_is_held_is_bounded_and_order_holds_when_there_is_room_again() -> None:
    intake = opened("a", "b")
    batch = b"".join(mail(seq) for seq in range(1, MAX_HELD + 11))
    intake.arrived("a", batch, MAX_HELD + 10, 0.0)
    found = take(intake)
    assert (len(found), intake.counters.left) == (MAX_HELD, 10)
    assert intake.counters.received == MAX_HELD
    intake.acknowledge(found[0], 0.0)
    intake.arrived("a", mail(MAX_HELD + 11), 1, 0.0)
    assert take(intake) == [], "it would overtake those that were left"
    intake.arrived("a", mail(MAX_HELD + 1) + mail(MAX_HELD + 2), 2, 0.0)
    assert [held.seq for held in take(intake)] == [MAX_HELD + 1]
    intake.acknowledge(found[1], 0.0)
    intake.arrived("b", mail(MAX_HELD + 2, session=2) + mail(MAX_HELD + 3, session=2), 2, 0.0)
    assert [held.seq for held in take(intake)] == [MAX_HELD + 2], "another session begins at the cursor"
    intake.arrived("a", mail(1, lane=0), 1, 0.0)
    assert [held.lane for held in take(intake)] == [0], "other lanes have space"


def test_the_memory_of_acknowledged_mail_is_bounded() -> None:
    intake = opened()
    for seq in range(1, REMEMBERED + 3):
        intake.arrived("a", mail(seq, msg=seq), 1, 0.0)
        for held in take(intake):
            intake.acknowledge(held, 0.0)
        intake.acknowledgements()
    intake.arrived("a", mail(3, msg=3) + mail(REMEMBERED + 2, msg=REMEMBERED + 2), 2, 0.0)
    assert take(intake) == []
    intake.arrived("a", mail(1, msg=1), 1, 0.0)
    assert payloads(take(intake)) == [b"1"], "long forgotten"


def test_what_is_given_back_comes_next_and_what_is_acknowledged_does_not() -> None:
    intake = opened()
    intake.arrived("a", mail(1) + mail(2), 2, 0.0)
    first = intake.take(NOW_MS)
    assert first is not None
    intake.give_back(first)
    found = take(intake)
    assert payloads(found) == [b"1", b"2"]
    intake.acknowledge(first, 0.0)
    intake.give_back(first)
    assert take(intake) == []


@for_each("seed", range(30))
def test_random_faults_lose_and_repeat_nothing(seed: int) -> None:
    """Streams and acknowledgements are lost, the relay keeps its window: each MsgID once, in order, all acknowledged."""
    rng = random.Random(seed)
    total = 400
    stored: set[int] = set()
    got: list[int] = []
    hand: list[Held] = []
    intake = opened(0)
    stream = session = 0
    written = 0
    for _ in range(200_000):
        up_to = next((seq for seq in range(1, total + 1) if seq not in stored), total + 1) - 1
        if up_to == total:
            break
        if rng.random() < 0.02:
            intake.closed(stream)
            stream += rng.random() < 0.7
            session += 1
            intake.opened(stream)
            written = up_to
        seqs = [seq for seq in range(written + 1, min(total, up_to + 64) + 1) if seq not in stored][: rng.randint(1, 20)]
        if seqs:
            written = seqs[-1]
            assert intake.arrived(stream, b"".join(mail(seq, session=session) for seq in seqs), len(seqs), 0.0)
        for _ in range(rng.randint(0, 8)):
            held = intake.take(NOW_MS)
            if held is not None:
                got.append(held.seq)
                hand.append(held)
        rng.shuffle(hand)
        for _ in range(min(len(hand), rng.randint(0, 8))):
            intake.acknowledge(hand.pop(), 0.0)
        for to, ranges in intake.acknowledgements():
            if to == stream and rng.random() < 0.8:
                stored.update(seq for _, first, last in ranges for seq in range(first, last + 1))
            elif rng.random() < 0.5:
                written = up_to
    assert got == list(range(1, total + 1))
    assert stored == set(got)
    assert intake.held == 0
