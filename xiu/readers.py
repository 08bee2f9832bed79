"""Readers that retention waits for, by name: what they have not processed is not trimmed. Pure.

    hold entry    {position u64 | since u64 | size of the name u16 | name}, one after the other
    row           b"o" name: position u64, since u64

A hold is an entry of the partition's log, so that every replica has it, whoever leads and whatever snapshot it began with. Its time
is the entry's: no replica asks its host. A reader that was not heard of for a while holds nothing any more, so that one that was
given up does not fill the disk. A partition that came from a doubling inherits its parent's readers: they have read nothing of it.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pixiu.errors import InvalidArgument, Overloaded
from pixiu.ids import MAX_MSG_SEQUENCE
from xiu.keys import HELD, HOLDS

MAX_READERS: Final = 64
"""Policy: a further one is refused."""
MAX_NAME: Final = 128
EVERYTHING: Final = MAX_MSG_SEQUENCE + 1
"""Nobody needs anything. As a reader's position in an entry: it is let go."""
_HOLD: Final = struct.Struct("<QQH")


@dataclass(frozen=True, slots=True)
class Held:
    """What a reader needs."""

    position: int
    since_us: int
    """When it said so, Unix µs; in an entry 0: at the entry's time."""


def encode(readers: Mapping[str, Held]) -> bytes:
    """The payload of a hold entry."""
    parts: list[bytes] = []
    for name, held in readers.items():
        data = name.encode()
        parts += [_HOLD.pack(held.position, held.since_us, len(data)), data]
    return b"".join(parts)


def decode(payload: bytes) -> Iterator[tuple[bytes, Held]]:
    """What `encode` made; names as bytes."""
    offset = 0
    while offset < len(payload):
        position, since_us, size = _HOLD.unpack_from(payload, offset)
        offset += _HOLD.size + size
        yield payload[offset - size : offset], Held(position, since_us)


def row_of(name: bytes, held: Held) -> tuple[bytes, bytes]:
    """A reader's row in the store."""
    return HOLDS + name, HELD.pack(held.position, held.since_us)


def of_row(key: bytes, value: bytes) -> tuple[str, Held]:
    """What `row_of` made."""
    return key[len(HOLDS) :].decode(errors="replace"), Held(*HELD.unpack(value))


def alive(readers: Mapping[str, Held], now_us: int, hold_us: int) -> dict[str, Held]:
    """Readers that were heard of.

    Args:
        readers: all that are stored.
        now_us: the time that the partition agreed on, Unix µs.
        hold_us: how long a reader is waited for that says nothing.
    """
    return {name: held for name, held in readers.items() if now_us - held.since_us < hold_us}


def keep_from(readers: Mapping[str, Held]) -> int:
    """The lowest position that somebody needs; `EVERYTHING` when nobody does."""
    return min((held.position for held in readers.values()), default=EVERYTHING)


def hold(readers: Mapping[str, Held], name: str, position: int, now_us: int, hold_us: int) -> dict[str, Held]:
    """What the entry says by which a reader needs what lies at a position or behind, `EVERYTHING` to let it go: who was given up
    goes with it. Raises InvalidArgument, Overloaded."""
    if not 0 < len(name) <= MAX_NAME or position > EVERYTHING:
        raise InvalidArgument(f"a reader has a name of at most {MAX_NAME} characters, and a position of this partition")
    there = alive(readers, now_us, hold_us)
    if name not in there and len(there) >= MAX_READERS and position != EVERYTHING:
        raise Overloaded(f"{MAX_READERS} readers are known already; let one go first")
    gone = {other: Held(EVERYTHING, 0) for other in readers if other not in there}
    return {**gone, name: Held(position, 0)}


def inherited(readers: Mapping[str, Held]) -> bytes:
    """The same readers for a partition of which they have read nothing, as an entry says it."""
    return encode({name: Held(0, held.since_us) for name, held in list(readers.items())[:MAX_READERS]})
