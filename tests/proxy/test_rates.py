"""What publishers and rooms may send: refused with a retry-after, and nobody else is held back."""

from __future__ import annotations

from pixiu.ids import EndpointID
from pixiu.wire.record import Kind, encode
from proxy import events as ev
from proxy.core import Core
from proxy.publishers.rates import Rates
from tests.proxy.driver import GATEWAY, forward, publish, sends

A = EndpointID(1001)


def room(key: int, number: int, body: bytes = b"payload") -> bytes:
    return encode(Kind.ROOM, key, body, number)


def core_with(rates: Rates) -> Core:
    core = Core(max_record_bytes=1 << 20, rates=rates)
    core.step(ev.BrokersChanged(1, (ev.Replica(A, 0),)), 0.0)
    core.step(ev.PublisherOpened(1), 0.0)
    core.step(ev.PublisherOpened(2), 0.0)
    return core


def taken(effects: list[ev.Effect]) -> list[bytes]:
    return [record for send in sends(effects) for record in send.records]


def test_a_publisher_over_its_rate_is_told_when_to_try_again() -> None:
    core = core_with(Rates(publisher_messages_per_s=10))
    burst = [room(1, number) for number in range(15)]
    assert taken(publish(core, burst, 1, 0.0)) == burst
    effects = publish(core, [room(1, 16)], 16, 0.0)
    assert taken(effects) == []
    # The reply waits for the positions before it: what is settled out of order is told in order.
    assert not any(isinstance(effect, ev.Reply) for effect in effects)
    assert core.counters.records_over_rate == 1
    assert taken(publish(core, [room(1, 17)], 17, 0.51)) == [room(1, 17)]


def test_the_refusal_names_positions_and_time() -> None:
    core = core_with(Rates(publisher_bytes_per_s=1000))
    core.step(ev.BrokersChanged(1, ()), 0.0)  # so that nothing before has to be waited for
    publish(core, [room(1, 1, b"x" * 2960)], 1, 0.0)
    (reply,) = publish(core, [room(1, 2), room(1, 3)], 2, 0.5)
    assert isinstance(reply, ev.Reply)
    (failure,) = reply.failures
    assert (failure.first, failure.last, failure.code, failure.retry_after_ms) == (2, 3, "OVERLOADED", 1500)
    assert "try again in 1500 ms" in failure.text


def test_other_publishers_and_gateways_are_not_held_back() -> None:
    core = core_with(Rates(publisher_messages_per_s=10))
    publish(core, [room(1, n) for n in range(100)], 1, 0.0)
    assert taken(publish(core, [room(1, 200)], 1, 0.0, stream=2)) == [room(1, 200)]
    for number in range(100):
        assert taken(core.step(ev.GatewayPublished(9 + number, GATEWAY, number, room(1, 201), 1), 0.0)) == [room(1, 201)]


def test_a_room_over_its_rate_is_refused_alone() -> None:
    core = core_with(Rates(room_messages_per_s=10))
    publish(core, [room(1, n) for n in range(20)], 1, 0.0)
    effects = publish(core, [room(1, 21), room(2, 22), room(1, 23)], 1, 0.0, stream=2)
    assert taken(effects) == [room(2, 22)]
    assert core.counters.records_over_rate == 2
    assert taken(publish(core, [room(1, 24)], 4, 1.1, stream=2)) == [room(1, 24)]


def test_a_rooms_refusal_names_the_positions() -> None:
    core = core_with(Rates(room_messages_per_s=10))
    publish(core, [room(1, n) for n in range(20)], 1, 0.0)
    (reply,) = publish(core, [room(1, 21), room(1, 23)], 1, 0.0, stream=2)
    assert isinstance(reply, ev.Reply)
    assert [(f.first, f.last, f.code, f.retry_after_ms) for f in reply.failures] == [(1, 2, "OVERLOADED", 1000)]


def test_a_room_is_limited_for_what_gateways_forward_too() -> None:
    core = core_with(Rates(room_bytes_per_s=100))
    data = room(1, 1, b"x" * 500)
    assert taken(forward(core, data)) == [data]
    assert taken(forward(core, data)) == []
    assert core.counters.records_over_rate == 1
    assert taken(core.step(ev.GatewayPublished(9, GATEWAY, 1, data, 1), 0.0)) == []
    assert core.counters.records_over_rate == 2


def test_a_malformed_batch_is_refused_as_such_under_limits_too() -> None:
    core = core_with(Rates(room_messages_per_s=10, publisher_messages_per_s=10))
    for number, data in enumerate((b"\xff" * 100, b"", room(1, 1) + b"x", b"\0" * 39)):
        core.step(ev.BatchPublished(1, data, 3, 1 + 3 * number), number * 10.0)
    assert core.counters.batches_malformed == 4


def test_a_publisher_that_comes_again_has_its_burst_again() -> None:
    core = core_with(Rates(publisher_messages_per_s=1))
    publish(core, [room(1, n) for n in range(50)], 1, 0.0)
    core.step(ev.PublisherClosed(1), 0.0)
    core.step(ev.PublisherOpened(3), 0.0)
    assert taken(publish(core, [room(1, 100)], 1, 0.0, stream=3)) == [room(1, 100)]


def test_a_room_over_its_rate_is_served_again_when_the_limit_is_lifted() -> None:
    core = core_with(Rates(room_messages_per_s=1))
    publish(core, [room(1, n) for n in range(5)], 1, 0.0)
    assert taken(publish(core, [room(1, 5)], 6, 0.01)) == []
    core.step(ev.LimitsChanged(Rates(), 1.0, None), 0.02)
    assert taken(publish(core, [room(1, 6)], 7, 0.03)) == [room(1, 6)]
