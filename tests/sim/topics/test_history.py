"""The judge of topics' histories, on forged ones: each lie is found, and what is allowed is not."""

from __future__ import annotations

import pytest

from tests.sim.topics.history import (
    Acknowledged,
    Channel,
    Confirmed,
    Done,
    Dropped,
    Ended,
    Event,
    Finished,
    Given,
    Message,
    Opened,
    Resent,
    Sealed,
    Sought,
    Stored,
    Voided,
    judge,
)

ANY, ORDERED = 1, 2
CHANNELS = {ANY: Channel(False), ORDERED: Channel(True)}
A1, A2, B1 = Message(1, 5, 1), Message(1, 5, 2), Message(1, 6, 1)
GOOD: list[Event] = [
    Opened(1), Stored(1, 0, (A1, B1)), Confirmed(A1), Confirmed(B1),
    Given(ANY, 1, 7, (0, 1), (A1, B1)), Given(ORDERED, 1, 8, (0,), (A1,)),
    Given(ANY, 1, 9, (0,), (A1,)), Done(ANY, 1, (0, 1)), Acknowledged(ANY, 1, (0, 1)),
    Done(ORDERED, 1, (0,)), Acknowledged(ORDERED, 1, (0,)), Given(ORDERED, 1, 8, (1,), (B1,)), Done(ORDERED, 1, (1,)),
    Sealed(1), Opened(2, (1,)), Stored(2, 0, (A2,)), Confirmed(A2),
    Given(ANY, 2, 7, (0,), (A2,)), Done(ANY, 2, (0,)), Given(ORDERED, 2, 8, (0,), (A2,)), Done(ORDERED, 2, (0,)),
]  # fmt: skip
"""Every message comes once, one of them twice before its acknowledgement was confirmed."""


def without(*events: Event) -> list[Event]:
    return [event for event in GOOD if event not in events]


def instead(old: Event, *new: Event) -> list[Event]:
    at = GOOD.index(old)
    return [*GOOD[:at], *new, *GOOD[at + 1 :]]


def moved(event: Event, before: Event) -> list[Event]:
    rest = without(event)
    at = rest.index(before)
    return [*rest[:at], event, *rest[at:]]


LIES: dict[str, tuple[list[Event], str]] = {
    "a message was confirmed and is not there": (
        [*GOOD, Confirmed(Message(1, 5, 3))],
        "confirmed and not stored",
    ),
    "it is there later": (moved(Confirmed(A1), Opened(1)), "confirmed and not stored"),
    "a message is there twice": (
        [*GOOD, Stored(2, 1, (A1,)), Given(ANY, 2, 7, (1,), (A1,)), Done(ANY, 2, (1,)), Given(ORDERED, 2, 8, (1,), (A1,)),
         Done(ORDERED, 2, (1,))],
        "a message is stored twice",
    ),
    "a slot's messages changed places": (
        instead(Stored(1, 0, (A1, B1)), Stored(1, 0, (Message(1, 5, 9), B1))), "a slot is out of order",
    ),
    "an offset is missing": (instead(Stored(2, 0, (A2,)), Stored(2, 1, (A2,))), "offsets are not dense"),
    "a sealed part took more": (moved(Sealed(1), Stored(1, 0, (A1, B1))), "stored after the seal"),
    "a child opened early": (moved(Opened(2, (1,)), Sealed(1)), "a child opened before its parent was sealed"),
    "a channel missed one": (without(Given(ANY, 2, 7, (0,), (A2,))), "never given to a channel"),
    "one stays unacknowledged": (without(Done(ANY, 2, (0,))), "never acknowledged"),
    "a member got something else": (
        instead(Given(ANY, 2, 7, (0,), (A2,)), Given(ANY, 2, 7, (0,), (A1,))), "given something else than was stored",
    ),
    "a member got nothing": (
        instead(Given(ANY, 2, 7, (0,), (A2,)), Given(ANY, 2, 7, (0,), (None,))), "given something else than was stored",
    ),
    "it came before its time": (
        instead(Given(ANY, 2, 7, (0,), (A2,)), Given(ANY, 2, 7, (0,), (A2,), early=(0,))), "given before its time",
    ),
    "it came again after it counted": (
        [*GOOD, Given(ANY, 1, 9, (0,), (A1,))], "given again after its acknowledgement was confirmed",
    ),
    "an acknowledgement counted early": (
        moved(Acknowledged(ANY, 1, (0, 1)), Done(ANY, 1, (0, 1))),
        "an acknowledgement counted before it was committed",
    ),
    "a lane is with two members": (
        instead(
            Stored(2, 0, (A2,)), Stored(2, 0, (A2, Message(1, 5, 3))),
            Given(ORDERED, 2, 8, (0,), (A2,)), Given(ORDERED, 2, 9, (1,), (Message(1, 5, 3),)),
            Done(ORDERED, 2, (0, 1)), Given(ANY, 2, 9, (1,), (Message(1, 5, 3),)), Done(ANY, 2, (1,)),
        ),
        "a lane was handed on before it was done",
    ),
    "a part was dropped that a channel still needs": ([*moved(Dropped(2), Done(ANY, 2, (0,)))], "dropped and not done"),
    "a part is called finished early": (moved(Finished(ANY, 1), Sealed(1)), "a part is called finished that is not"),
}  # fmt: skip
EU, US = Message(1, 5, 3), Message(1, 5, 4)
FILTERED = {ANY: Channel(False, "eu")}
FIRST, SECOND = (0, 1, 1), (0, 2, 2)


