"""Entries of a group's log: blocks, settlements of channels, and what parts and channels go through. Pure.

    kind 16 BLOCK     u64 sender, block
         17 SETTLE    u64 channel, u64 part, u32 ranges, u32 deferred, u32 dead, then each
                      range: u64 low, u64 high    deferred: u64 offset, u64 delay µs, u32 attempts
                      dead: u64 offset, u32 attempts, u16 reason, u16 size of a text, the text
         18 OPEN  19 SEAL  20 CHANNEL  24 TOPIC   JSON: they are rare
         21 TRIM      u64 part, u64 first offset that is kept
         22 BEGIN     nothing: once it is applied, its leader knows everything that was committed before its epoch
         23 LOST      u64 part, u64 low, u64 high: offsets that no replica can read
         25 DROP      u64 part
         26 SEEK      u64 channel, u64 part, u64 offset
         32 FENCE     u64 topic, u64 writer, u64 epoch: who writes under this name with a lower one writes no more
         27 RESEND    u64 channel, u64 part, u32 offsets, 0 for all dead letters, then each u64
         30 COMPACT   u64 part, u32 ranges, then each u64 low, u64 high: offsets whose messages go; then 16 bytes for each
                      deleted key that is to be forgotten, its digest
         28 UPLOADED  29 REMOVED   JSON: objects of a part that are in the store, and no longer

A part is named by its topic and its number: `part_id`. Numbers in an entry are little-endian.

Source: docs/topics.md, "The log of a group".
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple, get_type_hints

from pixiu.errors import MalformedData
from pixiu.objects.manifest import StoredObject

MAX_TIMEOUT_S: Final = 365 * 24 * 3600.0
"""Longest time-out of a channel, seconds."""
BLOCK: Final = 16
SETTLE: Final = 17
OPEN: Final = 18
SEAL: Final = 19
CHANNEL: Final = 20
TRIM: Final = 21
BEGIN: Final = 22
LOST: Final = 23
TOPIC: Final = 24
DROP: Final = 25
SEEK: Final = 26
RESEND: Final = 27
FENCE: Final = 32
COMPACT: Final = 30
UPLOADED: Final = 28
REMOVED: Final = 29
ADMIN_KINDS: Final = frozenset({OPEN, SEAL, CHANNEL, TRIM, TOPIC, DROP})
"""Entries that the admin may ask a leader to append."""
_U64: Final = struct.Struct("<Q")
_SETTLE: Final = struct.Struct("<QQIII")
_RANGE: Final = struct.Struct("<QQ")
_LOST: Final = struct.Struct("<QQQ")
_SEEK: Final = struct.Struct("<QQQ")
_RESEND: Final = struct.Struct("<QQI")
_COMPACT: Final = struct.Struct("<QI")
DIGEST_BYTES: Final = 16
_DEFERRED: Final = struct.Struct("<QQI")
_DEAD: Final = struct.Struct("<QIHH")
MAX_REASON_BYTES: Final = 256
"""Longest text with which a member rejects a message."""


class Reason(IntEnum):
    """Cause for which a message is among a channel's dead letters."""

    ATTEMPTS = 1
    """Its attempts are used up; the last member refused it."""
    TIMED_OUT = 2
    """Its attempts are used up; the last member took it and never answered."""
    REJECTED = 3
    """A member said that it can never be handled, and why."""


class Deferred(NamedTuple):
    """A message that is to be delivered again."""

    offset: int
    delay_us: int
    """From when the entry was appended."""
    attempts: int
    """Deliveries so far."""


class Dead(NamedTuple):
    """A message that goes to the dead letters."""

    offset: int
    attempts: int
    reason: int
    text: str = ""
    """Reason that the member gave who rejected it; empty for others."""


class Settlement(NamedTuple):
    """Reports of a channel's members on messages of one part, and the fate of those that nobody reported."""

    channel: int
    part: int
    acknowledged: Sequence[tuple[int, int]] = ()
    """Ranges [low, high) of offsets."""
    deferred: Sequence[Deferred] = ()
    dead: Sequence[Dead] = ()

    def encode(self) -> bytes:
        """The payload of its entry."""
        ranges = len(self.acknowledged)
        head = _SETTLE.pack(self.channel, self.part, ranges, len(self.deferred), len(self.dead))
        if ranges == 1:
            parts = [head, _RANGE.pack(*self.acknowledged[0])]
        else:
            parts = [head, struct.pack(f"<{2 * ranges}Q", *chain.from_iterable(self.acknowledged))]
        parts += [_DEFERRED.pack(*each) for each in self.deferred]
        for offset, attempts, reason, said in self.dead:
            text = said.encode()
            parts += [_DEAD.pack(offset, attempts, reason, len(text)), text]
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> Settlement:
        """The settlement in a payload. Raises MalformedData."""
        if len(data) < _SETTLE.size:
            raise MalformedData("a settlement is too short")
        channel, part, ranges, deferred, dead = _SETTLE.unpack_from(data)
        at = _SETTLE.size
        middle = at + ranges * _RANGE.size
        behind = middle + deferred * _DEFERRED.size
        if behind > len(data):
            raise MalformedData("a settlement does not have the size that it says")
        letters = _dead(data, behind, dead)
        return cls(
            channel,
            part,
            list(_RANGE.iter_unpack(data[at:middle])),
            [Deferred(*each) for each in _DEFERRED.iter_unpack(data[middle:behind])],
            letters,
        )


