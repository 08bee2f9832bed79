"""Blocks: the form in which a Xiu stores records, both in RocksDB and in the table. Pure.

    key     sequence u64 of the first record                                        big-endian
    value   crc u32 | records u32 | at µs u64 | records end to end                   little-endian; the CRC covers what follows it

A block holds the records of one log entry, under consecutive sequences. One key for a hundred records costs a hundredth, in RocksDB
as in the table. The CRC covers the records' heads too, unlike their own CRCs.

Source: docs/protocol.md, "Record", docs/stores.md. Departs from PiXiu §6.1.1 (a key for each message) because of the cost.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

from pixiu.wire.record import HEADER_SIZE, SIZE_FIELD

KEY: Final = struct.Struct(">Q")
HEAD: Final = struct.Struct("<IIQ")
HEAD_BYTES: Final = HEAD.size
_CHECKED: Final = struct.Struct("<IQ")
MAX_BLOCK_RECORDS: Final = 4096
MAX_BLOCK_BYTES: Final = 262_144
"""Size limit of the records in a block, unless one record alone is larger."""


@dataclass(slots=True)
class Block:
    """Records under consecutive sequences."""

    first: int
    """The sequence (Partition_Msg_ID) of the first one."""
    count: int
    at_us: int
    """Time at which the leader accepted them, Unix µs."""
    records: bytes

    @property
    def last(self) -> int:
        """The sequence of the last one."""
        return self.first + self.count - 1

    def range_of(self, begin: int, end: int) -> tuple[int, int]:
        """Offsets in `records` of the records from one sequence of the block to another, the end excluded."""
        if (begin, end) == (self.first, self.last):
            return 0, len(self.records)
        return bounds(self, begin)[0], bounds(self, end)[1]


def encode(block: Block) -> bytes:
    """Encode a block as the stored value."""
    checked = _CHECKED.pack(block.count, block.at_us)
    crc = zlib.crc32(block.records, zlib.crc32(checked))
    return b"".join((crc.to_bytes(4, "little"), checked, block.records))


def decode(first: int, value: bytes) -> Block | None:
    """Decode a block; None if it is damaged."""
    if len(value) < HEAD_BYTES:
        return None
    crc, count, at_us = HEAD.unpack_from(value)
    if zlib.crc32(memoryview(value)[4:]) != crc:
        return None
    return Block(first, count, at_us, value[HEAD_BYTES:])


def bounds(block: Block, sequence: int) -> tuple[int, int]:
    """Offsets in `records` of the record with a sequence of the block, the end excluded."""
    data, start = block.records, 0
    for _ in range(sequence - block.first):
        start += SIZE_FIELD + int.from_bytes(data[start : start + SIZE_FIELD], "little")
    end = start + SIZE_FIELD + int.from_bytes(data[start : start + SIZE_FIELD], "little")
    assert start + HEADER_SIZE <= end <= len(data), "a block whose CRC is right holds whole records"
    return start, end
