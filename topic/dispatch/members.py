"""Members of a channel: their credit, their tags, and whose turn it is. Pure.

Source: docs/topics.md, "Channels".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from topic.dispatch.sorting import FOR_ALL


@dataclass(slots=True)
class Member:
    """A member of a channel."""

    credit: int
    """Messages that it may have without having reported any."""
    having: int = 0
    """Messages that it has and did not report."""
    name: str = ""
    tag: str = ""
    parts: dict[int, None] = field(default_factory=dict)
    """IDs of parts of which it ever got something, in that order."""


class Members:
    """The members of one channel."""

    __slots__ = ("_all", "_free", "_tags")

    def __init__(self) -> None:
        self._all: dict[int, Member] = {}
        self._free: dict[str, dict[int, Member]] = {}
        """By tag: those that take another message, in order of turns."""
        self._tags: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def get(self, number: int) -> Member | None:
        """A member."""
        return self._all.get(number)

    def items(self) -> Iterator[tuple[int, Member]]:
        """All of them."""
        return iter(self._all.items())

    @property
    def tags(self) -> frozenset[str]:
        """Tags that members have."""
        return frozenset(self._tags) - {FOR_ALL}

    def add(self, number: int, member: Member) -> bool:
        """A member is here. Returns True if it is the first with its tag."""
        self._all[number] = member
        self._tags[member.tag] += 1
        self._place(number, member)
        return self._tags[member.tag] == 1

    def remove(self, number: int) -> bool:
        """A member is gone. Returns True if it was the last with its tag."""
        member = self._all.pop(number)
        self._free.get(member.tag, {}).pop(number, None)
        self._tags[member.tag] -= 1
        if self._tags[member.tag]:
            return False
        del self._tags[member.tag]
        self._free.pop(member.tag, None)
        return True

    def set_credit(self, number: int, credit: int) -> None:
        """A member takes another number of messages."""
        member = self._all[number]
        member.credit = credit
        self._place(number, member)

    def gave(self, number: int, part: int, count: int) -> None:
        """A member got messages of a part; others come first next time."""
        member = self._all[number]
        member.having += count
        member.parts[part] = None
        free = self._free[member.tag]
        del free[number]
        if member.having < member.credit:
            free[number] = member

    def freed(self, number: int, count: int) -> None:
        """A member has so many messages less."""
        member = self._all.get(number)
        if member is not None:
            member.having -= count
            self._place(number, member)

    def _place(self, number: int, member: Member) -> None:
        free = self._free.setdefault(member.tag, {})
        if member.having >= member.credit:
            free.pop(number, None)
        elif number not in free:
            free[number] = member

    def free(self, tag: str) -> Mapping[int, Member]:
        """Members with a tag that take another message, in order of turns."""
        return self._free.get(tag, {})

    def free_tags(self) -> list[str]:
        """Tags of members that take another message."""
        return [tag for tag, free in self._free.items() if free]
