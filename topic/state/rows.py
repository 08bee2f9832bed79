"""The state as rows of a table: one for each thing that changes by itself. Pure.

    key    u8 kind, then up to three u64, big-endian       value    a struct or JSON, by kind
    p part                     its range, offsets, children
    w part, writer             q part, parent, writer      state that it inherited
    c channel                  its settings                t topic     its settings
    e topic, writer            the lowest epoch of the writer that may write
    f channel, part            floor and counters          g channel, part, chunk       a bitmap
    h channel, part, offset    waits for a delivery        x channel, part, offset      a dead letter
    r part, base               an object in the store      s part, base, end            one that is to be removed from it

Source: docs/topics.md, "How it is stored".
"""

from __future__ import annotations

import json
import struct
from enum import Enum
from typing import Any, Final

from cluster.topics.entries import ChannelSettings, Child, TopicSettings
from pixiu.objects.manifest import StoredObject
from topic.state.acks import CHUNK
from topic.state.channels import DeadLetter, Progress, Waiting
from topic.state.parts import Part, Writer


class Kind(Enum):
    """Kinds of rows, which are loaded in the order of their keys: a part comes before its writers."""

    PART = b"p"
    WRITER = b"w"
    INHERITED = b"q"
    CHANNEL = b"c"
    PROGRESS = b"f"
    CHUNK = b"g"
    WAITING = b"h"
    DEAD = b"x"
    TOPIC = b"t"
    FENCE = b"e"
    OBJECT = b"r"
    GARBAGE = b"s"


class Tables:
    """The tables of a state."""

    def __init__(self) -> None:
        self.topics: dict[int, TopicSettings] = {}
        """By ID."""
        self.parts: dict[int, Part] = {}
        """By `part_id`."""
        self.channels: dict[int, ChannelSettings] = {}
        self.fences: dict[tuple[int, int], int] = {}
        """(topic, writer) → the lowest epoch of the writer that may write."""
        self.garbage: dict[int, dict[tuple[int, int], StoredObject]] = {}
        """Part → by base and end: objects that are to be removed from the store."""
        self.progress: dict[tuple[int, int], Progress] = {}
        """(channel, part) → state there."""


Key = tuple[Any, ...]
"""(Kind, its numbers)."""
_NUMBERS: Final = {1: struct.Struct(">cQ"), 2: struct.Struct(">cQQ"), 3: struct.Struct(">cQQQ")}
_EPOCH: Final = struct.Struct("<Q")
_WRITER: Final = struct.Struct("<QQQQQ")
_STATE: Final = struct.Struct("<QQ")
_PROGRESS: Final = struct.Struct("<QQQ")
_WAITING: Final = struct.Struct("<QI")
_DEAD: Final = struct.Struct("<QII")


def encode_key(key: Key) -> bytes:
    """The key of a row."""
    kind, *numbers = key
    return _NUMBERS[len(numbers)].pack(kind.value, *numbers)


