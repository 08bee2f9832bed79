"""Names of topics and the rooms that carry them.

    room/{RoomID}   RoomID in decimal, 1 to 2^62-1, no leading zero
    user/{UIN}      UIN in decimal, 1 to 2^63-1, no leading zero: messages to a user; no room carries it
    $…              the server's own names: no room carries them; `$SYS/…` and `$share/GROUP/…` can be subscribed to
    over 4,096      characters: no room carries them
    anything else   a free topic; its first level chooses the room, unless the cluster has rules (`pixiu.placement.topic_rooms`)

Source: docs/routing.md, docs/operations.md; MQTT 3.1.1 section 4.7.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple

from pixiu.ids import MAX_ID, MAX_ROOM, UIN, RoomID, topic_room

ROOM_PREFIX: Final = "room/"
USER_PREFIX: Final = "user/"
CACHED_NAMES: Final = 4096
"""Number of names whose rooms a process caches; the least recently used one is evicted."""
CACHED_NAME_LENGTH: Final = 128
"""Longest name that is cached, in characters, so that the cache is bounded in bytes too."""

MAX_TOPIC_LENGTH: Final = 4096
"""Longest topic, in characters. Longer names are refused: each copy of a message and each subscription would carry them."""

SHARE_PREFIX: Final = "$share/"
SYSTEM_PREFIX: Final = "$SYS/"
"""Topics that a gateway publishes about itself, to its own subscribers."""
MAX_FILTER_LEVELS: Final = 128

_ROOM_DIGITS: Final = len(str(MAX_ROOM))
_USER_DIGITS: Final = len(str(MAX_ID))


class TopicRefusal(Enum):
    """The reason why no room carries a name. The value is the text for people."""

    EMPTY = "a topic has at least one character"
    LONG = "a topic has at most 4,096 characters"
    ROOM_NUMBER = "room/ is followed by a RoomID in decimal, 1 to 2^62-1, without leading zeros"
    USER = "user/ is followed by a UIN in decimal, 1 to 2^63-1, without leading zeros, and no room carries it"
    SYSTEM = "names that begin with $ belong to the server"
    VROOM = "the number of a VRoom belongs to the cluster; use the RoomID of the big room"
    WILDCARD = "a topic that is published to, or read by this interface, has no wildcards"
    FILTER = "+ and # stand alone in their level, and # only in the last one"
    LEVELS = "a filter has at most 128 levels"
    SHARE = "a shared subscription is $share/GROUP/FILTER; the group is not empty and contains no /, + or #"


class Filter(NamedTuple):
    """A subscription of a client, without its options."""

    group: str
    """Group of a shared subscription; empty: it is not shared."""
    name: str
    """The filter, without `$share/GROUP/`."""
    wild: bool
    """True if it contains a wildcard."""


def parse_filter(text: str) -> Filter | TopicRefusal:
    """Read what a client wants to subscribe to, or find the reason why it cannot. Never raises.

    `room/{RoomID}`, `user/{UIN}`, free topics with wildcards or without, `$SYS/…`; `$share/GROUP/` before a room or free topics.
    """
    return _parsed(text) if len(text) <= CACHED_NAME_LENGTH else _parse(text)


def _parse(text: str) -> Filter | TopicRefusal:
    group, name = "", text
    if text.startswith(SHARE_PREFIX):
        group, _, name = text[len(SHARE_PREFIX) :].partition("/")
        if not group or not name or has_wildcard(group):
            return TopicRefusal.SHARE
        if name.startswith((USER_PREFIX, "$")):
            return TopicRefusal.USER if name.startswith(USER_PREFIX) else TopicRefusal.SYSTEM
        if len(group) > MAX_TOPIC_LENGTH:
            return TopicRefusal.LONG
    wild = has_wildcard(name)
    if wild or name.startswith(SYSTEM_PREFIX):
        if len(name) > MAX_TOPIC_LENGTH:
            return TopicRefusal.LONG
        if not is_filter(name):
            return TopicRefusal.FILTER
        if name.count("/") >= MAX_FILTER_LEVELS:
            return TopicRefusal.LEVELS
        # Rooms and users are not topics that a wildcard can match.
        if name.startswith(ROOM_PREFIX):
            return TopicRefusal.ROOM_NUMBER
        if name.startswith(USER_PREFIX):
            return TopicRefusal.USER
        if name[0] == "$" and not name.startswith(SYSTEM_PREFIX):
            return TopicRefusal.SYSTEM
        return Filter(group, name, wild)
    found = destination(name)
    return found if isinstance(found, TopicRefusal) else Filter(group, name, False)


_parsed = lru_cache(CACHED_NAMES)(_parse)


def is_filter(name: str) -> bool:
    """True if wildcards are only where MQTT allows them: alone in their level, and # only in the last one."""
    if "#" not in name and "+" not in name:
        return True
    levels = name.split("/")
    last = len(levels) - 1
    return all(
        level in ("+", "#") and (level == "+" or index == last) if "+" in level or "#" in level else True
        for index, level in enumerate(levels)
    )


def has_wildcard(name: str) -> bool:
    """True if a name contains `+` or `#`."""
    return "+" in name or "#" in name


def resolve(name: str) -> RoomID | TopicRefusal:
    """Find the room that carries a topic (or a filter without wildcards), or the reason why none does. Never raises."""
    return _remembered(name) if len(name) <= CACHED_NAME_LENGTH else _resolve(name)


def destination(name: str) -> RoomID | UIN | TopicRefusal:
    """Find the room that carries a topic, or the user that `user/{UIN}` names, or the reason why there is neither. Never raises."""
    found = _remembered(name) if len(name) <= CACHED_NAME_LENGTH else _resolve(name)
    if found is TopicRefusal.USER:
        uin = user_of_topic(name)
        return found if uin is None else uin
    return found


def user_of_topic(name: str) -> UIN | None:
    """The user that `user/{UIN}` names; None for every other name."""
    digits = name.removeprefix(USER_PREFIX)
    if digits == name or not (digits.isascii() and digits.isdecimal() and digits[0] != "0" and len(digits) <= _USER_DIGITS):
        return None
    return UIN(int(digits)) if int(digits) <= MAX_ID else None


def _resolve(name: str) -> RoomID | TopicRefusal:
    if not name:
        return TopicRefusal.EMPTY
    if len(name) > MAX_TOPIC_LENGTH:
        return TopicRefusal.LONG
    if has_wildcard(name):
        return TopicRefusal.WILDCARD
    if name.startswith(ROOM_PREFIX):
        digits = name[len(ROOM_PREFIX) :]
        if not (digits.isascii() and digits.isdecimal() and digits[0] != "0" and len(digits) <= _ROOM_DIGITS):
            return TopicRefusal.ROOM_NUMBER
        room = int(digits)
        return RoomID(room) if room <= MAX_ROOM else TopicRefusal.ROOM_NUMBER
    if name.startswith(USER_PREFIX):
        return TopicRefusal.USER
    if name[0] == "$":
        return TopicRefusal.SYSTEM
    return topic_room(name)


_remembered = lru_cache(CACHED_NAMES)(_resolve)
