"""Parts that follow sealed ones, as leaders name them before the description does."""

from __future__ import annotations

from pixiu.client.topics.topic_map import TopicMap
from pixiu.client.topics.writing.ahead import Ahead
from pixiu.placement.slots import SLOTS, Lineage, Part, Range

HALF = SLOTS // 2
LINEAGE = Lineage.new([Range(0, HALF, 0), Range(HALF, SLOTS, 1)])


def named(lineage: Lineage, number: int) -> list[Part]:
    """The children of a part as a leader names them: without their parents."""
    return [part._replace(parents=(), sealed=False) for part in lineage.children(number)]


def described(lineage: Lineage) -> TopicMap:
    return TopicMap("orders", 1, lineage.next_number, lineage)


def open_numbers(lineage: Lineage) -> list[int]:
    return [part.number for part in lineage.open_parts()]


def test_children_take_over_at_once_and_an_older_description_does_not_undo_it() -> None:
    split = LINEAGE.resized({1}, [Range(0, 100, 1), Range(100, HALF, 0)])
    ahead = Ahead(described(LINEAGE))
    ahead.note(named(split, 1))
    assert ahead.topic.lineage.parts == split.parts
    assert ahead.describe(described(LINEAGE))
    assert ahead.topic.lineage.parts == split.parts
    later = split.resized({2}, [Range(HALF, SLOTS, 0)])
    assert ahead.describe(described(later))
    assert ahead.topic.lineage.parts == later.parts


def test_the_seal_of_one_parent_names_the_child_of_all() -> None:
    merged = LINEAGE.resized({1, 2}, [Range(0, SLOTS, 0)])
    ahead = Ahead(described(LINEAGE))
    ahead.note(named(merged, 2))
    ahead.note(named(merged, 1))
    assert ahead.topic.lineage.parts == merged.parts


def test_children_of_children_that_no_description_has_follow_each_other() -> None:
    moved = LINEAGE.resized({1}, [Range(0, HALF, 1)])
    split = moved.resized({3}, [Range(0, 5, 0), Range(5, HALF, 0)])
    ahead = Ahead(described(LINEAGE))
    ahead.note(named(moved, 1))
    ahead.note(named(split, 3))
    assert open_numbers(ahead.topic.lineage) == [4, 5, 2]


def test_resizes_of_other_parts_that_were_heard_of_later_still_count() -> None:
    first = LINEAGE.resized({1}, [Range(0, HALF, 1)])
    second = first.resized({2}, [Range(HALF, SLOTS, 0)])
    ahead = Ahead(described(LINEAGE))
    ahead.note(named(second, 2))
    assert open_numbers(ahead.topic.lineage) == [1, 4]
    ahead.note(named(first, 1))
    assert open_numbers(ahead.topic.lineage) == [3, 4]


def test_children_that_have_been_followed_since_change_nothing() -> None:
    split = LINEAGE.resized({1}, [Range(0, 100, 1), Range(100, HALF, 0)])
    after = split.resized({3, 4}, [Range(0, HALF, 0)])
    gone = after.without(1).without(3).without(4)
    ahead = Ahead(described(LINEAGE))
    ahead.note(named(split, 1))
    assert ahead.describe(described(gone))
    assert ahead.topic.lineage.parts == gone.parts


def test_children_that_do_not_fit_wait_for_the_description() -> None:
    ahead = Ahead(described(LINEAGE))
    ahead.note([Part(9, 0, 5, 0)])
    assert ahead.topic.lineage.parts == LINEAGE.parts
