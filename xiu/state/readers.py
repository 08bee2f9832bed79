"""Readers for which retention waits, by name: records that they have not processed are not trimmed. Pure.

    hold entry    {position u64 | since u64 | size of the name u16 | name}, one after the other
    row           b"o" name: position u64, since u64

A hold is an entry of the partition's log, so that every replica has it, whichever leads and whatever snapshot it began with. Its
time is the entry's: no replica uses its host's clock. A reader not heard of for a while no longer holds anything, so that an
abandoned one does not fill the disk. A partition that came from a doubling inherits its parent's readers: they have read nothing of
it.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pixiu.errors import InvalidArgument, Overloaded
from pixiu.ids import MAX_MSG_SEQUENCE
from xiu.state.keys import HELD, HOLDS

MAX_READERS: Final = 64
"""Limit of readers. Policy: a further one is refused."""
MAX_NAME: Final = 128
EVERYTHING: Final = MAX_MSG_SEQUENCE + 1
"""Position if no reader needs anything; as a reader's position in an entry: the reader is removed."""
_HOLD: Final = struct.Struct("<QQH")


@dataclass(frozen=True, slots=True)
class Held:
    """The position that a reader needs."""

    position: int
    since_us: int
    """Time of its last report, Unix µs; 0 in an entry: the entry's time."""


def encode(readers: Mapping[str, Held]) -> bytes:
    """The payload of a hold entry."""
    parts: list[bytes] = []
    for name, held in readers.items():
        data = name.encode()
        parts += [_HOLD.pack(held.position, held.since_us, len(data)), data]
    return b"".join(parts)


def decode(payload: bytes) -> Iterator[tuple[bytes, Held]]:
    """Decode the result of `encode`; names as bytes."""
    offset = 0
    while offset < len(payload):
        position, since_us, size = _HOLD.unpack_from(payload, offset)
        offset += _HOLD.size + size
        yield payload[offset - size : offset], Held(position, since_us)


def row_of(name: bytes, held: Held) -> tuple[bytes, bytes]:
    """A reader's row in the store."""
    return HOLDS + name, HELD.pack(held.position, held.since_us)


def of_row(key: bytes, value: bytes) -> tuple[str, Held]:
    """Decode the result of `row_of`."""
    return key[len(HOLDS) :].decode(errors="replace"), Held(*HELD.unpack(value))


def alive(readers: Mapping[str, Held], now_us: int, hold_us: int) -> dict[str, Held]:
    """Return the readers heard of recently.

    Args:
        readers: all that are stored.
        now_us: the time that the partition agreed on, Unix µs.
        hold_us: time after which a silent reader is ignored.
    """
    return {name: held for name, held in readers.items() if now_us - held.since_us < hold_us}


def keep_from(readers: Mapping[str, Held]) -> int:
    """The lowest position that a reader needs; `EVERYTHING` if there is none."""
    return min((held.position for held in readers.values()), default=EVERYTHING)


def hold(readers: Mapping[str, Held], name: str, position: int, now_us: int, hold_us: int) -> dict[str, Held]:
    """Make the entry for a reader that needs records from a position on, `EVERYTHING` to remove it; abandoned readers are removed,
    too. Raises InvalidArgument, Overloaded."""
    if not 0 < len(name) <= MAX_NAME or position > EVERYTHING:
        raise InvalidArgument(f"a reader has a name of at most {MAX_NAME} characters, and a position of this partition")
    there = alive(readers, now_us, hold_us)
    if name not in there and len(there) >= MAX_READERS and position != EVERYTHING:
        raise Overloaded(f"{MAX_READERS} readers are known already; let one go first")
    gone = {other: Held(EVERYTHING, 0) for other in readers if other not in there}
    return {**gone, name: Held(position, 0)}


def inherited(readers: Mapping[str, Held]) -> bytes:
    """Encode the same readers for a partition of which they have read nothing."""
    return encode({name: Held(0, held.since_us) for name, held in list(readers.items())[:MAX_READERS]})
