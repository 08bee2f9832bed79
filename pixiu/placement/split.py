"""Which partition serves a key while a doubling is under way: parents are cut one by one, before the layout says so. Pure.

Source: docs/doubling.md.
"""

from __future__ import annotations

from pixiu.placement.partition import is_partition_count


class SplitPartitions:
    """The partitions of one role, and those of them that were split already.

    Args:
        count: partitions as the layout has them.
    """

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._split: set[int] = set()

    def set_count(self, count: int) -> None:
        """The layout has changed. What was split belongs to the count before."""
        if count != self.count:
            self.count = count
            self._split.clear()

    def learn(self, refused_by: int, partitions: int) -> bool:
        """A partition refused a key as one of another partition, among so many. Whether that is news: the partition was split.

        With more than twice as many, doublings were finished of which the layout here does not tell yet.
        """
        if partitions < 2 * self.count or not is_partition_count(partitions) or refused_by >= self.count:
            return False
        self.set_count(partitions // 2)
        if refused_by in self._split:
            return False
        self._split.add(refused_by)
        return True

    def forget(self, refused_by: int) -> None:
        """A child refused a key of its parent: the parent is not split, or the doubling was taken back."""
        self._split.discard(refused_by % self.count)

    def splits(self, partition: int) -> bool:
        """Whether a partition is known to be split."""
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
