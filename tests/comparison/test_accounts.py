"""What is lost, repeated and out of order is found, however a subscriber's bytes are cut into chunks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comparison.accounts import TRIM_BYTES, Account, Stream

HEAD, TAIL, BODY = b"<head>", b"\r\n", 16


def stream(members: int = 1) -> Stream:
    """A stream of small messages."""
    return Stream(HEAD, TAIL, BODY, members)


def test_numbers_without_a_gap_are_neither_lost_nor_repeated() -> None:
    account = Account()
    assert all(account.take(number) for number in range(5))
    assert (account.received, account.lost(5), account.repeated, account.disordered) == (5, 0, 0, 0)


def test_what_was_sent_last_and_never_came_is_lost() -> None:
    account = Account()
    account.run(3)
    assert account.lost(5) == 2


def test_a_gap_is_lost_until_it_comes_late_which_is_out_of_order() -> None:
    account = Account()
    for number in (0, 3):
        account.take(number)
    assert account.lost(4) == 2
    assert account.take(1)
    assert (account.lost(4), account.disordered, account.repeated, account.received) == (1, 1, 0, 3)


def test_what_came_before_is_a_repeat_and_no_delivery() -> None:
    account = Account()
    account.run(2)
    assert not account.take(1)
    assert (account.received, account.repeated, account.disordered) == (2, 1, 0)


def test_an_account_that_begins_later_does_not_miss_what_was_before() -> None:
    account = Account(100)
    account.take(101)
    assert (account.lost(102), account.missing) == (1, {100})


@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_chunks_of_any_size_give_every_number_once(count: int, chance: random.Random) -> None:
    one = stream(2)
    data = b"".join(one.send(count))
    at, came = 0, list[int]()
    while at < len(data):
        size = chance.randint(1, 60)
        came += one.take(1, data[at : at + size])
        at += size
    assert came == list(range(count))
    assert one.accounts[1].lost(one.sent) == one.accounts[1].repeated == 0
    assert one.accounts[0].lost(one.sent) == count


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 70))
def test_other_bytes_than_those_that_were_sent_are_read_one_by_one(numbers: list[int], size: int) -> None:
    """As an account of the numbers alone would say, wherever chunks end."""
    one, alone = stream(), Account()
    frames = one.send(10)
    data = b"".join(frames[number] for number in numbers)
    came = [number for at in range(0, len(data), size) for number in one.take(0, data[at : at + size])]
    assert came == [number for number in numbers if alone.take(number)]
    found = one.accounts[0]
    assert (found.received, found.repeated, found.disordered, found.missing, found.lost(10)) == (
        alone.received, alone.repeated, alone.disordered, alone.missing, alone.lost(10),
    )  # fmt: skip


def test_what_is_no_message_of_the_topic_is_refused() -> None:
    one = stream(2)
    one.send(2)
    with pytest.raises(ValueError, match="no message of its topic"):
        one.take(0, b"?" * one.frame_bytes)
    with pytest.raises(ValueError, match="not sent yet"):
        one.take(1, stream().send(3)[2])


def test_what_everybody_has_is_forgotten_and_nothing_else() -> None:
    one = stream(2)
    count = TRIM_BYTES // one.frame_bytes + 1
    data = b"".join(one.send(count))
    one.take(0, data)
    one.take(1, data[: 10 * one.frame_bytes + 3])
    assert (one.slowest, one.trim()) == (10, 10)
    assert list(one.take(1, data[10 * one.frame_bytes + 3 :])) == list(range(10, count))
    assert (one.slowest, one.trim()) == (count, 10)  # little is kept for a while


def test_the_warm_up_is_not_counted() -> None:
    one = stream()
    one.send(5)  # nobody gets them in time
    one.begin()
    (account,) = one.accounts
    assert (account.received, account.lost(one.sent)) == (0, 0)
