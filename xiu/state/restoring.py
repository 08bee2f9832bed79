"""Restore of messages that a partition lost with its storage, under their former MsgIDs. Pure.

    restore entry    step u8 | below u64 | blocks      block   first u64 | count u32 | at µs u64 | bytes u32 | records

    sequences    ├─ restored ─┤─ to come: NOT_YET ─┤─ stored since the loss ─▶
                              restored             below

Blocks come in order and without a hole, below everything stored, and in epochs that are over: no leader assigns such sequences any
more, so restored messages and new ones never collide. New mail goes on meanwhile.

Source: docs/stores.md, "Restore".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, Protocol

from pixiu.errors import MalformedData
from pixiu.ids import MSG_COUNTER_BITS
from pixiu.wire.record import MAX_RECORD_BYTES
from xiu.records.batch import check
from xiu.records.block import MAX_BLOCK_RECORDS, Block

MAX_ENTRY_BYTES: Final = 2 << 20
"""Limit of the records restored at once."""
COUNTER_MASK: Final = (1 << MSG_COUNTER_BITS) - 1
_STEP: Final = struct.Struct("<BQ")
_BLOCK: Final = struct.Struct("<QIQI")


class Step(IntEnum):
    """The step of a restore entry. The numbers are those of `RestoreStep` in xiu.proto."""

    BLOCKS = 0
    BEGIN = 1
    END = 2


class Restoring(Protocol):
    """The part of `xiu.state.state.Head` needed here."""

    @property
    def clock_us(self) -> int:
        """The time of the state."""

    @property
    def floor(self) -> int:
        """Records below this sequence were trimmed."""

    @property
    def restored(self) -> int:
        """The highest restored sequence."""

    @property
    def below(self) -> int:
        """Sequence at which the restore ends; 0: none is in progress."""


def encode(step: Step, below: int = 0, blocks: Sequence[Block] = ()) -> bytes:
    """The payload of a restore entry."""
    parts = [_STEP.pack(step, below)]
    for block in blocks:
        parts += (_BLOCK.pack(block.first, block.count, block.at_us, len(block.records)), block.records)
    return b"".join(parts)


def decode(payload: bytes) -> tuple[Step, int, list[Block]]:
    """Decode the result of `encode`."""
    step, below = _STEP.unpack_from(payload)
    offset, blocks = _STEP.size, list[Block]()
    while offset < len(payload):
        first, count, at_us, size = _BLOCK.unpack_from(payload, offset)
        offset += _BLOCK.size + size
        blocks.append(Block(first, count, at_us, payload[offset - size : offset]))
    return Step(step), below, blocks


def check_records(blocks: Sequence[Block], partition: int) -> None:
    """Check that blocks from outside hold whole records of mail. Raises MalformedData."""
    if sum(len(block.records) for block in blocks) > MAX_ENTRY_BYTES or not blocks:
        raise MalformedData(f"blocks with 1 to {MAX_ENTRY_BYTES} bytes of records are restored at once")
    for block in blocks:
        if not 0 < block.count <= MAX_BLOCK_RECORDS:
            raise MalformedData(f"a block has 1 to {MAX_BLOCK_RECORDS} records, not {block.count}")
        # The user's partition was decided when the record was stored, maybe by another layout.
        checked = check(block.records, block.count, partition, 1, MAX_RECORD_BYTES)
        if checked is None:
            raise MalformedData(f"the block at {block.first} is not {block.count} records end to end")
        if checked.refused:
            index, refusal = checked.refused[0]
            raise MalformedData(f"record {block.first + index}: {refusal.text}")


def problem_of(blocks: Sequence[Block], epoch: int, head: Restoring) -> str:
    """Reason why a leader of an epoch cannot restore blocks now; "" if it can."""
    if not head.below:
        return "no restore is under way: begin one"
    expected, latest_us = head.restored + 1 if head.restored else 0, 0
    for block in blocks:
        first_epoch, last_epoch = block.first >> MSG_COUNTER_BITS, block.last >> MSG_COUNTER_BITS
        if first_epoch != last_epoch or last_epoch >= epoch:
            return f"sequence {block.last} is of epoch {last_epoch}; only those before the leader's, {epoch}, are restored"
        if block.first < max(expected, head.floor) or block.last >= head.below:
            return f"sequence {block.first} is not between what was restored ({head.restored}) and what is stored ({head.below})"
        wanted = expected if expected >> MSG_COUNTER_BITS == first_epoch else first_epoch << MSG_COUNTER_BITS | 1
        if expected and block.first != wanted:
            return f"messages are missing: {block.first} cannot follow {expected - 1}"
        if not latest_us <= block.at_us <= head.clock_us:
            return f"sequence {block.first} was stored before the one that it follows, or is to be stored yet"
        expected, latest_us = block.last + 1, block.at_us
    return "" if blocks else "there are no blocks"
