"""The judge of what MQTT clients saw, on forged histories: each lie is found, and what is allowed is not."""

from __future__ import annotations

import pytest

from tests.history.mqtt.judge import (
    ACCEPTED,
    AGAIN,
    CLEAN,
    CONNECTED,
    CUT,
    ENDED,
    GOT,
    LOST,
    SENDING,
    STARTING,
    SUBSCRIBED,
    SUBSCRIBING,
    UNSUBSCRIBING,
    WILL,
    Fault,
    Note,
    judge,
    matches,
)

LATE_S = 10.0
PERSISTENT = ("s",)


def came(
    at: float, who: str, connection: int, *filters: str, present: bool = False, clean: bool = True, qos: int = 2
) -> list[Note]:
    """A connection with subscriptions."""
    found = [Note(at, STARTING, who, connection, flag=clean), Note(at, CONNECTED, who, connection, flag=present)]
    for each in filters:
        found += [Note(at, SUBSCRIBING, who, connection, each), Note(at + 0.1, SUBSCRIBED, who, connection, each, qos=qos)]
    return found


def sent(at: float, number: int, topic: str, qos: int = 1, *, retain: bool = False, accepted: bool = True) -> list[Note]:
    """A message of the publisher, and its acknowledgement."""
    found = [Note(at, SENDING, "p", 1, topic, number, qos, retain)]
    return found + [Note(at + 0.5, ACCEPTED, "p", 1, topic, number)] * accepted


def got(at: float, who: str, connection: int, topic: str, number: int, qos: int = 1, *, retain: bool = False) -> Note:
    return Note(at, GOT, who, connection, topic, number, qos, retain)


GOOD = [
    *came(0, "p", 1), *came(0, "a", 2, "t/+", "r/x"), *came(0, "g", 3, "$share/g/t/#"), *came(0, "h", 4, "$share/g/t/#"),
    *came(0, "s", 5, "t/#", clean=False), *came(0, "w", 6), Note(0.2, WILL, "w", 6, "t/w", 90, 1),
    *came(0, "v", 7), Note(0.2, WILL, "v", 7, "t/w", 91, 1),
    *sent(1, 1, "t/1", 2), *sent(2, 2, "t/1", 2), *sent(3, 3, "t/1"), *sent(4, 4, "r/x", retain=True),
    *(got(4.5 + n, "a", 2, "t/1", n, q) for n, q in ((1, 2), (2, 2))), got(5, "a", 2, "t/1", 3), got(5.1, "a", 2, "r/x", 4),
    got(5, "g", 3, "t/1", 1, 2), got(5, "h", 4, "t/1", 2, 2), got(5, "h", 4, "t/1", 3),
    got(5, "s", 5, "t/1", 1, 2), Note(6, ENDED, "s", 5, how=CUT), *sent(7, 5, "t/2"),
    got(8, "a", 2, "t/2", 5), got(8, "g", 3, "t/2", 5),
    Note(9, ENDED, "w", 6, how=LOST), Note(9, ENDED, "v", 7, how=CLEAN), got(10, "a", 2, "t/w", 90), got(10, "g", 3, "t/w", 90),
    *came(20, "s", 8, present=True, clean=False),
    got(21, "s", 8, "t/1", 2, 2), got(21, "s", 8, "t/1", 3), got(21, "s", 8, "t/2", 5), got(21, "s", 8, "t/w", 90),
    *came(30, "b", 9, "r/x"), got(30.2, "b", 9, "r/x", 4, retain=True), *came(60, "z", 10),
]  # fmt: skip


def broken(notes: list[Note], faults: tuple[Fault, ...] = ()) -> set[str]:
    ordered = sorted(notes, key=lambda note: note.at)
    return {text.partition(":")[0] for text in judge(ordered, PERSISTENT, faults, LATE_S, 2.0).violations}


def without(number: int, who: str) -> list[Note]:
    return [note for note in GOOD if not (note.kind == GOT and note.number == number and note.who == who)]


def test_what_is_allowed_is_no_violation() -> None:
    assert broken(GOOD) == set()


REPEATED = [
    *sent(41, 9, "t/1", accepted=False), *came(42, "n", 12, "t/1"), *sent(43, 10, "t/1", accepted=False),
    got(43.5, "n", 12, "t/1", 10), Note(44, AGAIN, "p", 1, "", 9), Note(44, AGAIN, "p", 1, "", 10),
    got(45, "n", 12, "t/1", 9), got(45, "n", 12, "t/1", 10),
]  # fmt: skip
"""A publisher sends two messages again, and a subscriber came after the first one."""


