"""What became of the messages of a load."""

from __future__ import annotations

from tools.load.tally import Tally


def test_each_message_is_delivered_failed_or_lost_and_counted_once() -> None:
    tally = Tally("room", 1_000)
    numbers = [tally.send(at) for at in (100, 110, 120, 130)]
    assert numbers == [0, 1, 2, 3]
    tally.delivered(0, 150)
    tally.delivered(0, 160)
    tally.failed(1, "OVERLOADED", 170)
    tally.failed(0, "OVERLOADED", 170)
    tally.expire(1_119)
    assert tally.open == 2
    tally.expire(1_125)
    assert tally.open == 1
    tally.delivered(3, 630)
    found = tally.result()
    assert (found.sent, found.delivered, found.failed, found.lost, found.repeated) == (4, 2, 1, 1, 1)
    assert found.failures == {"OVERLOADED": 1}
    assert (found.p50_us, found.highest_us) == (50, 500)
    assert found.seconds == 530 / 1e6
    assert found.per_s == 2 / (530 / 1e6)
    assert not found.whole


def test_one_that_comes_after_it_was_given_up_was_late_and_not_lost() -> None:
    tally = Tally("mail", 1_000)
    tally.send(0)
    tally.expire(5_000)
    assert tally.open == 0
    tally.delivered(0, 6_000)
    found = tally.result()
    assert (found.delivered, found.lost, found.highest_us) == (1, 0, 6_000)
    assert found.whole


def test_what_failed_and_comes_all_the_same_is_a_repeat_of_nothing() -> None:
    tally = Tally("signal", 1_000)
    tally.send(0)
    tally.failed(0, "UNDELIVERED", 10)
    tally.delivered(0, 20)
    found = tally.result()
    assert (found.delivered, found.failed, found.repeated) == (0, 1, 0)


def test_order_is_that_of_each_key_and_what_is_older_than_the_load_counts_as_repeated() -> None:
    tally = Tally("mail", keys=2, first=10)
    for at in range(4):
        tally.send(at)
    assert [tally.delivered(number, 100) for number in (12, 11, 10, 10, 3)] == [98, 99, 100, None, None]
    assert (tally.sent, tally.disordered, tally.repeats) == (4, 1, {10: 1, 3: 1})
    assert tally.missing == {13: 3}


def test_a_load_of_nothing_has_a_result() -> None:
    found = Tally("room", 1_000).result()
    assert (found.sent, found.per_s, found.p99_us, found.whole) == (0, 0.0, 0, True)
