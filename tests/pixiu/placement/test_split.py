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
    for refused_by, partitions in [(0, 2), (2, 4), (0, 1), (5, 4), (0, 0), (0, 3)]:
        assert not split.learn(refused_by, partitions)
    assert [split.of(key) for key in range(4)] == [0, 1, 0, 1]
    assert not SplitPartitions(128).learn(0, 256)


def test_a_split_that_was_taken_back_is_forgotten() -> None:
    split = SplitPartitions(2)
    split.learn(1, 4)
    split.forget(3)
    assert split.of(3) == 1


def test_doublings_of_which_the_layout_does_not_tell_are_learnt_from_a_refusal() -> None:
    """A process that cannot reach ZooKeeper meanwhile would ask the same parent again and again."""
    split = SplitPartitions(2)
    split.learn(0, 4)
    assert split.learn(1, 16)
    assert split.count == 8
    assert [split.of(key) for key in (0, 1, 2, 9, 10, 17)] == [0, 1, 2, 9, 2, 1]
    split.set_count(2)  # the old layout, once more: it is learnt again
    assert split.learn(1, 16)
    split.set_count(16)
    assert split.of(10) == 10
