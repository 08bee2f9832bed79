"""What `pixiu bench` makes of a ledger."""

from __future__ import annotations

from pixiu.ids import RoomID
from tools.load.bench import US, result_of
from tools.load.ledger import Ledger

KEY, OTHER = RoomID(1 << 60), RoomID(1 + (1 << 60))


def sent(count: int) -> tuple[Ledger, list[bytes]]:
    ledger = Ledger()
    for key in (KEY, OTHER):
        ledger.joining(key, US, 0)
        ledger.joined(key, US)
    return ledger, [ledger.send(number, KEY, US, b"text", 100) for number in range(count)]


def test_each_message_is_delivered_failed_or_lost_and_counted_once() -> None:
    ledger, payloads = sent(4)
    for payload in (payloads[0], payloads[0], payloads[3]):
        ledger.deliver(KEY, US, payload, 150)
    ledger.refused(1, "OVERLOADED")
    ledger.expire(200)
    found = result_of("room", ledger, 2.0)
    assert (found.sent, found.delivered, found.failed, found.lost, found.repeated) == (4, 2, 1, 1, 1)
    assert (found.failures, found.highest_us, found.per_s, found.whole) == ({"OVERLOADED": 1}, 50, 1.0, False)


def test_another_content_or_another_key_is_a_failure() -> None:
    ledger, payloads = sent(2)
    ledger.deliver(KEY, US, payloads[0][:-1], 150)
    ledger.deliver(OTHER, US, payloads[1], 150)
    assert result_of("room", ledger, 1.0).failures == {"damaged": 1, "alien": 1}


def test_everything_that_arrives_once_is_whole_and_so_is_nothing() -> None:
    ledger, payloads = sent(2)
    for payload in payloads:
        ledger.deliver(KEY, US, payload, 150)
    assert result_of("room", ledger, 1.0).whole
    nothing = result_of("room", Ledger(), 0.0)
    assert (nothing.sent, nothing.per_s, nothing.p99_us, nothing.whole) == (0, 0.0, 0, True)
