"""Rooms of free topics, and the rooms that a filter spans. Pure.

A topic's first level chooses its room, unless `[cluster] topic_rooms` has a rule for it:

    devices=2                    devices/7/telemetry  →  one of 1,024 rooms, by "devices/7"
    sensors/eu=3:64              sensors/eu/7/heat    →  one of 64 rooms, by "sensors/eu/7"
                                 sensors/us/7/heat    →  the room of "sensors"

The rule with the longest prefix applies. The rooms of a rule are numbered, so that a filter that is wider than its depth, such as
`devices/+/telemetry` or `devices/#`, spans all of them and nothing else. A filter whose first level is a wildcard spans all free
topics. Every broker partition has a room for these: its records go there as well, `EVERY_TOPIC`.

Source: docs/routing.md, "Topics".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import xxhash

from pixiu.errors import InvalidArgument
from pixiu.ids import ALL_TOPICS, TOPIC_ROOM, RoomID, topic_room
from pixiu.placement.partition import MAX_PARTITIONS

DEFAULT_ROOMS: Final = 1024
MAX_ROOMS: Final = 65_536
"""Limit of rooms of one rule: a filter that is wider than its depth joins all of them."""
MAX_RULES: Final = 64
MAX_DEPTH: Final = 16
MAX_TEXT: Final = 4096
CACHED_TOPICS: Final = 4096
EVERY_TOPIC: Final = tuple(RoomID(ALL_TOPICS + number) for number in range(MAX_PARTITIONS))
"""Rooms of filters with a wildcard in their first level. All are joined, however many partitions there are, so that a change of
their number needs nothing: a broker looks up the one whose number is its own."""
_RULE: Final = re.compile(r"([^=,\s]+)=([0-9]{1,2})(?::([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class SpreadRule:
    """Topics below a prefix are spread over rooms by their first levels."""

    prefix: tuple[str, ...]
    depth: int
    """Number of levels that choose the room; more than the prefix has."""
    rooms: int = DEFAULT_ROOMS

    def room(self, levels: list[str]) -> RoomID:
        """The room of a topic below the prefix. A topic with fewer levels than `depth` is placed by all it has."""
        return self.numbered(xxhash.xxh3_64_intdigest("/".join(levels[: self.depth]).encode()) % self.rooms)

    def numbered(self, number: int) -> RoomID:
        """One of the rule's rooms, numbered from 0."""
        name = f"{'/'.join(self.prefix)}\0{number}"
        return RoomID(TOPIC_ROOM | xxhash.xxh3_64_intdigest(name.encode()) >> 2)

    def all(self) -> Iterator[RoomID]:
        """All of the rule's rooms."""
        return map(self.numbered, range(self.rooms))


class TopicRooms:
    """The rooms of free topics.

    Args:
        text: rules PREFIX=DEPTH or PREFIX=DEPTH:ROOMS, separated by commas; empty: none.

    Raises `InvalidArgument`.
    """

    def __init__(self, text: str = "") -> None:
        self.text = text
        self._rules = {rule.prefix: rule for rule in _parse(text)}
        self._lengths = sorted({len(prefix) for prefix in self._rules}, reverse=True)
        self.room = lru_cache(CACHED_TOPICS)(self._room) if self._rules else topic_room
        """The room that carries a free topic."""

    def __bool__(self) -> bool:
        """True if the room of any topic depends on more than its first level."""
        return bool(self._rules)

    def _room(self, topic: str) -> RoomID:
        levels = topic.split("/")
        rule = self._rule_of(levels)
        return topic_room(topic) if rule is None else rule.room(levels)

    def rooms(self, topic_filter: str) -> list[RoomID]:
        """Find the rooms of all topics that a filter can match; each is joined once for it."""
        levels = topic_filter.split("/")
        wild = next((index for index, level in enumerate(levels) if level in ("+", "#")), len(levels))
        if wild == len(levels):
            return [self.room(topic_filter)]
        if not wild:
            return list(EVERY_TOPIC)
        fixed = levels[:wild]
        rule = self._rule_of(fixed)
        found: dict[RoomID, None] = {}
        if rule is None:
            found[topic_room(topic_filter)] = None
        elif rule.depth <= wild:
            found[rule.room(fixed)] = None
        else:
            found.update(dict.fromkeys(rule.all()))
            if levels[wild] == "#":  # it matches the level above, too
                found[self.room("/".join(fixed))] = None
        for other in self._rules.values():
            if len(other.prefix) > wild and _may_match(levels, other.prefix):
                found.update(dict.fromkeys(other.all()))
        return list(found)

    def _rule_of(self, levels: list[str]) -> SpreadRule | None:
        for length in self._lengths:
            if length <= len(levels) and (rule := self._rules.get(tuple(levels[:length]))) is not None:
                return rule
        return None


def all_topics(room: int, partition: int) -> int | None:
    """The room of filters that span all topics, as a broker partition looks it up for a record's room; None: not a free topic's."""
    return ALL_TOPICS + partition if room >= TOPIC_ROOM else None


def _may_match(levels: list[str], prefix: tuple[str, ...]) -> bool:
    """True if a filter can match a topic below a prefix that is longer than the part before its first wildcard."""
    for index, name in enumerate(prefix):
        if index >= len(levels):
            return False
        if levels[index] == "#":
            return True
        if levels[index] not in ("+", name):
            return False
    return True


def _parse(text: str) -> list[SpreadRule]:
    if not text:
        return []
    if len(text) > MAX_TEXT:
        raise InvalidArgument(f"rules of topics' rooms have at most {MAX_TEXT} characters")
    rules: dict[tuple[str, ...], SpreadRule] = {}
    for part in text.split(","):
        found = _RULE.fullmatch(part.strip())
        if found is None:
            raise InvalidArgument(f"{part.strip()[:80]!r} is not a rule of topics' rooms, such as devices=2 or devices=2:1024")
        prefix, depth, rooms = tuple(found[1].split("/")), int(found[2]), int(found[3] or DEFAULT_ROOMS)
        if (
            not all(prefix)
            or prefix[0] in ("room", "user")
            or any(set(level) & set("+#\0") for level in prefix)
            or prefix[0][0] == "$"
        ):
            raise InvalidArgument(f"{found[1]!r} cannot begin free topics: levels without +, #, not room, user or $…")
        if not len(prefix) < depth <= MAX_DEPTH or not 1 <= rooms <= MAX_ROOMS:
            raise InvalidArgument(
                f"{part.strip()!r}: the depth is above {len(prefix)}, the levels of its prefix, and at most {MAX_DEPTH}; "
                f"rooms are 1 to {MAX_ROOMS}"
            )
        if prefix in rules:
            raise InvalidArgument(f"two rules for topics below {found[1]!r}")
        rules[prefix] = SpreadRule(prefix, depth, rooms)
    if len(rules) > MAX_RULES:
        raise InvalidArgument(f"at most {MAX_RULES} rules of topics' rooms")
    return list(rules.values())


BY_FIRST_LEVEL: Final = TopicRooms()
"""No rules."""