LIES: dict[str, tuple[list[Note], str]] = {
    "a subscriber lacks a message": (without(3, "a"), "lost"),
    "a session lacks one that came before it went": (without(1, "s"), "a session lacks a message"),
    "a session lacks one that came while it was away": (without(5, "s"), "a session lacks a message"),
    "no member of a group got one": (without(5, "g"), "no member of a group got it"),
    "a group's member with QoS 0 was cut before": (
        [*without(5, "g"), *came(5, "k", 12, "$share/g/t/#", qos=0), Note(6.5, ENDED, "k", 12, how=CUT)],
        "no member of a group got it",
    ),
    "one came again": ([*GOOD, got(12, "a", 2, "t/1", 3)], "twice within a connection"),
    "QoS 2 came again in a later connection": ([*GOOD, got(22, "s", 8, "t/1", 1, 2)], "QoS 2 twice within a session"),
    "one overtook": ([*without(1, "a"), got(12, "a", 2, "t/1", 1, 2)], "out of order"),
    "one overtook in a session": ([*without(1, "s"), got(22, "s", 8, "t/1", 1, 2)], "out of order"),
    "one overtook that alone was sent again": ([*GOOD, *REPEATED[:-1]], "out of order"),
    "one overtook and nobody sent it again": ([*GOOD, *(note for note in REPEATED if note.kind != AGAIN)], "out of order"),
    "a number that was never sent": ([*GOOD, got(12, "a", 2, "t/1", 77)], "something that nobody sent"),
    "a message on another topic": ([*GOOD, got(12, "a", 2, "t/3", 5)], "something that nobody sent"),
    "a message without a subscription": ([*GOOD, got(32, "b", 9, "t/2", 5)], "nobody asked for it"),
    "with more than its QoS": ([*without(5, "a"), got(8, "a", 2, "t/2", 5, 2)], "with a higher QoS than it was sent"),
    "an old value is retained": (
        [*GOOD, *sent(22, 6, "r/x", retain=True), got(23, "a", 2, "r/x", 6)], "an old value was retained",
    ),
    "a value was cleared and is retained": ([*GOOD, *sent(22, -6, "r/x", retain=True)], "an old value was retained"),
    "a value is not there": (without(4, "b"), "a retained message is missing"),
    "retained without asking": ([*GOOD, got(50, "b", 9, "r/x", 4, retain=True)], "retained without a subscription"),
    "a will did not come": (without(90, "a"), "a will did not come"),
    "a session lacks a will": (without(90, "s"), "a will did not come"),
    "a will came twice": ([*GOOD, got(12, "a", 2, "t/w", 90)], "twice within a connection"),
    "a will came after a DISCONNECT": ([*GOOD, got(12, "a", 2, "t/w", 91)], "a will of a connection that was ended in order"),
    "a session is gone": (
        [note._replace(flag=False) if note.kind == CONNECTED and note.connection == 8 else note for note in GOOD],
        "a session is gone",
    ),
    "a session where there is none": ([*GOOD, *came(50, "c", 11, present=True)], "a session that must not be there"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_is_found(lie: str) -> None:
    notes, what = LIES[lie]
    assert what in broken(notes)


TRUTHS: dict[str, tuple[list[Note], tuple[Fault, ...]]] = {
    "a subscriber left": ([*without(3, "a"), Note(5.2, ENDED, "a", 2, how=CUT)], ()),
    "a subscriber unsubscribed": ([*without(5, "a"), Note(7, UNSUBSCRIBING, "a", 2, "t/+")], ()),
    "a broker was killed": (without(3, "a"), (Fault("broker", 3.2, 3.2),)),
    "a message was not acknowledged": ([*GOOD, *sent(40, 9, "t/1", accepted=False)], ()),
    "QoS 0 was lost": ([*GOOD, *sent(40, 9, "t/1", 0)], ()),
    "one of QoS 1 was sent again": ([*GOOD, Note(5, AGAIN, "p", 1, "", 3), got(12, "a", 2, "t/1", 3)], ()),
    "one of QoS 1 comes again in a later connection": ([*GOOD, got(5, "s", 5, "t/1", 3)], ()),
    "the last copies of what was sent again are in order": ([*GOOD, *REPEATED], ()),
    "a member of a group with QoS 0 was cut": (
        [*without(5, "g"), *came(5, "k", 12, "$share/g/t/#", qos=0), Note(9, ENDED, "k", 12, how=CUT)], (),
    ),
    "a session was ended by a clean start": ([*without(5, "s"), *came(40, "s", 12)], ()),
    "an old value beside one that was not accepted": ([*GOOD, *sent(22, 6, "r/x", retain=True, accepted=False)], ()),
    "a DISCONNECT behind a message that was not passed on": (
        [*GOOD, Note(8.5, SENDING, "v", 7, "q", 92, 1), got(12, "a", 2, "t/w", 91)], (),
    ),
    "a DISCONNECT that a killed gateway did not read": (
        [*GOOD, got(12, "a", 2, "t/w", 91), got(12, "s", 8, "t/w", 91)][:-1], (Fault("gateway", 9, 9),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("truth", TRUTHS)
def test_each_truth_is_none(truth: str) -> None:
    assert broken(*TRUTHS[truth]) == set()


def test_a_fault_of_another_process_or_at_another_time_excuses_nothing() -> None:
    assert "lost" in broken(without(3, "a"), (Fault("proxy", 3.2, 3.2), Fault("broker", 30, 30)))
    assert "a session lacks a message" in broken(without(5, "s"), (Fault("broker", 7.2, 7.2),))


@pytest.mark.parametrize(
    ("filter_", "topic", "fits"),
    [
        ("a/+", "a/b", True), ("a/+", "a", False), ("a/+", "a/b/c", False), ("a/#", "a", True), ("a/#", "a/b/c", True),
        ("#", "$SYS/x", False),
        ("$share/g/a/+", "a/b", True), ("a", "a/b", False), ("a/b", "a", False),
    ],
)  # fmt: skip
def test_filters_match_as_the_standard_says(filter_: str, topic: str, fits: bool) -> None:
    assert matches(filter_, topic) is fits
