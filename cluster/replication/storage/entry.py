"""Entries as bytes: in segments on disk, and between replicas. Pure.

    0      4     8       12     13      16        24      32
    ├──────┼─────┼───────┼──────┼───────┼─────────┼───────┼─────────┐
    │ size │ crc │ epoch │ kind │ spare │ counter │ at µs │ payload │   little-endian
    └──────┴─────┴───────┴──────┴───────┴─────────┴───────┴─────────┘
            size counts what follows it; crc covers what follows it

Source: docs/protocol.md, "Record".
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import Final

from cluster.replication.model import Entry
from pixiu.errors import MalformedData

HEAD: Final = struct.Struct("<IIIB3xQQ")
HEAD_BYTES: Final = HEAD.size
assert HEAD_BYTES == 32
MAX_PAYLOAD_BYTES: Final = 16 << 20
"""Largest payload. A head with a larger size counts as damage."""
_SIZE: Final = struct.Struct("<I")
_CRC: Final = struct.Struct("<I")
_CHECKED: Final = struct.Struct("<IB3xQQ")


class Truncated(MalformedData):
    """The bytes end within an entry. `needs`: bytes needed from the beginning of the entry, at least."""

    def __init__(self, text: str, needs: int) -> None:
        super().__init__(text)
        self.needs = needs


def encode(entries: Iterable[Entry]) -> bytes:
    """Encode entries end to end. Raises ValueError for a payload above the limit."""
    parts: list[bytes] = []
    checked, crc32 = _CHECKED.pack, zlib.crc32
    for epoch, counter, kind, at_us, payload in entries:
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"an entry of {len(payload)} bytes is above the limit of {MAX_PAYLOAD_BYTES}")
        body = checked(epoch, kind, counter, at_us)
        parts += (_SIZE.pack(len(payload) + HEAD_BYTES - 4), _CRC.pack(crc32(payload, crc32(body))), body, payload)
    return b"".join(parts)


def decode_one(data: bytes, offset: int, end: int) -> tuple[Entry, int]:
    """The entry at an offset, and the offset after it. Raises Truncated if it does not end before `end`, MalformedData if it is
    broken."""
    if offset + HEAD_BYTES > end:
        raise Truncated("an entry ends within its head", HEAD_BYTES)
    size, crc, epoch, kind, counter, at_us = HEAD.unpack_from(data, offset)
    if not HEAD_BYTES - 4 <= size <= MAX_PAYLOAD_BYTES + HEAD_BYTES - 4:
        raise MalformedData(f"an entry has size {size}")
    behind = offset + 4 + size
    if behind > end:
        raise Truncated("an entry ends in the middle", 4 + size)
    if zlib.crc32(data[offset + 8 : behind]) != crc:
        raise MalformedData("an entry has a wrong CRC")
    return Entry(epoch, counter, kind, at_us, data[offset + HEAD_BYTES : behind]), behind


def decode(data: bytes, max_entries: int) -> list[Entry]:
    """Decode entries from the network. Raises MalformedData."""
    found: list[Entry] = []
    offset, end = 0, len(data)
    while offset < end:
        if len(found) == max_entries:
            raise MalformedData(f"more than {max_entries} entries")
        entry, offset = decode_one(data, offset, end)
        found.append(entry)
    return found
