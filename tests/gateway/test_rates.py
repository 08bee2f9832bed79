"""What MQTT clients may publish: QoS 0 is dropped and counted, QoS 1 passes and the client waits."""

from __future__ import annotations

import pytest

from gateway.clients.rates import MAX_HOLD_S, PublishRates, Rates


def test_without_limits_everything_passes() -> None:
    rates = PublishRates(Rates())
    assert not rates.any
    assert all(rates.take("a", 1, 10**9, 0.0) for _ in range(100))
    assert rates.spend("a", 1, 10**9, 0.0) == 0.0
    assert (rates.dropped, rates.held) == (0, 0)


def test_a_client_over_its_rate_loses_qos_0_and_others_do_not() -> None:
    rates = PublishRates(Rates(client_messages_per_s=10))
    assert [rates.take("a", 1, 5, 0.0) for _ in range(12)] == [True] * 10 + [False] * 2
    assert rates.take("b", 1, 5, 0.0)
    assert rates.take("a", 1, 5, 0.11)
    assert rates.dropped == 2


def test_qos_1_passes_and_tells_how_long_to_wait() -> None:
    rates = PublishRates(Rates(client_messages_per_s=10))
    waits = [rates.spend("a", 1, 5, 0.0) for _ in range(15)]
    assert waits[:10] == [0.0] * 10
    assert waits[10:] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert rates.held == 5
    assert not rates.take("a", 1, 5, 0.4)
    assert rates.take("a", 1, 5, 0.6)


def test_a_wait_has_a_bound() -> None:
    rates = PublishRates(Rates(client_bytes_per_s=10))
    assert rates.spend("a", 1, 10**9, 0.0) == MAX_HOLD_S


def test_a_room_is_limited_over_all_clients() -> None:
    rates = PublishRates(Rates(room_bytes_per_s=100))
    assert rates.take("a", 1, 150, 0.0)
    assert not rates.take("b", 1, 1, 0.0)
    assert rates.take("b", 2, 1, 0.0)
    assert rates.take("b", 1, 1, 0.6)


def test_a_refusal_by_the_room_costs_the_client_nothing() -> None:
    rates = PublishRates(Rates(client_messages_per_s=2, room_messages_per_s=1))
    assert rates.take("a", 1, 1, 0.0)
    assert not any(rates.take("a", 1, 1, 0.0) for _ in range(10))
    assert rates.take("a", 2, 1, 0.0)


def test_coming_again_brings_no_new_burst() -> None:
    rates = PublishRates(Rates(client_messages_per_s=1))
    assert rates.take("a", 1, 1, 0.0)
    assert not rates.take("a", 1, 1, 0.0)
    assert rates.take("another", 1, 1, 0.0)
    assert not rates.take("a", 1, 1, 0.0)
