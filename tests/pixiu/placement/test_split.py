"""Routing while parents are split one by one."""

from __future__ import annotations

from pixiu.placement.split import SplitPartitions


def test_only_keys_of_a_split_parent_move() -> None:
    split = SplitPartitions(2)
    assert [split.of(key) for key in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert split.learn(1, 4)
    assert not split.learn(1, 4)
    assert [split.of(key) for key in range(8)] == [0, 1, 0, 3, 0, 1, 0, 3]
    assert list(split.all()) == [0, 1, 3]
    split.set_count(2)
    assert split.of(3) == 3
    split.set_count(4)
    assert [split.of(key) for key in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert list(split.all()) == [0, 1, 2, 3]


def test_what_cannot_be_a_split_is_not_believed() -> None:
    split = SplitPartitions(2)
    for refused_by, partitions in [(0, 2), (0, 8), (2, 4), (0, 1), (5, 4), (0, 0), (0, 3)]:
        assert not split.learn(refused_by, partitions)
    assert [split.of(key) for key in range(4)] == [0, 1, 0, 1]
    assert not SplitPartitions(128).learn(0, 256)


def test_a_split_that_was_taken_back_is_forgotten() -> None:
    split = SplitPartitions(2)
    split.learn(1, 4)
    split.forget(3)
    assert split.of(3) == 1