def _dead(data: bytes, at: int, count: int) -> list[Dead]:
    """The dead letters that end a settlement. Raises MalformedData."""
    found = list[Dead]()
    while len(found) < count and at + _DEAD.size <= len(data):
        offset, attempts, reason, size = _DEAD.unpack_from(data, at)
        at += _DEAD.size + size
        try:
            found.append(Dead(offset, attempts, reason, data[at - size : at].decode()))
        except UnicodeDecodeError:
            raise MalformedData("the reason of a dead letter is not UTF-8") from None
    if len(found) < count or at != len(data):
        raise MalformedData("a settlement does not have the size that it says")
    return found


class TopicSettings(NamedTuple):
    """A topic, as the groups that hold parts of it know it."""

    topic: int
    """Its ID, u32, given once in a cluster."""
    name: str
    retention_s: int = 0
    """Age after which messages may be dropped, seconds; 0: never."""
    retention_bytes: int = 0
    """Bytes of a part above which the oldest segments may be dropped; 0: no limit."""
    messages_per_s: int = 0
    """Messages that the topic takes in a second, each part by its share of the slots; 0: no limit."""
    bytes_per_s: int = 0
    """Bytes of blocks, likewise."""
    read_messages_per_s: int = 0
    """Messages that the topic gives in a second to all members and readers, each part by its share of the slots; 0: no limit."""
    read_bytes_per_s: int = 0
    """Bytes of messages, likewise."""
    retain_acknowledged: int = 0
    """1: what all channels have acknowledged may be dropped; 0: only the other limits drop anything."""
    compact: int = 0
    """Seconds for which a tombstone is kept; the last message of each key stays. 0: the topic is not compacted."""
    deleted: bool = False
    """Its parts take no blocks, and its channels no members, until it is restored or its parts are dropped."""
    version: int = 0
    """V of the topic: an entry with a lower one than the state has seen has no effect. 0: always in effect."""
    store: str = ""
    """Folder or URL where closed segments go; empty: as the option `topic.store` says."""

    def encode(self) -> bytes:
        """The payload of its entry."""
        return _json(self._asdict())

    @classmethod
    def decode(cls, data: bytes) -> TopicSettings:
        """The topic in a payload. Raises MalformedData."""
        return cls(**_fields(_unjson(data), cls))


class Child(NamedTuple):
    """A part that follows a sealed one."""

    number: int
    low: int
    high: int
    group: int


class KnownWriter(NamedTuple):
    """State of a writer in a part: its last position there, and its progress."""

    part: int
    """Number of the part."""
    writer: int
    position: int
    progress: int
    epoch: int = 0
    """The lowest epoch with which the writer may still write; 0: any."""


class Opening(NamedTuple):
    """A part that is to be opened."""

    part: int
    """`part_id` of it."""
    low: int
    high: int
    parents: Sequence[int] = ()
    """Numbers of its parents."""
    writers: Sequence[KnownWriter] = ()
    """States of the parents' writers when they were sealed, also what the parents had inherited."""
    channels: Sequence[ChannelSettings] = ()
    """Channels of the topic: each reads a child from its beginning."""
    more: bool = False
    """True: further entries of this kind bring more writers, and only after the last one the part takes blocks."""

    def encode(self) -> bytes:
        """The payload of its entry."""
        return _json(self._asdict() | {"channels": [each._asdict() for each in self.channels]})

    @classmethod
    def decode(cls, data: bytes) -> Opening:
        """The opening in a payload."""
        found = _unjson(data)
        writers = [KnownWriter(*each) for each in found["writers"]]
        channels = [ChannelSettings(**_fields(each, ChannelSettings)) for each in found["channels"]]
        more = bool(found.get("more"))
        return cls(found["part"], found["low"], found["high"], tuple(found["parents"]), writers, channels, more)


