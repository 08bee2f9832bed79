"""Entries that the admin has groups append to their logs, made from topics' nodes in the registry. Pure.

A CHANNEL or TOPIC of a lower version than a group has seen has no effect there, so that one that comes late changes nothing back.

Source: docs/topics.md, "The log of a group".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from cluster.topics import entries as en
from cluster.topics.entries import KnownWriter
from pixiu.discovery.topics import SETTINGS, TopicChannel, TopicNode, TopicPart
from pixiu.errors import MalformedData

NAMES: Final = {en.OPEN: "OPEN", en.SEAL: "SEAL", en.CHANNEL: "CHANNEL", en.TOPIC: "TOPIC", en.DROP: "DROP"}


def open_part(node: TopicNode, part: TopicPart, writers: Sequence[KnownWriter], *, more: bool = False) -> bytes:
    """The payload of an OPEN. writers: states of the parents' seals, as many as fit. more: others follow."""
    channels = [_channel(node, each) for each in node.channels if not each.removed]
    return en.Opening(en.part_id(node.topic, part.number), part.low, part.high, part.parents, writers, channels, more).encode()


def seal_part(node: TopicNode, part: TopicPart) -> bytes:
    """The payload of a SEAL."""
    children = [en.Child(child.number, child.low, child.high, child.group) for child in node.children(part.number)]
    return en.encode_seal(en.part_id(node.topic, part.number), children)


def set_channel(node: TopicNode, channel: TopicChannel) -> bytes:
    """The payload of a CHANNEL, which also removes one."""
    return _channel(node, channel).encode()


def set_topic(node: TopicNode) -> bytes:
    """The payload of a TOPIC."""
    settings = {name: getattr(node, name) for name in SETTINGS}
    return en.TopicSettings(node.topic, node.name, **settings, deleted=bool(node.deleted_at_ms), version=node.version).encode()


def writers_of(sealed: bytes) -> Sequence[KnownWriter]:
    """The writers in a group's answer to a SEAL. Raises `MalformedData`."""
    try:
        return [KnownWriter(*map(int, each)) for each in json.loads(sealed)["writers"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MalformedData(f"the answer to a seal cannot be read: {error!r}") from None


def _channel(node: TopicNode, channel: TopicChannel) -> en.ChannelSettings:
    return en.ChannelSettings(
        channel.channel, node.topic, channel.name, channel.ordered, channel.from_end, channel.max_attempts,
        channel.timeout_ms / 1000, channel.removed, channel.filter, node.version,
    )  # fmt: skip
