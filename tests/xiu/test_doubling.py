"""The phases of a partition that is doubled: what fits behind what, and whose mail is taken."""

from __future__ import annotations

import pytest

from pixiu.ids import snowflake
from xiu.doubling import (
    ASK_US,
    NO_DOUBLING,
    Change,
    Doubling,
    Phase,
    after,
    counted,
    is_asked,
    parent_of,
    problem_of,
    reached,
    takes,
)

ID, OTHER = 0xA1, 0xB2
AT_US = 1_750_000_000_000_000


def taken(partition: int, *steps: Change) -> Doubling:
    now = NO_DOUBLING
    for at, step in enumerate(steps):
        assert problem_of(now, step, partition) == ""
        now = after(now, step, partition, 10 + at, AT_US + at)
        assert reached(now, step)
    return now


LEARNING, SPLIT, CLEANING = (Change(phase, ID, 4) for phase in (Phase.LEARNING, Phase.SPLIT, Phase.CLEANING))
OPEN = Change(Phase.OPEN, ID, 4, split_at=77, split_us=AT_US)


def test_a_parent_is_split_and_counts_by_the_new_number_for_ever() -> None:
    assert counted(NO_DOUBLING, 2) == 2
    split = taken(1, SPLIT)
    assert split == Doubling(ID, 4, Phase.SPLIT, 10, AT_US)
    assert [takes(split, 1, key) for key in (1, 3, 5)] == [True, False, True]
    over = taken(1, SPLIT, CLEANING)
    assert (over.phase, over.split_at, counted(over, 2)) == (Phase.NONE, 10, 4)
    assert taken(1, SPLIT, CLEANING, Change(Phase.SPLIT, OTHER, 8)).partitions == 8


def test_a_child_takes_nothing_before_it_is_open_whatever_the_layout_says() -> None:
    learning = taken(3, LEARNING)
    assert [counted(learning, layout) for layout in (2, 4)] == [2, 2]
    assert not takes(learning, 3, 7)
    opened = taken(3, LEARNING, OPEN)
    assert (opened.cut_us, opened.split_at, counted(opened, 2), takes(opened, 3, 7)) == (AT_US, 77, 4, True)
    assert taken(3, LEARNING, OPEN, CLEANING, Change(Phase.SPLIT, OTHER, 8)).cut_us == AT_US
    assert taken(3, LEARNING, OPEN, Change(Phase.SPLIT, OTHER, 8)).cut_us == AT_US


def test_a_child_learns_anew_when_a_doubling_was_taken_back() -> None:
    assert taken(3, LEARNING, Change(Phase.LEARNING, OTHER, 4)).id == OTHER


@pytest.mark.parametrize(
    ("partition", "before", "step"),
    [
        (1, [], LEARNING),
        (1, [], OPEN),
        (3, [], SPLIT),
        (3, [], OPEN),
        (3, [LEARNING], Change(Phase.OPEN, OTHER, 4)),
        (1, [SPLIT], Change(Phase.SPLIT, OTHER, 8)),
        (1, [SPLIT, CLEANING], Change(Phase.SPLIT, OTHER, 4)),
        (1, [SPLIT, CLEANING], Change(Phase.SPLIT, OTHER, 16)),
        (3, [LEARNING, OPEN], Change(Phase.LEARNING, OTHER, 4)),
        (3, [LEARNING], CLEANING),
        (1, [], CLEANING),
        (1, [], Change(Phase.SPLIT, ID, 3)),
        (1, [], Change(Phase.SPLIT, 0, 4)),
        (4, [], Change(Phase.SPLIT, ID, 4)),
        (1, [], Change(Phase.NONE, ID, 4)),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(partition: int, before: list[Change], step: Change) -> None:
    now = taken(partition, *before)
    assert problem_of(now, step, partition)
    assert after(now, step, partition, 99, AT_US) == now


def test_a_step_that_was_taken_is_taken_no_second_time() -> None:
    for partition, steps in ((1, [SPLIT, CLEANING]), (3, [LEARNING, OPEN, CLEANING])):
        end = taken(partition, *steps)
        for step in steps:
            assert reached(end, step)
            assert after(end, step, partition, 99, AT_US + 99) == end


def test_the_parent_is_asked_for_what_it_may_have() -> None:
    child = taken(3, LEARNING, OPEN)
    ms = AT_US // 1000
    asked = [is_asked(child, AT_US, snowflake(ms + ahead, 1, 1), False) for ahead in (-1000, 119_000, 121_000)]
    assert asked == [True, True, False]
    assert is_asked(child, AT_US, 1 << 62, True)
    assert not is_asked(child, AT_US + ASK_US, 1 << 62, True)
    assert not is_asked(NO_DOUBLING, AT_US, snowflake(ms, 1, 1), False)


def test_a_partition_came_from_the_one_half_the_number_below() -> None:
    assert [parent_of(partition) for partition in range(1, 9)] == [0, 0, 1, 0, 1, 2, 3, 0]


def test_what_is_written_is_read_again() -> None:
    for now in (NO_DOUBLING, taken(1, SPLIT), taken(3, LEARNING, OPEN, CLEANING)):
        assert Doubling.decode(now.encode()) == now
    for change in (OPEN, Change(Phase.OPEN, ID, 4, 77, AT_US, b"readers")):
        assert Change.decode(change.encode()) == change
