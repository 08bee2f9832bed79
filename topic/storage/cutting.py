"""Blocks with a part of their messages: what compaction and mending write in place of whole ones. Pure.

    messages   0 1 2 3 4 5 6 7 8 9     removed: 2 3 4 7
    becomes    [0 1][hole 3][5 6][hole 1][8 9]      offsets stay; a hole is a block without messages

Source: docs/topics.md, "Compaction".
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

from pixiu.wire.block import HEAD, HEAD_BYTES, INDEX_BYTES, MAGIC, U32, VERSION, Block, Flag, Stamp, hole, stamped, with_crc
from topic.storage.segment import Stored

Ranges = Sequence[tuple[int, int]]
"""Offsets [low, high), rising; none touches another."""


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same offsets in the fewest ranges."""
    found = list[tuple[int, int]]()
    for low, high in sorted(ranges):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        elif low < high:
            found.append((low, high))
    return found


def within(ranges: Ranges, low: int, high: int) -> list[tuple[int, int]]:
    """Intersect ranges with [low, high)."""
    return [(max(begin, low), min(end, high)) for begin, end in ranges if begin < high and end > low]


def without(ranges: Ranges, low: int, high: int) -> list[tuple[int, int]]:
    """Ranges without [low, high)."""
    return [*within(ranges, 0, low), *within(ranges, high, 1 << 62)]


def messages_of(stored: Stored, low: int, high: int) -> Stored:
    """A block with the messages at the offsets [low, high) of another one, which has them all."""
    stamp, block, _ = stored
    first, behind = low - stamp.base, high - stamp.base
    if (first, behind) == (0, block.count):
        return stored
    if block.flags & Flag.HOLE:
        return hole_of(block, low, high, stamp.at_us)
    data, at = block.data, HEAD_BYTES + INDEX_BYTES * block.count
    index = data[HEAD_BYTES + INDEX_BYTES * first : HEAD_BYTES + INDEX_BYTES * behind]
    begin = int(U32.unpack_from(data, HEAD_BYTES + INDEX_BYTES * (first - 1))[0]) if first else 0
    end = int(U32.unpack_from(index, len(index) - INDEX_BYTES)[0])
    entries = struct.Struct(f"<{behind - first}Q")  # the end of each is the lowest 32 bits of a number
    index = entries.pack(*[entry - begin for entry in entries.unpack(index)])
    flags = 0
    for each in set(index[6::INDEX_BYTES]):
        flags |= each
    size = HEAD_BYTES + len(index) + end - begin
    head = HEAD.pack(
        MAGIC, VERSION, flags, size, 0, block.topic, block.part, behind - first, block.writer, block.first + first, block.progress
    )
    return _stored(with_crc(head, index, data[at + begin : at + end]), stamp._replace(base=low))


def hole_of(like: Block, low: int, high: int, at_us: int) -> Stored:
    """A block without messages for [low, high) of the part of another one."""
    return _stored(hole(like.topic, like.part, high - low), Stamp(low, at_us, 0))


def _stored(block: bytes, stamp: Stamp) -> Stored:
    return Stored(stamp, Block.checked(block), stamped(block, stamp))


def cut(blocks: Iterable[Stored], removed: Ranges) -> Iterator[Stored]:
    """Blocks that follow each other, without the messages at these offsets. Holes that touch are one."""
    empty: Stored | None = None
    for stored in blocks:
        low, high = stored.stamp.base, stored.stamp.base + stored.block.count
        gone = [(low, high)] if stored.block.flags & Flag.HOLE else within(removed, low, high)
        at = low
        for begin, end in [*gone, (high, high)]:
            if at < begin:
                if empty is not None:
                    yield empty
                    empty = None
                yield messages_of(stored, at, begin)
            if begin < end:
                empty = hole_of(stored.block, empty.stamp.base if empty else begin, end, stored.stamp.at_us)
            at = end
    if empty is not None:
        yield empty


def clipped(blocks: Iterable[Stored], low: int, high: int) -> list[Stored]:
    """Cut blocks that follow each other to [low, high)."""
    found = list[Stored]()
    for stored in blocks:
        begin, end = max(stored.stamp.base, low), min(stored.stamp.base + stored.block.count, high)
        if begin < end:
            found.append(messages_of(stored, begin, end))
    return found
