"""The judge of what clients of topics saw, on forged histories: each lie is found, and what is allowed is not."""

from __future__ import annotations

import pytest

from tests.history.topics import ACKNOWLEDGED, CONFIRMED, GIVEN, REPORTED, VOID, Note, Stored, judge, parse

PARENTS = {2: (1,), 3: (1,)}
STORED = [Stored(1, 0, 7, 1, 0), Stored(1, 1, 7, 2, 1), Stored(1, 2, 7, 3, 0), Stored(2, 0, 7, 5, 0), Stored(3, 0, 7, 4, 1)]
"""A writer's five messages with two keys, in a part and its two children."""


def note(at: int, kind: str, number: int, who: str = "m", channel: str = "o") -> Note:
    (place,) = [each for each in STORED if each.number == number]
    return Note(at, kind, "" if kind == CONFIRMED else who, "" if kind == CONFIRMED else channel, *place[:4])


GOOD = [
    *(note(number, CONFIRMED, number) for number in range(1, 6)),
    note(10, GIVEN, 1), note(11, GIVEN, 3), note(12, GIVEN, 2, "n"), note(13, REPORTED, 1), note(14, REPORTED, 2, "n"),
    note(15, ACKNOWLEDGED, 1), note(16, GIVEN, 2), note(17, REPORTED, 2), note(18, ACKNOWLEDGED, 2), note(19, VOID, 2, "n"),
    note(20, REPORTED, 3), note(21, ACKNOWLEDGED, 3), note(22, GIVEN, 5), note(23, GIVEN, 4, "n"),
    note(24, REPORTED, 5), note(25, ACKNOWLEDGED, 5), note(26, REPORTED, 4, "n"), note(27, ACKNOWLEDGED, 4, "n"),
]  # fmt: skip


def broken(notes: list[Note], stored: list[Stored] = STORED, late_ns: int = 0) -> set[str]:
    found = judge(notes, stored, PARENTS, {"o": True}, late_ns).violations
    return {text.partition(":")[0] for text in found}


def test_what_is_allowed_is_no_violation() -> None:
    assert broken(GOOD) == set()
    assert broken(list(reversed(GOOD))) == set()


def test_lines_are_read_as_they_were_written() -> None:
    text = b"".join(each.line() for each in GOOD).decode()
    assert parse(text) == GOOD
    assert parse(text[:-3]) == GOOD[:-1]


LIES: dict[str, tuple[list[Note], list[Stored], str]] = {
    "a confirmed message is not there": (GOOD, STORED[:-1], "confirmed and not stored"),
    "a message is stored twice": (GOOD, [*STORED, Stored(2, 1, 7, 5, 0)], "stored twice"),
    "it was confirmed elsewhere": ([GOOD[0]._replace(offset=1), *GOOD[1:]], STORED, "confirmed at another position"),
    "an offset is missing": (GOOD, [*STORED[:-1], Stored(3, 1, 7, 4, 1)], "offsets are not dense"),
    "a key is out of order": (GOOD, [Stored(1, 0, 7, 3, 0), STORED[1], Stored(1, 2, 7, 1, 0), *STORED[3:]], "stored out of order"),
    "a child comes before its parent": (GOOD, [STORED[3]._replace(number=1), *STORED[1:3]], "stored out of order"),
    "a row of a writer is missing": (GOOD, [*STORED, Stored(2, 1, 7, 7, 0)], "a hole in what a writer sent"),
    "a message never came": ([each for each in GOOD if each.number != 5], STORED, "never given to a channel"),
    "another message came": ([*GOOD, note(30, GIVEN, 4)._replace(number=9)], STORED, "given something else than was stored"),
    "it came again": ([*GOOD, note(30, GIVEN, 4)], STORED, "given again after its acknowledgement was confirmed"),
    "two were told that they did it": ([*GOOD, note(30, ACKNOWLEDGED, 4)], STORED, "acknowledged twice"),
    "a member was told of what it never got": ([*GOOD, note(9, ACKNOWLEDGED, 1)], STORED, "acknowledged and never given"),
    "a lane has two members": ([*GOOD, note(12, GIVEN, 3, "n")], STORED, "given before what is earlier of its key"),
    "a child is given before its parent is done": ([*GOOD, note(12, GIVEN, 5)], STORED, "given before what is earlier of its key"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found(lie: str) -> None:
    notes, stored, what = LIES[lie]
    assert what in broken(notes, stored)


def test_a_leader_that_was_stopped_may_give_late_what_must_not_count() -> None:
    late = [*GOOD, note(30, GIVEN, 4)]
    assert broken(late, late_ns=10) == set()
    assert broken([*late, note(31, REPORTED, 4), note(32, ACKNOWLEDGED, 4)], late_ns=10) == {"acknowledged twice"}