def test_a_good_history_is_good() -> None:
    assert judge(GOOD, CHANNELS) == []


@pytest.mark.parametrize("name", LIES)
def test_a_forged_history_is_found(name: str) -> None:
    events, what = LIES[name]
    assert what in judge(events, CHANNELS)


def test_a_child_before_its_parent_is_done_breaks_the_order_of_the_slot() -> None:
    late = [event for event in GOOD if event not in (Done(ORDERED, 1, (0,)), Acknowledged(ORDERED, 1, (0,)))]
    assert "a lane was handed on before it was done" in judge(late, CHANNELS)
    other_slot = without(Given(ORDERED, 1, 8, (1,), (B1,)), Done(ORDERED, 1, (1,)))
    assert judge([*other_slot, Given(ORDERED, 1, 8, (1,), (B1,)), Done(ORDERED, 1, (1,))], CHANNELS) == []


def test_a_batch_may_hold_a_lane_in_order_only() -> None:
    more = Message(1, 5, 3)
    begin: list[Event] = [Opened(1), Stored(1, 0, (A1, more))]
    end: list[Event] = [Done(ORDERED, 1, (0, 1))]
    assert judge([*begin, Given(ORDERED, 1, 8, (0, 1), (A1, more)), *end], {ORDERED: Channel(True)}) == []
    assert judge([*begin, Given(ORDERED, 1, 8, (1, 0), (more, A1)), *end], {ORDERED: Channel(True)}) == [
        "a lane was handed on before it was done"
    ]


def test_a_message_is_with_one_member_at_a_time() -> None:
    begin: list[Event] = [Opened(1), Stored(1, 0, (A1,)), Given(ANY, 1, 7, (0,), (A1,), FIRST)]
    again, other = Given(ANY, 1, 8, (0,), (A1,), FIRST), Given(ANY, 1, 8, (0,), (A1,), SECOND)
    end, channels = [Done(ANY, 1, (0,))], {ANY: Channel(False)}
    assert judge([*begin, again, *end], channels) == ["with two members at the same time"]
    for release in ([Done(ANY, 1, (), (0,)), again], [other], [Voided(ANY, 1), again], [Ended(7), again]):
        assert judge([*begin, *release, *end], channels) == []


def test_a_channel_gets_what_it_wants_and_has_the_rest_acknowledged() -> None:
    begin: list[Event] = [Opened(1), Stored(1, 0, (EU, US))]
    given, rest = Given(ANY, 1, 7, (0,), (EU,)), Done(ANY, 1, (1,))
    assert judge([*begin, given, Done(ANY, 1, (0,)), rest], FILTERED) == []
    assert judge([*begin, given, Done(ANY, 1, (0,))], FILTERED) == ["never acknowledged"]
    assert "acknowledged and never given" in judge([*begin, rest, Done(ANY, 1, (0,))], FILTERED)
    assert "given and not wanted" in judge([*begin, Given(ANY, 1, 7, (0, 1), (EU, US)), Done(ANY, 1, (0, 1))], FILTERED)
    tagged = Given(ANY, 1, 7, (0,), (EU,), FIRST, "a")
    assert judge([*begin, tagged, Done(ANY, 1, (0,)), rest], FILTERED) == ["given to a member with another tag"]


def test_a_seek_and_dead_letters_that_are_resent_bring_messages_again() -> None:
    channels = {ORDERED: Channel(True)}
    given, done = Given(ORDERED, 1, 8, (0, 1), (A1, A2)), Done(ORDERED, 1, (0, 1))
    begin: list[Event] = [Opened(1), Stored(1, 0, (A1, A2)), given, done, Acknowledged(ORDERED, 1, (0, 1))]
    back: list[Event] = [*begin, Sought(ORDERED, 1, 0)]
    assert judge([*back, given, done], channels) == []
    assert judge([*back, Given(ORDERED, 1, 8, (1,), (A2,)), given, done], channels) == ["a lane was handed on before it was done"]
    assert judge([*begin[:2], Sought(ORDERED, 1, 2)], channels) == []
    assert sorted(judge(back, channels)) == ["never acknowledged", "never given to a channel"]
    resent: list[Event] = [*begin, Resent(ORDERED, 1, (0,))]
    assert judge([*resent, Given(ORDERED, 1, 8, (0,), (A1,)), Done(ORDERED, 1, (0,))], channels) == []
    assert sorted(judge(resent, channels)) == ["never acknowledged", "never given to a channel"]
