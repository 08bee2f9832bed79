"""Entries that the admin has groups append to their logs. Pure.

    OPEN      {"part", "low", "high", "parents", "writers": [[part, writer, position, progress], …], "channels": [{…}],
               "more"}: true if further ones bring more writers
    SEAL      {"part", "children": [[number, low, high, group], …]}
    CHANNEL   {"channel", "topic", "name", …}        TOPIC  {"topic", "name", …}        DROP  u64 part

A part is named by its topic and its number, topic << 32 | number. A CHANNEL or TOPIC of a lower version than a group has seen has
no effect there, so that one that comes late changes nothing back.

Source: docs/topics.md, "The log of a group".
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, Final

from admin.events import KnownWriter
from pixiu.discovery.topics import SETTINGS, TopicChannel, TopicNode, TopicPart
from pixiu.errors import MalformedData

OPEN: Final = 18
SEAL: Final = 19
CHANNEL: Final = 20
TOPIC: Final = 24
DROP: Final = 25
NAMES: Final = {OPEN: "OPEN", SEAL: "SEAL", CHANNEL: "CHANNEL", TOPIC: "TOPIC", DROP: "DROP"}
_DROP: Final = struct.Struct("<Q")


def part_id(topic: int, number: int) -> int:
    """The ID of a part, u64."""
    return topic << 32 | number


def open_part(node: TopicNode, part: TopicPart, writers: Sequence[KnownWriter], *, more: bool = False) -> bytes:
    """The payload of an OPEN. writers: states of the parents' seals, as many as fit. more: others follow."""
    return _json(
        {
            "part": part_id(node.topic, part.number),
            "low": part.low,
            "high": part.high,
            "parents": part.parents,
            "writers": writers,
            "channels": [_channel(node, each) for each in node.channels if not each.removed],
            "more": more,
        }
    )


def seal_part(node: TopicNode, part: TopicPart) -> bytes:
    """The payload of a SEAL."""
    children = [[child.number, child.low, child.high, child.group] for child in node.children(part.number)]
    return _json({"part": part_id(node.topic, part.number), "children": children})


def set_channel(node: TopicNode, channel: TopicChannel) -> bytes:
    """The payload of a CHANNEL, which also removes one."""
    return _json(_channel(node, channel))


def set_topic(node: TopicNode) -> bytes:
    """The payload of a TOPIC."""
    return _json(
        {
            "topic": node.topic,
            "name": node.name,
            **{name: getattr(node, name) for name in SETTINGS},
            "deleted": bool(node.deleted_at_ms),
            "version": node.version,
        }
    )


def drop_part(part: int) -> bytes:
    """The payload of a DROP. part: its ID."""
    return _DROP.pack(part)


def writers_of(sealed: bytes) -> Sequence[KnownWriter]:
    """The writers in a group's answer to a SEAL. Raises `MalformedData`."""
    try:
        return [KnownWriter(*map(int, each)) for each in json.loads(sealed)["writers"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MalformedData(f"the answer to a seal cannot be read: {error!r}") from None


def _channel(node: TopicNode, channel: TopicChannel) -> dict[str, object]:
    return {
        "channel": channel.channel,
        "topic": node.topic,
        "name": channel.name,
        "ordered": channel.ordered,
        "from_end": channel.from_end,
        "max_attempts": channel.max_attempts,
        "timeout_s": channel.timeout_ms / 1000,
        "removed": channel.removed,
        "filter": channel.filter,
        "version": node.version,
    }


def _json(found: dict[str, Any]) -> bytes:
    return json.dumps(found, separators=(",", ":")).encode()
