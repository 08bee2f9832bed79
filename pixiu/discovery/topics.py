"""Topics as the registry has them: a JSON node for each, which the leading admin writes; reading it.

    ROOT/topics                 the last numbers given to topics and channels: {"topic": 12, "channel": 40}
    ROOT/topics/NAME            {"topic": 7, "version": 3, "settings": {…}, "parts": [{…}], "channels": [{…}], …}

    part:   opening ──▶ open ──▶ sealing ──▶ sealed ──▶ dropping ──▶ gone
    topic:  there ──▶ deleted (in the bin) ──▶ purging ──▶ gone          restored from the bin, until it is purged

Source: docs/topics.md, "Administration".
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Final

from pixiu.discovery import paths
from pixiu.discovery.node import integer, json_object
from pixiu.discovery.operations import NoNode, Watch
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import InvalidArgument, MalformedData
from pixiu.ids import MAX_ID
from pixiu.placement.partition import MAX_PARTITIONS
from pixiu.placement.slots import MAX_PARTS, SLOTS, Lineage, Part

MAX_TOPICS: Final = 10_000
"""Topics of a cluster, those in the bin included. Policy: one more is refused."""
MAX_CHANNELS: Final = 1_000
"""Channels of a topic. Policy: one more is refused."""
MAX_TOPIC_BYTES: Final = 512 << 10
"""Limit of a topic's node. Policy: a change that would make it larger is refused."""
MAX_FILTER: Final = 4_096
"""Limit of a channel's filter, characters."""
MAX_ATTEMPTS: Final = 10_000
MAX_TIMEOUT_MS: Final = 24 * 3_600_000
MIN_TIMEOUT_MS: Final = 100
DEFAULT_ATTEMPTS: Final = 16
DEFAULT_TIMEOUT_MS: Final = 60_000
MAX_NUMBER: Final = (1 << 32) - 1
"""The last number of a topic, a channel or a part."""
MAX_COUNTER_BYTES: Final = 1_024

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)