class ChannelSettings(NamedTuple):
    """A channel of a topic."""

    channel: int
    """Its ID, u32, given once in a cluster."""
    topic: int
    name: str
    ordered: bool = False
    """False: any message to any member. True: a slot's messages one batch after the other."""
    from_end: bool = False
    """True: it begins at the end that a part has when the channel is made; False: at the first message that is kept."""
    max_attempts: int = 16
    timeout_s: float = 60.0
    """Time after which a message that its member neither acknowledged nor refused is delivered again."""
    removed: bool = False
    filter: str = ""
    """Conditions on headers or an expression; empty: none. See `pixiu.wire.filters`."""
    version: int = 0
    """As of `TopicSettings`."""

    def encode(self) -> bytes:
        """The payload of its entry."""
        return _json(self._asdict())

    @classmethod
    def decode(cls, data: bytes) -> ChannelSettings:
        """The channel in a payload. Raises MalformedData."""
        return cls(**_fields(_unjson(data), cls))


def part_id(topic: int, number: int) -> int:
    """The ID of a part, u64."""
    return topic << 32 | number


def number_of(part: int) -> int:
    """The number of a part in its topic."""
    return part & 0xFFFFFFFF


def topic_of(part: int) -> int:
    """The topic of a part."""
    return part >> 32


def encode_block(sender: int, block: bytes) -> bytes:
    """The payload of a block's entry. `sender`: UIN of the login."""
    return _U64.pack(sender) + block


def decode_block(payload: bytes) -> tuple[int, bytes]:
    """Sender and block of an entry."""
    return int(_U64.unpack_from(payload)[0]), payload[_U64.size :]


def encode_seal(part: int, children: Sequence[Child]) -> bytes:
    """The payload of a seal."""
    return _json({"part": part, "children": children})


def decode_seal(payload: bytes) -> tuple[int, tuple[Child, ...]]:
    """Part and children of a seal."""
    found = _unjson(payload)
    return int(found["part"]), tuple(Child(*each) for each in found["children"])


def encode_trim(part: int, first: int) -> bytes:
    """The payload of a trim."""
    return _RANGE.pack(part, first)


def decode_trim(payload: bytes) -> tuple[int, int]:
    """Part and first kept offset of a trim."""
    part, first = _RANGE.unpack(payload)
    return part, first


def encode_lost(part: int, low: int, high: int) -> bytes:
    """The payload of an entry that gives up the offsets [low, high)."""
    return _LOST.pack(part, low, high)


def decode_lost(payload: bytes) -> tuple[int, int, int]:
    """Part and offsets that are given up."""
    part, low, high = _LOST.unpack(payload)
    return part, low, high


def part_of(payload: bytes) -> int:
    """The part of a TRIM, LOST or COMPACT."""
    return int(_U64.unpack_from(payload)[0])


def encode_drop(part: int) -> bytes:
    """The payload of an entry that drops a part."""
    return _U64.pack(part)


def decode_drop(payload: bytes) -> int:
    """The part that is dropped."""
    return int(_U64.unpack(payload)[0])


def encode_seek(channel: int, part: int, offset: int) -> bytes:
    """The payload of an entry that moves a channel's floor in a part."""
    return _SEEK.pack(channel, part, offset)


def decode_seek(payload: bytes) -> tuple[int, int, int]:
    """Channel, part and offset of a seek."""
    channel, part, offset = _SEEK.unpack(payload)
    return channel, part, offset


def encode_fence(topic: int, writer: int, epoch: int) -> bytes:
    """The payload of an entry that ends lower epochs of a writer."""
    return _LOST.pack(topic, writer, epoch)


def decode_fence(payload: bytes) -> tuple[int, int, int]:
    """Topic, writer and epoch of a fence."""
    topic, writer, epoch = _LOST.unpack(payload)
    return topic, writer, epoch


def encode_resend(channel: int, part: int, offsets: Sequence[int] = ()) -> bytes:
    """The payload of an entry that delivers dead letters again. No offsets: all of them."""
    return _RESEND.pack(channel, part, len(offsets)) + b"".join(map(_U64.pack, offsets))


def decode_resend(payload: bytes) -> tuple[int, int, list[int]]:
    """Channel, part and offsets of a resend. Raises MalformedData."""
    channel, part, count = _RESEND.unpack_from(payload)
    if len(payload) != _RESEND.size + count * _U64.size:
        raise MalformedData("a resend does not have the size that it says")
    return channel, part, [offset for (offset,) in _U64.iter_unpack(payload[_RESEND.size :])]


