"""Deliveries cut from stored blocks: slices of the index and of the messages; no message is decoded. Pure.

Source: docs/topics.md, "Blocks".
"""

from __future__ import annotations

import struct

from pixiu.wire.block import HEAD_BYTES, INDEX_BYTES, U32, Block, Stamp
from pixiu.wire.v1 import topic_pb2 as pb


def delivery(number: int, stamp: Stamp, block: Block, low: int, high: int, attempts: int = 1) -> pb.Delivery:
    """Messages [low, high) of a block of part `number`, each delivered for the `attempts`-th time."""
    first, behind, data = low - stamp.base, high - stamp.base, block.data
    at = HEAD_BYTES + INDEX_BYTES * block.count
    index = data[HEAD_BYTES + INDEX_BYTES * first : HEAD_BYTES + INDEX_BYTES * behind]
    end = int(U32.unpack_from(index, len(index) - INDEX_BYTES)[0])
    begin = int(U32.unpack_from(data, HEAD_BYTES + INDEX_BYTES * (first - 1))[0]) if first else 0
    if begin:  # an entry is one number, of which the end is the lowest 32 bits
        entries = struct.Struct(f"<{behind - first}Q")
        index = entries.pack(*[entry - begin for entry in entries.unpack(index)])
    return pb.Delivery(
        part=number, base=low, time_us=stamp.at_us, sender=stamp.sender, writer=block.writer, index=index,
        data=data[at + begin : at + end], attempts=[attempts] * (behind - first) if attempts != 1 else None,
    )  # fmt: skip
