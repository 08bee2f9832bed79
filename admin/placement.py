"""Groups for new parts: the one with the fewest parts gets the next one, and among those the one with the fewest bytes. Pure.

Source: docs/topics.md, "Administration".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from pixiu.errors import InvalidArgument, LimitError, Unavailable

MAX_GROUP_PARTS: Final = 1_000
"""Parts of a group, sealed ones included. Policy: a change that would make more is refused."""


class Places:
    """The groups and how full they are. A change asks for places, and takes them.

    Args:
        groups: of the layout.
        running: those of them that have a Running replica.
        parts: group → its parts.
        stored: group → its bytes, as far as they are known.
    """

    def __init__(
        self, groups: Sequence[int], running: Collection[int], parts: Mapping[int, int], stored: Mapping[int, int]
    ) -> None:
        self.groups = tuple(groups)
        self._running, self._stored = running, stored
        self._parts = Counter(parts)

    def each(self) -> list[int]:
        """Take a place in every running group. Raises as `choose`."""
        return self.take(self._able(()))

    def choose(self, count: int, avoid: Collection[int] = ()) -> list[int]:
        """Choose groups for new parts, one after the other, and take the places. avoid: groups to leave out.

        Raises `Unavailable` without any group, `LimitError` if all are full.
        """
        able = self._able(avoid)
        chosen = []
        for _ in range(count):
            group = min(able, key=lambda each: (self._parts[each], self._stored.get(each, 0), each))
            self._take(group)
            chosen.append(group)
        return chosen

    def _able(self, avoid: Collection[int]) -> list[int]:
        if not self.groups:
            raise Unavailable("this cluster has no groups for topics; docs/topics.md says how to add one")
        running = [group for group in self.groups if group in self._running]
        if not running:
            raise Unavailable("no group of topics is running: `pixiu status` shows their replicas")
        able = [group for group in running if group not in avoid]
        if not able:
            raise InvalidArgument("there is no other group to move the part to")
        return able

    def take(self, wanted: Sequence[int]) -> list[int]:
        """Take places in named groups. Raises `InvalidArgument` for a group that does not exist, `LimitError`."""
        for group in wanted:
            if group not in self.groups:
                raise InvalidArgument(f"there is no group {group}; the groups are {', '.join(map(str, self.groups)) or 'none'}")
            self._take(group)
        return list(wanted)

    def _take(self, group: int) -> None:
        if self._parts[group] >= MAX_GROUP_PARTS:
            raise LimitError(f"group {group} has {MAX_GROUP_PARTS:,} parts, the most it may have; add a group or use fewer parts")
        self._parts[group] += 1