class Compaction(NamedTuple):
    """Messages of a part that are superseded."""

    part: int
    ranges: Sequence[tuple[int, int]]
    """Offsets [low, high), rising."""
    digests: Sequence[bytes] = ()
    """Of deleted keys that are to be forgotten."""

    def encode(self) -> bytes:
        """The payload of its entry."""
        return b"".join((_COMPACT.pack(self.part, len(self.ranges)), *(_RANGE.pack(*each) for each in self.ranges), *self.digests))

    @classmethod
    def decode(cls, data: bytes) -> Compaction:
        """The messages in a payload. Raises MalformedData."""
        if len(data) < _COMPACT.size:
            raise MalformedData("a compaction is too short")
        part, count = _COMPACT.unpack_from(data)
        at = _COMPACT.size + count * _RANGE.size
        ranges = list(_RANGE.iter_unpack(data[_COMPACT.size : at])) if at <= len(data) else []
        if len(ranges) != count or (len(data) - at) % DIGEST_BYTES:
            raise MalformedData("a compaction does not have the size that it says")
        if any(low >= high for low, high in ranges) or any(one[1] >= other[0] for one, other in pairwise(ranges)):
            raise MalformedData("the ranges of a compaction do not rise")
        return cls(part, ranges, [data[place : place + DIGEST_BYTES] for place in range(at, len(data), DIGEST_BYTES)])


def encode_objects(part: int, objects: Sequence[StoredObject]) -> bytes:
    """The payload of an entry on objects of a part: UPLOADED, they are in the store; REMOVED, they are there no longer."""
    return _json({"part": part, "objects": objects})


def decode_objects(payload: bytes) -> tuple[int, list[StoredObject]]:
    """The part and the objects of an entry."""
    found = _unjson(payload)
    return int(found["part"]), [StoredObject(*each) for each in found["objects"]]


def check(kind: int, payload: bytes) -> None:
    """Check the payload of an entry that somebody asks for, before it comes into the log. Raises MalformedData."""
    decode = _DECODE.get(kind)
    if decode is None:
        raise MalformedData(f"no entry of kind {kind} can be asked for")
    try:
        fits = all(_fits(number, bits) for number, bits in _numbers_of(kind, decode(payload)))
    except (struct.error, ValueError, TypeError, KeyError, AssertionError) as problem:
        raise MalformedData(f"the payload of an entry of kind {kind} cannot be read") from problem
    if not fits:
        raise MalformedData(f"a number in the payload of an entry of kind {kind} is out of range")


def _fits(number: object, bits: int) -> bool:
    return type(number) is int and 0 <= number < 1 << bits


def _numbers_of(kind: int, found: Any) -> Iterator[tuple[object, int]]:
    """Numbers of an entry in JSON, each with the bits that the state has for it."""
    if kind == TOPIC:
        yield from ((found.topic, 32), (found.retention_s, 64), (found.retention_bytes, 64), (found.version, 64))
        yield from ((found.retain_acknowledged, 1), (found.compact, 32))
    elif kind in (UPLOADED, REMOVED):
        yield found[0], 64
        yield from ((number, 64) for each in found[1] for number in each[:-1])
    elif kind == CHANNEL:
        yield from ((found.channel, 32), (found.topic, 32), (found.max_attempts, 32), (found.version, 64))
        yield (0 if 0 < found.timeout_s <= MAX_TIMEOUT_S and found.max_attempts > 0 else -1), 1
    elif kind == SEAL:
        part, children = found
        yield part, 64
        yield from ((number, 32) for child in children for number in child)
    elif kind == OPEN:
        yield from ((found.part, 64), (found.low, 16), (found.high - 1, 16), (found.high - 1 - found.low, 16))
        yield from ((parent, 32) for parent in found.parents)
        for writer in found.writers:
            yield from zip(writer, (32, 64, 63, 64, 64), strict=True)
        for channel in found.channels:
            yield from _numbers_of(CHANNEL, channel)


_DECODE: Final[dict[int, Callable[[bytes], object]]] = {
    OPEN: Opening.decode, SEAL: decode_seal, CHANNEL: ChannelSettings.decode, TRIM: decode_trim, LOST: decode_lost,
    TOPIC: TopicSettings.decode, DROP: decode_drop, SEEK: decode_seek, RESEND: decode_resend, FENCE: decode_fence,
    COMPACT: Compaction.decode, UPLOADED: decode_objects, REMOVED: decode_objects,
}  # fmt: skip
_HINTS: Final = {kind: get_type_hints(kind) for kind in (TopicSettings, ChannelSettings)}


def _json(found: dict[str, Any]) -> bytes:
    return json.dumps(found, separators=(",", ":")).encode()


def _unjson(data: bytes) -> dict[str, Any]:
    found = json.loads(data)
    assert isinstance(found, dict)
    return found


def _fields(found: dict[str, Any], kind: type[TopicSettings | ChannelSettings]) -> dict[str, Any]:
    """Known fields, each of its type; a newer admin may send more."""
    fields = {name: found[name] for name in kind._fields if name in found}
    hints = _HINTS[kind]
    if not all(isinstance(value, (int, float) if hints[name] is float else hints[name]) for name, value in fields.items()):
        raise MalformedData(f"the fields of {kind.__name__} have other types")
    return fields
