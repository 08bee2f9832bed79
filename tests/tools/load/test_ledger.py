"""The ledger: who is owed what, and what each delivery is."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pixiu.ids import UIN, RoomID
from tests.support.effort import runs
from tools.load.histogram import Histogram
from tools.load.ledger import EARLY_US, NOT_YET, Judgement, Ledger
from tools.load.payload import encode_payload

ROOM, OTHER = RoomID(10), RoomID(11)
A, B, C = UIN(1), UIN(2), UIN(3)


def member(ledger: Ledger, uin: UIN, room: RoomID = ROOM, now_us: int = 0) -> None:
    ledger.joining(room, uin, now_us)
    ledger.joined(room, uin)


def room_of_two() -> Ledger:
    ledger = Ledger()
    member(ledger, A)
    member(ledger, B)
    return ledger


def deliver(ledger: Ledger, number: int, uin: UIN, sent_us: int, now_us: int, room: RoomID = ROOM, text: bytes = b"t") -> Judgement:
    return ledger.deliver(room, uin, encode_payload(number, sent_us, text), now_us)[0]


def test_a_message_is_owed_to_the_members_at_its_sending_and_completes_with_the_last() -> None:
    ledger = room_of_two()
    assert ledger.send(0, ROOM, A, b"t", 100) == encode_payload(0, 100, b"t")
    assert ledger.deliver(ROOM, A, encode_payload(0, 100, b"t"), 150) == (Judgement.DELIVERED, False)
    assert (ledger.owed(ROOM, A), ledger.owed(ROOM, B), ledger.open_messages) == (0, 1, 1)
    assert ledger.deliver(ROOM, B, encode_payload(0, 100, b"t"), 160) == (Judgement.DELIVERED, True)
    assert (ledger.expected, ledger.delivered, ledger.lost, ledger.open_messages) == (2, 2, 0, 0)
    assert list(ledger.missing()) == []


def test_a_second_delivery_is_repeated_before_and_after_completion() -> None:
    ledger = room_of_two()
    ledger.send(0, ROOM, A, b"t", 100)
    deliver(ledger, 0, A, 100, 110)
    assert deliver(ledger, 0, A, 100, 111) is Judgement.REPEATED
    deliver(ledger, 0, B, 100, 112)
    assert deliver(ledger, 0, B, 100, 113) is Judgement.REPEATED
    assert ledger.delivered == 2


def test_a_later_message_of_the_same_sender_first_is_out_of_order_but_not_lost() -> None:
    ledger = room_of_two()
    ledger.send(0, ROOM, A, b"t", 100)
    ledger.send(1, ROOM, A, b"t", 101)
    ledger.send(2, ROOM, B, b"t", 102)
    assert deliver(ledger, 2, B, 102, 200) is Judgement.DELIVERED
    assert deliver(ledger, 1, B, 101, 201) is Judgement.DELIVERED, "another sender's order is its own"
    assert deliver(ledger, 0, B, 100, 202) is Judgement.OUT_OF_ORDER
    for number, sent_us in ((0, 100), (1, 101), (2, 102)):
        assert deliver(ledger, number, A, sent_us, 210) is Judgement.DELIVERED
    assert ledger.lost == 0


def test_a_delivery_to_a_stranger_or_into_another_room_is_alien() -> None:
    ledger = room_of_two()
    member(ledger, A, OTHER)
    ledger.send(0, ROOM, A, b"t", 100)
    assert deliver(ledger, 0, C, 100, 110) is Judgement.ALIEN
    assert deliver(ledger, 0, A, 100, 110, room=OTHER) is Judgement.ALIEN
    assert deliver(ledger, 0, A, 100, 110, room=RoomID(99)) is Judgement.ALIEN


def test_after_a_leave_nothing_is_owed_and_what_comes_is_alien() -> None:
    ledger = room_of_two()
    ledger.leaving(ROOM, B)
    ledger.send(0, ROOM, A, b"t", 100)
    assert ledger.expected == 1
    assert deliver(ledger, 0, B, 100, 110) is Judgement.ALIEN
    (example,) = ledger.examples
    assert "this user had left" in example


def test_a_message_on_its_way_at_a_join_is_neither_owed_nor_alien_but_only_once() -> None:
    ledger = room_of_two()
    ledger.send(0, ROOM, A, b"t", 100)
    ledger.joining(ROOM, C, 200)
    assert deliver(ledger, 0, C, 100, 300) is Judgement.EARLY
    assert deliver(ledger, 0, C, 100, 301) is Judgement.REPEATED
    ledger.joined(ROOM, C)
    assert (ledger.expected, ledger.delivered) == (2, 0)


def test_a_message_sent_long_before_a_join_is_alien_to_the_joiner() -> None:
    ledger = room_of_two()
    ledger.send(0, ROOM, A, b"t", 100)
    member(ledger, C, now_us=100 + EARLY_US + 1)
    assert deliver(ledger, 0, C, 100, 100 + EARLY_US + 2) is Judgement.ALIEN


def test_changed_content_is_damaged_and_stays_owed() -> None:
    ledger = room_of_two()
    ledger.send(0, ROOM, A, b"t", 100)
    assert deliver(ledger, 0, B, 100, 110, text=b"u") is Judgement.DAMAGED
    assert deliver(ledger, 0, B, 101, 110) is Judgement.DAMAGED, "another stamp"
    assert deliver(ledger, 7, B, 100, 110) is Judgement.DAMAGED, "a number that was never sent"
    assert ledger.deliver(ROOM, B, b"short", 110)[0] is Judgement.DAMAGED
    assert ledger.owed(ROOM, B) == 1


def test_what_never_came_is_named_with_its_acknowledgement() -> None:
    ledger = room_of_two()
    ledger.send(0, ROOM, A, b"t", 100)
    ledger.send(1, ROOM, A, b"t", 101)
    ledger.send(2, ROOM, B, b"t", 102)
    ledger.acknowledged(0, 150)
    ledger.refused(2, "DROPPED")
    deliver(ledger, 0, A, 100, 120)
    found = {(missing.number, missing.uin): missing for missing in ledger.missing()}
    assert set(found) == {(0, B), (1, A), (1, B), (2, A), (2, B)}
    assert found[0, B].acknowledged_us == 150
    assert not found[0, B].whole
    assert found[1, A].whole
    assert found[1, A].acknowledged_us == NOT_YET
    assert found[2, A].refused
    assert found[2, A].sender == B
    assert (ledger.lost, ledger.confirmed, ledger.unacknowledged, ledger.refusals) == (5, 1, 1, {"DROPPED": 1})


def test_a_refused_message_is_waited_for_no_longer_and_may_still_come() -> None:
    ledger = room_of_two()
    ledger.send(0, ROOM, A, b"t", 100)
    ledger.refused(0, "DROPPED")
    assert (ledger.owed(ROOM, B), ledger.open_messages, ledger.open_deliveries, ledger.lost) == (0, 0, 0, 2)
    assert deliver(ledger, 0, B, 100, 110) is Judgement.DELIVERED
    assert [(missing.uin, missing.refused) for missing in ledger.missing()] == [(A, True)]


def test_messages_of_another_load_are_nobodys_fault_and_redelivered_ones_are_told_from_repeated_ones() -> None:
    ledger, other = Ledger(b"this"), Ledger(b"that")
    for each in (ledger, other):
        member(each, A)
    payload, foreign = (each.send(0, ROOM, B, b"t", 100) for each in (ledger, other))
    outcomes = [ledger.deliver(ROOM, A, each, 110)[0] for each in (foreign, b"short", payload, payload)]
    assert outcomes == [Judgement.FOREIGN, Judgement.FOREIGN, Judgement.DELIVERED, Judgement.REPEATED]
    assert ledger.deliver(ROOM, A, payload, 110, again=True)[0] is Judgement.AGAIN


def test_expired_messages_are_waited_for_no_longer_but_still_count_when_they_come() -> None:
    ledger = room_of_two()
    ledger.send(0, ROOM, A, b"t", 100)
    ledger.send(1, ROOM, A, b"t", 500)
    assert ledger.expire(400) == 1
    assert (ledger.open_messages, ledger.owed(ROOM, B)) == (1, 1)
    assert deliver(ledger, 0, B, 100, 900) is Judgement.DELIVERED
    assert deliver(ledger, 0, B, 100, 901) is Judgement.REPEATED
    assert {(missing.number, missing.uin) for missing in ledger.missing()} == {(0, A), (1, A), (1, B)}


def test_a_message_to_nobody_is_complete_at_once() -> None:
    ledger = Ledger()
    ledger.send(0, ROOM, A, b"t", 1)
    assert (ledger.expected, ledger.open_messages, ledger.lost) == (0, 0, 0)


def test_answers_count_once() -> None:
    ledger = room_of_two()
    ledger.send(0, ROOM, A, b"t", 100)
    ledger.acknowledged(0, 110)
    ledger.acknowledged(0, 120)
    ledger.refused(0, "DROPPED")
    assert (ledger.unacknowledged, dict(ledger.refusals)) == (0, {})


@given(st.integers(0, 1 << 32))
@settings(max_examples=runs("PIXIU_EXAMPLES", local=25, ci=60), deadline=None)
def test_any_schedule_counts_as_a_plain_model_does(seed: int) -> None:
    # The model: sets of (message, user) pairs.
    chance, ledger = random.Random(seed), Ledger()
    members: set[UIN] = set()
    owed: set[tuple[int, UIN]] = set()
    got: set[tuple[int, UIN]] = set()
    repeated = number = 0
    for now_us in range(1, 300):
        uin = UIN(chance.randrange(6))
        what = chance.random()
        if what < 0.1 and uin not in members:
            member(ledger, uin, now_us=now_us)
            members.add(uin)
        elif what < 0.15 and uin in members:
            ledger.leaving(ROOM, uin)
            members.discard(uin)
        elif what < 0.45:
            ledger.send(number, ROOM, uin, b"t", number)
            owed |= {(number, present) for present in members}
            number += 1
        elif what < 0.5:
            ledger.expire(chance.randrange(number + 1))
        elif owed:
            pair = chance.choice(sorted(owed))
            outcome = deliver(ledger, pair[0], pair[1], pair[0], now_us)
            if pair in got:
                repeated += 1
                assert outcome is Judgement.REPEATED
            else:
                got.add(pair)
                assert outcome in (Judgement.DELIVERED, Judgement.OUT_OF_ORDER)
    assert {(missing.number, missing.uin) for missing in ledger.missing()} == owed - got
    assert (ledger.expected, ledger.delivered, ledger.outcomes[Judgement.REPEATED]) == (len(owed), len(got), repeated)


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=200), st.sampled_from([1.0, 50.0, 99.0, 100.0]))
def test_percentiles_are_right_to_a_thirty_second(values: list[int], percent: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    rank = max(-(-len(values) * percent // 100), 1)
    exact = sorted(values)[int(rank) - 1]
    assert exact <= histogram.percentile(percent) <= exact + exact / 32 + 1
