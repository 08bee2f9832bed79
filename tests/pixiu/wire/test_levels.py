"""One level of safety in the whole tree, and the three enums of the wire that carry it."""

from __future__ import annotations

import itertools

from pixiu.wire.levels import Level
from pixiu.wire.v1 import mail_pb2, pi_pb2, xiu_pb2

WEAKEST_FIRST = (Level.ACCEPTED, Level.PERSISTED, Level.REPLICATED)
ON_THE_WIRE = {
    Level.REPLICATED: (mail_pb2.MAIL_REPLICATED, xiu_pb2.REPLICATED, pi_pb2.PI_LEVEL_REPLICATED),
    Level.PERSISTED: (mail_pb2.MAIL_PERSISTED, xiu_pb2.PERSISTED, pi_pb2.PI_LEVEL_PERSISTED),
    Level.ACCEPTED: (mail_pb2.MAIL_ACCEPTED, xiu_pb2.ACCEPTED, pi_pb2.PI_LEVEL_ACCEPTED),
}


def test_each_level_is_as_safe_as_those_below_it_and_not_as_those_above() -> None:
    assert set(WEAKEST_FIRST) == set(Level)
    for (weak, low), (strong, high) in itertools.product(enumerate(WEAKEST_FIRST), repeat=2):
        assert high.at_least(low) is (strong >= weak), (high, low)


def test_the_numbers_are_those_of_all_three_enums_of_the_wire_which_have_no_others() -> None:
    for level, numbers in ON_THE_WIRE.items():
        assert {int(number) for number in numbers} == {level.value}
        assert all(Level.from_wire(number) is level for number in numbers)
    for enum in (mail_pb2.MailLevel, xiu_pb2.StoreLevel, pi_pb2.PiLevel):
        assert sorted(enum.values()) == sorted(level.value for level in Level)


def test_the_strongest_and_the_weakest_are_the_ends_of_the_wires_numbers() -> None:
    numbers = sorted(int(number) for number in xiu_pb2.StoreLevel.values())
    strongest, weakest = Level.from_wire(numbers[0]), Level.from_wire(numbers[-1])
    assert strongest is not None
    assert weakest is not None
    assert all(strongest.at_least(level) and level.at_least(weakest) for level in Level)


def test_a_request_without_a_level_asks_for_the_safest() -> None:
    for request in (mail_pb2.MailRequest(), xiu_pb2.StoreRequest(), pi_pb2.PiRequest()):
        assert Level.from_wire(request.level) is Level.REPLICATED


def test_a_number_of_no_level_is_none() -> None:
    assert Level.from_wire(7) is None
    assert Level.from_wire(-1) is None
