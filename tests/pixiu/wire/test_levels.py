"""The order of levels, and their numbers on the wire."""

from __future__ import annotations

import itertools

from pixiu.wire.levels import Level
from pixiu.wire.v1 import level_pb2, mail_pb2, pi_pb2, xiu_pb2

WEAKEST_FIRST = (Level.ACCEPTED, Level.PERSISTED, Level.REPLICATED, Level.STORED)


def test_each_level_is_as_safe_as_those_below_it_and_not_as_those_above() -> None:
    assert set(WEAKEST_FIRST) == set(Level)
    for (weak, low), (strong, high) in itertools.product(enumerate(WEAKEST_FIRST), repeat=2):
        assert high.at_least(low) is (strong >= weak), (high, low)


def test_the_numbers_are_those_of_the_wire_which_has_no_others() -> None:
    assert sorted(level_pb2.Level.values()) == sorted(level.value for level in Level)
    assert all(Level.from_wire(level.value) is level for level in Level if level is not Level.STORED)


def test_only_topics_know_the_level_stored() -> None:
    assert Level.from_wire(level_pb2.STORED) is None


def test_a_request_without_a_level_asks_for_the_safest() -> None:
    for request in (mail_pb2.MailRequest(), xiu_pb2.StoreRequest(), pi_pb2.PiRequest()):
        assert Level.from_wire(request.level) is Level.REPLICATED


def test_a_number_of_no_level_is_none() -> None:
    assert Level.from_wire(7) is None
    assert Level.from_wire(-1) is None