def decode_key(key: bytes) -> Key:
    """The kind and numbers in a key."""
    kind, *numbers = _NUMBERS[len(key) // 8].unpack(key)
    return (Kind(kind), *numbers)


def value_of(state: Tables, key: Key) -> bytes | None:
    """The present value of a row; None: there is none."""
    kind, *numbers = key
    if kind is Kind.CHANNEL:
        channel = state.channels.get(numbers[0])
        return None if channel is None else channel.encode()
    if kind is Kind.TOPIC:
        topic = state.topics.get(numbers[0])
        return None if topic is None else topic.encode()
    if kind is Kind.FENCE:
        epoch = state.fences.get((numbers[0], numbers[1]))
        return None if epoch is None else _EPOCH.pack(epoch)
    if kind is Kind.GARBAGE:
        garbage = state.garbage.get(numbers[0], {}).get((numbers[1], numbers[2]))
        return None if garbage is None else _of_object(garbage)
    if kind in (Kind.PART, Kind.WRITER, Kind.INHERITED, Kind.OBJECT):
        part = state.parts.get(numbers[0])
        return None if part is None else _of_part(part, kind, numbers)
    progress = state.progress.get((numbers[0], numbers[1]))
    return None if progress is None else _of_progress(progress, kind, numbers)


def _of_part(part: Part, kind: Kind, numbers: list[int]) -> bytes | None:
    if kind is Kind.PART:
        fields = (part.low, part.high, part.parents, part.first, part.end, part.sealed, part.children, part.flags, part.opening)
        return json.dumps((*fields, part.stored, part.stores), separators=(",", ":")).encode()
    if kind is Kind.OBJECT:
        found = part.object_at(numbers[1])
        return None if found is None or found.base != numbers[1] else _of_object(found)
    if kind is Kind.INHERITED:
        inherited = part.inherited.get((numbers[1], numbers[2]))
        return None if inherited is None else _STATE.pack(*inherited)
    writer = part.writers.get(numbers[1])
    return None if writer is None else _WRITER.pack(
        writer.position, writer.progress, writer.seen_us, writer.first, writer.base
    )  # fmt: skip


def _of_object(found: StoredObject) -> bytes:
    return json.dumps(found, separators=(",", ":")).encode()


def _of_progress(progress: Progress, kind: Kind, numbers: list[int]) -> bytes | None:
    if kind is Kind.PROGRESS:
        return _PROGRESS.pack(progress.acks.floor, progress.forgotten, progress.lost)
    number = numbers[2]
    if kind is Kind.CHUNK:
        bits = progress.acks.chunks.get(number)
        return None if bits is None else bits.to_bytes(CHUNK // 8, "little")
    if kind is Kind.WAITING:
        waiting = progress.waiting.get(number)
        return None if waiting is None else _WAITING.pack(*waiting)
    dead = progress.dead.get(number)
    return None if dead is None else _DEAD.pack(dead.at_us, dead.attempts, dead.reason) + dead.text.encode()


def load(state: Tables, key: Key, value: bytes) -> None:
    """Put a row into a state. Rows come in the order of their keys."""
    kind, *numbers = key
    if kind is Kind.CHANNEL:
        state.channels[numbers[0]] = ChannelSettings.decode(value)
    elif kind is Kind.TOPIC:
        state.topics[numbers[0]] = TopicSettings.decode(value)
    elif kind is Kind.FENCE:
        (state.fences[numbers[0], numbers[1]],) = _EPOCH.unpack(value)
    elif kind is Kind.PART:
        low, high, parents, first, end, sealed, children, flags, opening, stored, stores = json.loads(value)
        state.parts[numbers[0]] = Part(
            numbers[0], low, high, tuple(parents), first, end, sealed, tuple(Child(*child) for child in children), flags=flags,
            opening=opening, stored=stored, stores=tuple(stores),
        )  # fmt: skip
    elif kind is Kind.OBJECT:
        state.parts[numbers[0]].objects.append(StoredObject(*json.loads(value)))
    elif kind is Kind.GARBAGE:
        state.garbage.setdefault(numbers[0], {})[numbers[1], numbers[2]] = StoredObject(*json.loads(value))
    elif kind is Kind.WRITER:
        state.parts[numbers[0]].writers[numbers[1]] = Writer(*_WRITER.unpack(value))
    elif kind is Kind.INHERITED:
        position, inherited = _STATE.unpack(value)
        state.parts[numbers[0]].inherited[numbers[1], numbers[2]] = position, inherited
    else:
        _load_progress(state, kind, numbers, value)


def _load_progress(state: Tables, kind: Kind, numbers: list[int], value: bytes) -> None:
    progress = state.progress.setdefault((numbers[0], numbers[1]), Progress())
    if kind is Kind.PROGRESS:
        progress.acks.floor, progress.forgotten, progress.lost = _PROGRESS.unpack(value)
    elif kind is Kind.CHUNK:
        progress.acks.chunks[numbers[2]] = int.from_bytes(value, "little")
    elif kind is Kind.WAITING:
        progress.waiting[numbers[2]] = Waiting(*_WAITING.unpack(value))
    else:
        at_us, attempts, reason = _DEAD.unpack_from(value)
        progress.dead[numbers[2]] = DeadLetter(attempts, reason, at_us, value[_DEAD.size :].decode())
