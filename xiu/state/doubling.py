"""Doubling of a Xiu by a cut in the log: `cluster.store.doubling`, what a child opens with, and whose mail is accepted. Pure.

    OPEN    split at u64 | split at, Unix µs u64 | a hold entry's payload

CLEAN leads to NONE at once: stored messages stay where they are, because their MsgIDs name the partition. To avoid storing a mail
again that the parent has, the child asks the parent for SnowflakeIDs that may be older than the cut, and for derived ones, as long
as there may be any.

Source: docs/doubling.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Final

from cluster.store.doubling import phases
from cluster.store.doubling.phases import RECORD_BYTES, Command, Phase, Step, taken
from pixiu.ids import SNOWFLAKE_EPOCH_MS

ASK_AHEAD_MS: Final = 120_000
"""A SnowflakeID may be 60 s ahead of the parent's clock, and the child's clock may be 60 s late."""
ASK_US: Final = 2 * 24 * 3_600_000_000
"""Time after the cut for which the parent may know a derived ID, µs: it keeps them by the day."""
_OPEN: Final = struct.Struct("<QQ")
_CUT: Final = struct.Struct("<QQ")
DOUBLING_BYTES: Final = RECORD_BYTES + _CUT.size
"""Size in the head of a partition that was doubled or came from a doubling."""


@dataclass(frozen=True, slots=True)
class Record(phases.Record):
    """State of doublings in a partition's log."""

    split_us: int = 0
    """Parent: time of its last SPLIT entry by its state, Unix µs."""
    cut_us: int = 0
    """In a partition that came from a doubling: when its parent was split; 0: in others, or before it is open."""

    def encode(self) -> bytes:
        """Encode for the head; empty if there was no doubling."""
        if self is NO_RECORD or self == NO_RECORD:
            return b""
        return self._packed() + _CUT.pack(self.split_us, self.cut_us)

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """Decode the result of `encode`."""
        return cls(*phases.unpacked(data), *_CUT.unpack_from(data, RECORD_BYTES)) if data else NO_RECORD


NO_RECORD: Final = Record()


def opening(split_at: int, split_us: int, holds: bytes = b"") -> bytes:
    """The body of OPEN.

    Args:
        split_at, split_us: counter and time of the parent's SPLIT entry.
        holds: the parent's readers (`xiu.state.readers`), which have read nothing of the child.
    """
    return _OPEN.pack(split_at, split_us) + holds


def holds_of(command: Command) -> bytes:
    """The readers in a body of OPEN; nothing in those of other steps."""
    return command.body[_OPEN.size :]


def parent_of(partition: int) -> int:
    """The partition from which one was split. Partition 0 has none."""
    assert partition > 0, "the first partition has no parent"
    return partition - (1 << partition.bit_length() - 1)


def after(now: Record, command: Command, counter: int, clock_us: int) -> Record:
    """State after an entry at a counter and a time of the state, Unix µs. An unsuitable entry has no effect."""
    made = taken(now, command, counter)
    if made is None:
        return now
    match command.step:
        case Step.SPLIT:
            return replace(made, split_us=clock_us)
        case Step.OPEN:
            split_at, cut_us = _OPEN.unpack_from(command.body)
            return replace(made, split_at=split_at, cut_us=cut_us)
        case Step.CLEAN:
            return replace(made, phase=Phase.NONE)
        case _:
            return made


def takes(now: Record, partition: int, key: int) -> bool:
    """True if an entry proposed before the last step may store a key's mail after it."""
    if now.phase is Phase.LEARNING:
        return False
    return now.phase is not Phase.SPLIT or key % now.partitions == partition


def is_asked(now: Record, clock_us: int, snowflake: int, derived: bool) -> bool:
    """True if the parent may have stored a SnowflakeID before the cut. `clock_us`: time of the child's state."""
    if not now.cut_us or clock_us >= now.cut_us + ASK_US:
        return False
    return derived or snowflake >> 22 < now.cut_us // 1000 - SNOWFLAKE_EPOCH_MS + ASK_AHEAD_MS
