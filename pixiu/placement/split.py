"""Placement of keys while a doubling is under way: parents are split one by one, before the layout shows it. Pure.

Source: docs/doubling.md.
"""

from __future__ import annotations

from pixiu.placement.partition import is_partition_count


class SplitPartitions:
    """The partitions of one role, and those of them that are already split.

    Args:
        count: number of partitions in the layout.
    """

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._split: set[int] = set()

    def set_count(self, count: int) -> None:
        """Take the layout's new number of partitions. Known splits belong to the previous number."""
        if count != self.count:
            self.count = count
            self._split.clear()

    def learn(self, refused_by: int, partitions: int) -> bool:
        """Learn from a refusal: partition `refused_by` refused a key as that of another one of `partitions`. True if it is now
        known to be split and was not before.

        If `partitions` is more than twice as many, doublings were finished that the layout here does not show yet.
        """
        if partitions < 2 * self.count or not is_partition_count(partitions) or refused_by >= self.count:
            return False
        self.set_count(partitions // 2)
        if refused_by in self._split:
            return False
        self._split.add(refused_by)
        return True

    def forget(self, refused_by: int) -> None:
        """Learn that a child refused a key of its parent: the parent is not split, or the doubling was aborted."""
        self._split.discard(refused_by % self.count)

    def moved(self, refused_by: int, partitions: int) -> bool:
        """Learn from a refusal; return True if the request can be repeated at once. A child that is not open refuses, too: its
        parent, whose cut may be taken back, is asked later."""
        if refused_by >= self.count:
            self.forget(refused_by)
            return False
        return self.learn(refused_by, partitions) or (partitions == 2 * self.count and self.splits(refused_by))

    def splits(self, partition: int) -> bool:
        """True if the partition is known to be split."""
        return partition in self._split

    def of(self, key: int) -> int:
        """The partition that serves a key."""
        partition = key % self.count
        return key % (2 * self.count) if self._split and partition in self._split else partition

    def all(self) -> range | tuple[int, ...]:
        """Every partition that serves keys."""
        if not self._split:
            return range(self.count)
        return (*range(self.count), *sorted(partition + self.count for partition in self._split))