def check_name(name: str, what: str = "topic") -> str:
    """Check the name of a topic or a channel; returns it. Raises `InvalidArgument`."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise InvalidArgument(f"the name of a {what} has 1 to 128 letters, digits, '.', '_' or '-', not {name[:140]!r}")
    return name


class PartState(StrEnum):
    """State of a part."""

    OPENING = "opening"
    """Planned: its group may not hold it yet."""
    OPEN = "open"
    SEALING = "sealing"
    """To be sealed: its group may still take blocks."""
    SEALED = "sealed"
    DROPPING = "dropping"
    """All of it is gone by retention: its group is to forget it."""


ENDED: Final = frozenset((PartState.SEALING, PartState.SEALED, PartState.DROPPING))
"""States of parts whose slots have newer parts."""


@dataclass(frozen=True, slots=True)
class TopicPart:
    """A part of a topic."""

    number: int
    low: int
    high: int
    """The slots [low, high)."""
    group: int
    state: PartState = PartState.OPENING
    parents: tuple[int, ...] = ()
    sealed_at_ms: int = 0
    """Time at which all replicas had its seal, Unix milliseconds; 0: they do not have it."""


@dataclass(frozen=True, slots=True)
class TopicChannel:
    """A channel of a topic."""

    channel: int
    """Its ID, given once in a cluster."""
    name: str
    ordered: bool = False
    from_end: bool = False
    max_attempts: int = DEFAULT_ATTEMPTS
    timeout_ms: int = DEFAULT_TIMEOUT_MS
    filter: str = ""
    """JSON if it begins with [, else an expression; empty: none."""
    version: int = 0
    """V of the topic when the channel was changed last."""
    removed: bool = False
    """True until all groups have forgotten it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings:
    """A topic's settings: fields of the same names in its TOPIC entry and in `pixiu.v1.TopicSettings`."""

    retention_s: int = 0
    """Age after which messages may be dropped, seconds; 0: never."""
    retention_bytes: int = 0
    """Bytes of a part above which its oldest segments may be dropped; 0: no limit."""
    messages_per_s: int = 0
    """Messages that the topic takes in a second; 0: no limit."""
    bytes_per_s: int = 0
    """Bytes of blocks that the topic takes in a second; 0: no limit."""
    read_messages_per_s: int = 0
    """Messages that the topic gives in a second, to all members and readers; 0: no limit."""
    read_bytes_per_s: int = 0
    """Bytes of messages that the topic gives in a second; 0: no limit."""
    retain_acknowledged: int = 0
    """1: what all channels have acknowledged may be dropped."""
    compact: int = 0
    """Seconds for which a tombstone is kept; the last message of each key stays. 0: the topic is not compacted."""
    store: str = ""
    """Folder or URL where closed segments go; empty: as the groups' option says."""


SETTINGS: Final = tuple(each.name for each in fields(TopicSettings))


@dataclass(frozen=True, slots=True)
class TopicNode(TopicSettings):
    """All that the registry knows of a topic. Source: docs/topics.md."""

    name: str
    topic: int
    """Its ID, given once in a cluster."""
    version: int
    """V: rises with every change."""
    parts: tuple[TopicPart, ...]
    """By number."""
    channels: tuple[TopicChannel, ...] = ()
    deleted_at_ms: int = 0
    """Time of its deletion, Unix milliseconds; 0: it is not deleted."""
    purge_at_ms: int = 0
    """Time from which a deleted topic's messages are removed."""
    purging: bool = False
    """True if its messages are being removed: it cannot be restored any more."""
    settled: int = 0
    """The version that all groups have confirmed."""
    _by_number: dict[int, TopicPart] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Build the index of parts."""
        object.__setattr__(self, "_by_number", {part.number: part for part in self.parts})

    def part(self, number: int) -> TopicPart | None:
        """The part of this number; None: there is none."""
        return self._by_number.get(number)

    def channel(self, name: str) -> TopicChannel | None:
        """The channel of this name; None: there is none."""
        return next((each for each in self.channels if each.name == name and not each.removed), None)

    @property
    def groups(self) -> tuple[int, ...]:
        """Groups that hold parts of it, rising."""
        return tuple(sorted({part.group for part in self.parts}))

    def lineage(self) -> Lineage:
        """The parts in their order. Raises `InvalidArgument` if they do not fit together."""
        return Lineage(Part(each.number, each.low, each.high, each.group, each.parents, each.state in ENDED) for each in self.parts)

    def children(self, number: int) -> tuple[TopicPart, ...]:
        """The parts that follow a part."""
        return tuple(part for part in self.parts if number in part.parents)

    def to_json(self) -> bytes:
        """Encode the data of its node. Raises `InvalidArgument` above `MAX_TOPIC_BYTES`."""
        found = {
            "topic": self.topic,
            "version": self.version,
            "settings": {name: getattr(self, name) for name in SETTINGS},
            "parts": [_part_json(part) for part in self.parts],
            "channels": [_channel_json(channel) for channel in self.channels],
            "deleted_at_ms": self.deleted_at_ms,
            "purge_at_ms": self.purge_at_ms,
            "purging": self.purging,
            "settled": self.settled,
        }
        data = json.dumps(found, separators=(",", ":")).encode()
        if len(data) > MAX_TOPIC_BYTES:
            raise InvalidArgument(
                f"topic {self.name} would need {len(data):,} bytes in the registry; at most {MAX_TOPIC_BYTES:,} are stored: "
                "use fewer parts or channels"
            )
        return data

    @classmethod
    def from_json(cls, name: str, data: bytes) -> TopicNode:
        """Decode the data of a topic's node; unknown keys are ignored. Raises `MalformedData`."""
        what = f"topic {name[:128]}"
        found = json_object(data, MAX_TOPIC_BYTES, what)
        settings = _object(found.get("settings"), what)
        parts = tuple(_part(_object(each, what), what) for each in _list(found, "parts", MAX_PARTS, what))
        channels = tuple(_channel(_object(each, what), what) for each in _list(found, "channels", 2 * MAX_CHANNELS, what))
        node = cls(
            name=name,
            topic=integer(found, "topic", 1, MAX_NUMBER),
            version=integer(found, "version", 1, MAX_ID),
            parts=parts,
            channels=channels,
            **{name: integer(settings, name, 0, MAX_ID, 0) for name in SETTINGS if name != "store"},
            store=_text(settings, "store", what),
            deleted_at_ms=integer(found, "deleted_at_ms", 0, MAX_ID, 0),
            purge_at_ms=integer(found, "purge_at_ms", 0, MAX_ID, 0),
            purging=_flag(found, "purging", what),
            settled=integer(found, "settled", 0, MAX_ID, 0),
        )
        try:
            node.lineage()
        except InvalidArgument as error:
            raise MalformedData(f"{what}: {error}") from None
        return node


@dataclass(frozen=True, slots=True)
class Numbers:
    """The last numbers that were given to topics and channels of a cluster."""

    topic: int = 0
    channel: int = 0

    def to_json(self) -> bytes:
        """Encode the data of the node of topics."""
        return json.dumps({"topic": self.topic, "channel": self.channel}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Numbers:
        """Decode them; an empty node means that none was given. Raises `MalformedData`."""
        found = json_object(data or b"{}", MAX_COUNTER_BYTES, "the numbers of topics")
        return cls(integer(found, "topic", 0, MAX_NUMBER, 0), integer(found, "channel", 0, MAX_NUMBER, 0))


async def read_topic(
    zookeeper: ZooKeeper, root: str, name: str, watch: Watch | None = None
) -> tuple[TopicNode, int] | None:  # fmt: skip
    """Read a topic's node and the version of the node for compare-and-set; None: there is no such topic. The watch fires when a
    topic that there is changes.

    Raises `InvalidArgument` for an impossible name, `MalformedData`, `RegistryUnavailable`.
    """
    try:
        data, stat = await zookeeper.get(paths.topic(root, check_name(name)), watch)
    except NoNode:
        return None
    return TopicNode.from_json(name, data), stat.version


async def topic_names(zookeeper: ZooKeeper, root: str, watch: Watch | None = None) -> list[str]:
    """Read the names of all topics, sorted. The watch fires when there are others. Raises `RegistryUnavailable`."""
    try:
        return [name for name in await zookeeper.children(paths.topics(root), watch) if _NAME.fullmatch(name)]
    except NoNode:
        return []


def _part_json(part: TopicPart) -> dict[str, object]:
    found: dict[str, object] = {
        "number": part.number, "low": part.low, "high": part.high, "group": part.group, "state": part.state.value,
    }  # fmt: skip
    if part.parents:
        found["parents"] = list(part.parents)
    if part.sealed_at_ms:
        found["sealed_at_ms"] = part.sealed_at_ms
    return found


def _part(found: dict[str, object], what: str) -> TopicPart:
    parents = found.get("parents", [])
    if not isinstance(parents, list) or not all(type(each) is int and 0 < each <= MAX_NUMBER for each in parents):
        raise MalformedData(f"{what}: the parents of a part are not a list of numbers")
    try:
        state = PartState(str(found.get("state")))
    except ValueError:
        raise MalformedData(f"{what}: a part has the unknown state {str(found.get('state'))[:40]!r}") from None
    return TopicPart(
        integer(found, "number", 1, MAX_NUMBER),
        integer(found, "low", 0, SLOTS - 1),
        integer(found, "high", 1, SLOTS),
        integer(found, "group", 0, MAX_PARTITIONS - 1),
        state,
        tuple(parents),
        integer(found, "sealed_at_ms", 0, MAX_ID, 0),
    )


def _channel_json(channel: TopicChannel) -> dict[str, object]:
    found: dict[str, object] = {
        "channel": channel.channel, "name": channel.name, "ordered": channel.ordered, "from_end": channel.from_end,
        "max_attempts": channel.max_attempts, "timeout_ms": channel.timeout_ms, "version": channel.version,
    }  # fmt: skip
    if channel.filter:
        found["filter"] = channel.filter
    if channel.removed:
        found["removed"] = True
    return found


def _channel(found: dict[str, object], what: str) -> TopicChannel:
    name, filter_ = found.get("name"), found.get("filter", "")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise MalformedData(f"{what}: a channel has no proper name")
    if not isinstance(filter_, str) or len(filter_) > MAX_FILTER:
        raise MalformedData(f"{what}: the filter of channel {name} is not a text of at most {MAX_FILTER} characters")
    return TopicChannel(
        integer(found, "channel", 1, MAX_NUMBER),
        name,
        _flag(found, "ordered", what),
        _flag(found, "from_end", what),
        integer(found, "max_attempts", 1, MAX_ATTEMPTS),
        integer(found, "timeout_ms", MIN_TIMEOUT_MS, MAX_TIMEOUT_MS),
        filter_,
        integer(found, "version", 0, MAX_ID, 0),
        _flag(found, "removed", what),
    )


def _flag(found: dict[str, object], key: str, what: str) -> bool:
    value = found.get(key, False)
    if not isinstance(value, bool):
        raise MalformedData(f"{what}: {key} must be true or false")
    return value


def _text(found: dict[str, object], key: str, what: str) -> str:
    value = found.get(key, "")
    if not isinstance(value, str):
        raise MalformedData(f"{what}: {key} must be a text")
    return value


def _object(value: object, what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise MalformedData(f"{what}: a JSON object is missing")
    return value


def _list(found: dict[str, object], key: str, limit: int, what: str) -> list[object]:
    value = found.get(key)
    if not isinstance(value, list) or len(value) > limit:
        raise MalformedData(f"{what}: {key} must be a list of at most {limit}")
    return value
