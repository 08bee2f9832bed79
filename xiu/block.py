"""Blocks: what a Xiu stores records in, in RocksDB and in the table alike. Pure.

    key     sequence u64 of the first record                                        big-endian
    value   crc u32 | records u32 | at µs u64 | records end to end                   little-endian; the CRC covers what follows it

A block holds what one entry of the log stored: records under consecutive sequences. One key for a hundred records costs a
hundredth, in RocksDB as in the table, and the CRC covers the records' heads too, which their own does not.

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
"""Of the records in a block, unless one record alone is larger."""


@dataclass(slots=True)
class Block:
    """Records under consecutive sequences."""

    first: int
    """The sequence (Partition_Msg_ID) of the first one."""
    count: int
    at_us: int
    """When the leader took them, Unix µs."""
    records: bytes

    @property
    def last(self) -> int:
        """The sequence of the last one."""
        return self.first + self.count - 1

    def range_of(self, begin: int, end: int) -> tuple[int, int]:
        """Where in `records` the records from one sequence of the block to another begin and end."""
        if (begin, end) == (self.first, self.last):
            return 0, len(self.records)
        return bounds(self, begin)[0], bounds(self, end)[1]


def encode(block: Block) -> bytes:
    """Encode a block as the value that is stored."""
    checked = _CHECKED.pack(block.count, block.at_us)
    crc = zlib.crc32(block.records, zlib.crc32(checked))
    return b"".join((crc.to_bytes(4, "little"), checked, block.records))


def decode(first: int, value: bytes) -> Block | None:
    """The block; None when it is not as it was written."""
    if len(value) < HEAD_BYTES:
        return None
    crc, count, at_us = HEAD.unpack_from(value)
    if zlib.crc32(memoryview(value)[4:]) != crc:
        return None
    return Block(first, count, at_us, value[HEAD_BYTES:])


def bounds(block: Block, sequence: int) -> tuple[int, int]:
    """Where in `records` the record with a sequence of the block begins and ends."""
    data, start = block.records, 0
    for _ in range(sequence - block.first):
        start += SIZE_FIELD + int.from_bytes(data[start : start + SIZE_FIELD], "little")
    end = start + SIZE_FIELD + int.from_bytes(data[start : start + SIZE_FIELD], "little")
    assert start + HEADER_SIZE <= end <= len(data), "a block whose CRC is right holds whole records"
    return start, end
