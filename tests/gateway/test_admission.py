"""Who may connect: rates, bounds, and that half-open connections never keep out an honest one."""

from __future__ import annotations

import random

from gateway.clients.admission import Admission


def admission(rate: float = 0, burst: float = 10, pending: int = 100, connections: int = 1000) -> Admission[int]:
    return Admission(rate_per_s=rate, burst=burst, max_pending=pending, max_connections=connections, now=0.0)


def test_connections_beyond_the_rate_are_refused_and_told_when_to_come() -> None:
    gate = admission(rate=5)
    for number in range(30):
        assert gate.arrived(number) is None
    waits = [gate.connect(number, 0.0) for number in range(30)]
    assert waits[:10] == [0.0] * 10
    assert all(wait_s > 0 for wait_s in waits[10:])
    assert (gate.connected, gate.pending, gate.refused) == (10, 20, 20)
    assert gate.connect(29, 0.25) == 0.0


def test_a_full_gateway_refuses_until_somebody_goes() -> None:
    gate = admission(connections=2)
    for number in range(3):
        gate.arrived(number)
    assert [gate.connect(number, 0.0) > 0 for number in range(3)] == [False, False, True]
    gate.gone(0)
    assert gate.connect(2, 0.0) == 0.0


def test_one_address_takes_a_share_of_the_places_and_never_all() -> None:
    """S10: one machine took all of max_connections, and nobody else came in."""
    gate: Admission[int] = Admission(rate_per_s=0, burst=1, max_pending=100, max_connections=8, now=0.0, address_percent=75)
    for number in range(8):
        gate.arrived(number, "10.0.0.1")
    assert [gate.connect(number, 0.0) > 0 for number in range(8)] == [False] * 6 + [True] * 2
    gate.arrived(8, "10.0.0.2")
    assert gate.connect(8, 0.0) == 0.0
    gate.gone(0)
    assert gate.connect(6, 0.0) == 0.0
    for number in range(20, 22):
        gate.arrived(number, "")
    assert (gate.connect(20, 0.0), gate.connect(21, 0.0)) == (0.0, 1.0), "the last place, and none"
    for number in (*range(9), 20, 21):
        gate.gone(number)
    assert (gate.connected, gate.pending, gate._connected_of, gate._pending_of) == (0, 0, {}, {})


def test_who_has_the_most_pending_connections_loses_one_and_nobody_else() -> None:
    gate = admission(pending=10)
    assert [gate.arrived(number, f"10.0.0.{number}") for number in range(5)] == [None] * 5
    gone = [gate.arrived(number, "10.0.1.1") for number in range(10, 40)]
    assert gone == [None] * 5 + list(range(10, 35))
    # All of them one each: the oldest.
    gate = admission(pending=3)
    assert [gate.arrived(number, f"10.0.0.{number}") for number in range(5)] == [None, None, None, 0, 1]


def test_too_many_pending_connections_cost_the_oldest() -> None:
    gate = admission(pending=3)
    assert [gate.arrived(number) for number in range(5)] == [None, None, None, 0, 1]
    assert gate.pending == 3
    assert gate.evicted == 2


def test_a_connected_client_is_never_the_one_that_goes() -> None:
    gate = admission(pending=1)
    gate.arrived(0)
    gate.connect(0, 0.0)
    assert [gate.arrived(number) for number in range(1, 4)] == [None, 1, 2]
    assert gate.connected == 1


def test_pending_connections_take_no_place_of_connected_ones() -> None:
    gate = admission(pending=50, connections=10)
    for number in range(50):
        gate.arrived(number)
    assert [gate.connect(number, 0.0) for number in range(10)] == [0.0] * 10


def test_an_honest_client_gets_in_during_a_storm_of_half_open_connections() -> None:
    """It says who it is while at most some of the others that came after it are accepted."""
    chance = random.Random(7)
    gate = admission(pending=64)
    number = 0
    for _ in range(500):
        honest = number
        gone = {gate.arrived(honest)}
        for number in range(honest + 1, honest + 1 + chance.randrange(64)):
            gone.add(gate.arrived(number))
        number += 1
        assert honest not in gone
        assert gate.connect(honest, 0.0) == 0.0
        gate.gone(honest)
    assert gate.pending <= 64


def test_nothing_is_kept_of_who_is_gone() -> None:
    gate = admission()
    for number in range(100):
        gate.arrived(number)
        if number % 2:
            gate.connect(number, 0.0)
    for number in range(100):
        gate.gone(number)
    assert (gate.pending, gate.connected) == (0, 0)
