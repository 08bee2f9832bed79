"""The phases of a migration: which side is named to whom, and what a step asks for."""

from __future__ import annotations

import pytest

from nsqdoor.migration.phases import (
    READ,
    SIDES,
    WRITE,
    Found,
    Lookup,
    Phase,
    Side,
    decode,
    encode,
    left_of,
    lookup_of,
    merged,
    phase_of,
    refusal,
)
from pixiu.errors import InvalidArgument, MalformedData


def test_each_phase_names_the_sides_of_the_page() -> None:
    named = {access: ["".join(side.name[0] for side in SIDES[phase, access]) for phase in Phase] for access in (READ, WRITE)}
    assert named == {READ: ["O", "ON", "ON", "N"], WRITE: ["O", "O", "N", "N"]}
    assert list(Side) == [0, 1]


def test_answers_are_merged_by_address() -> None:
    first, second = {"broadcast_address": "a", "tcp_port": 4150}, {"broadcast_address": "b", "tcp_port": 4150}
    found = merged([Lookup(["x", "y"], [first]), Lookup(["y", "z"], [dict(first), second])])
    assert (found.channels, found.producers) == (["x", "y", "z"], [first, second])


@pytest.mark.parametrize(
    ("before", "after", "found", "why"),
    [
        (0, 1, Found(["a"]), ""),
        (0, 2, Found(), "go to phase 1 first"),
        (1, 2, Found(["a"]), "no such topic"),
        (1, 2, Found(["a", "b"], ["a"]), "lacks the channels b"),
        (1, 2, Found(["a"], ["a", "c"]), ""),
        (2, 3, Found(["a"], ["a"], 7), "holds 7 messages"),
        (2, 3, Found(["a"], ["a"], None), "does not say"),
        (2, 3, Found(["a"], ["a"], 0, ["an nsqd is away"]), "an nsqd is away"),
        (2, 3, Found(["a"], ["a"], 0), ""),
        (3, 0, Found(old_left=None, problems=["away"]), ""),
        (2, 2, Found(), ""),
    ],
)
def test_a_step_forth_has_conditions(before: int, after: int, found: Found, why: str) -> None:
    said = refusal(Phase(before), Phase(after), found)
    assert (why in said) if why else said == ""


def test_what_an_nsqd_holds_is_everything_that_is_not_finished() -> None:
    channel = {"depth": 2, "in_flight_count": 3, "deferred_count": 4}
    topics = [{"topic_name": "t", "depth": 1, "channels": [channel, channel]}, {"topic_name": "u", "depth": 50}]
    assert left_of({"topics": topics}, "t") == left_of({"data": {"topics": topics}}, "t") == 19
    wrongs: tuple[object, ...] = (None, [], {}, {"topics": 1}, {"topics": [{"topic_name": "t", "depth": "1"}]})
    for wrong in wrongs:
        with pytest.raises(MalformedData):
            left_of(wrong, "t")


def test_answers_of_old_and_new_versions_are_read_and_others_refused() -> None:
    producer = {"broadcast_address": "a", "tcp_port": 1}
    said = {"channels": ["c", 1], "producers": [producer, {"tcp_port": 1}, 7, {"broadcast_address": "a", "tcp_port": "x"}]}
    assert lookup_of(said) == lookup_of({"data": said}) == Lookup(["c"], [producer])
    for wrong in (None, "x", {"channels": "c"}, {"producers": {"a": 1}}):
        with pytest.raises(MalformedData):
            lookup_of(wrong)


def test_a_state_is_read_as_it_was_written() -> None:
    assert decode(encode(Phase.WRITE_NEW, "me", 5)) is Phase.WRITE_NEW
    for wrong in (b"", b"[]", b'{"phase": 9}', b'{"phase": "x"}'):
        with pytest.raises(MalformedData):
            decode(wrong)
    with pytest.raises(InvalidArgument, match="0 to 3"):
        phase_of(4)
