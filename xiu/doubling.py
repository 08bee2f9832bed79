"""Doubling of a Xiu by a cut in the log: phases of a partition, what takes it from one to the next, and whose mail it takes. Pure.

    doubling entry    step u8 | doubling u64 | partitions u32 | split at u64 | split at, Unix µs u64 | fence u64
                      | OPEN: a hold entry's payload

    parent   NONE ── SPLIT: refuses what moved ─────────────── CLEANING ──▶ NONE
    child    LEARNING: takes nothing ── OPEN: takes what moved ── CLEANING ──▶ NONE

A step NONE takes a doubling back before the cut: a SPLIT that was asked for before it names an earlier fence, and does nothing.

Stored messages stay where they are, because their MsgIDs name the partition. So that a mail which the parent has is not stored
again by its child, the child asks the parent for SnowflakeIDs that may be older than the cut, and for derived ones, until none is.

Source: docs/doubling.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from pixiu.ids import SNOWFLAKE_EPOCH_MS
from pixiu.placement.partition import is_partition_count

ASK_AHEAD_MS: Final = 120_000
"""A SnowflakeID may be 60 s ahead of the parent's clock, and that of the child 60 s behind."""
ASK_US: Final = 2 * 24 * 3_600_000_000
"""So long after the cut the parent may know a derived ID: it keeps them by the day."""
_ENTRY: Final = struct.Struct("<BQIQQQ")
_DOUBLING: Final = struct.Struct("<QIBQQQQ")
DOUBLING_BYTES: Final = _DOUBLING.size
"""Of the head, of a partition that was doubled or came from a doubling."""


class Phase(IntEnum):
    """Where the doubling of a partition stands. The numbers are those of `DoublingPhase` in doubling.proto."""

    NONE = 0
    LEARNING = 1
    SPLIT = 2
    OPEN = 3
    CLEANING = 4


_RANK: Final = {Phase.LEARNING: 1, Phase.SPLIT: 2, Phase.OPEN: 2, Phase.CLEANING: 3, Phase.NONE: 3}
"""Of one doubling's phases; the last one is NONE."""


@dataclass(frozen=True, slots=True)
class Doubling:
    """What the log of a partition says of doublings. It stays when a doubling is over."""

    id: int = 0
    """Of the last one; 0: there was none."""
    partitions: int = 0
    """Of the role behind it; 0: the log says nothing, the layout decides."""
    phase: Phase = Phase.NONE
    split_at: int = 0
    """Parent: counter of its last SPLIT entry; child: the parent's."""
    split_us: int = 0
    """Parent: when that was, in the time of its state, Unix µs."""
    cut_us: int = 0
    """Of a partition that came from a doubling: when its parent was split; 0: it did not, or is not open."""
    fence: int = 0
    """Counter of the last entry that took a doubling back."""

    def encode(self) -> bytes:
        """Bytes of the head; none where there was no doubling."""
        if self is NO_DOUBLING or self == NO_DOUBLING:
            return b""
        return _DOUBLING.pack(self.id, self.partitions, self.phase, self.split_at, self.split_us, self.cut_us, self.fence)

    @classmethod
    def decode(cls, data: bytes) -> Doubling:
        """What `encode` made."""
        if not data:
            return NO_DOUBLING
        number, partitions, phase, *others = _DOUBLING.unpack(data)
        return cls(number, partitions, Phase(phase), *others)


NO_DOUBLING: Final = Doubling()


@dataclass(frozen=True, slots=True)
class Change:
    """A step of a doubling, as an entry says it."""

    step: Phase
    doubling: int
    partitions: int
    split_at: int = 0
    """OPEN: counter and time of the parent's SPLIT entry."""
    split_us: int = 0
    holds: bytes = b""
    """OPEN: the parent's readers (`xiu.readers`), which have read nothing of the child."""
    fence: int = 0
    """SPLIT: of the partition, as whoever asks for it has seen it."""

    def encode(self) -> bytes:
        """The payload of a doubling entry."""
        return _ENTRY.pack(self.step, self.doubling, self.partitions, self.split_at, self.split_us, self.fence) + self.holds

    @classmethod
    def decode(cls, payload: bytes) -> Change:
        """What `encode` made."""
        step, number, partitions, split_at, split_us, fence = _ENTRY.unpack_from(payload)
        return cls(Phase(step), number, partitions, split_at, split_us, payload[_ENTRY.size :], fence)


def parent_of(partition: int) -> int:
    """The partition that one came from. Partition 0 came from none."""
    assert partition > 0, "the first partition has no parent"
    return partition - (1 << partition.bit_length() - 1)


def reached(now: Doubling, change: Change) -> bool:
    """Whether a partition has taken this step already, or one behind it."""
    same = now.id == change.doubling and now.partitions == change.partitions
    return same and change.step is not Phase.NONE and _RANK[now.phase] >= _RANK[change.step]


def problem_of(now: Doubling, change: Change, partition: int) -> str:
    """Why a partition cannot take this step; "" if it can."""
    total, step = change.partitions, change.step
    if not change.doubling or not is_partition_count(total) or total < 2 or partition >= total:
        return f"doubling {change.doubling:016x} to {total} partitions does not concern partition {partition}"
    child = partition >= total // 2
    under_way = f"doubling {now.id:016x} of this partition is in phase {now.phase.name}"
    if step is Phase.SPLIT and not child:
        if now.phase not in (Phase.NONE, Phase.OPEN):  # it may have come from the doubling before
            return under_way
        if now.partitions not in (0, total // 2):
            return f"this partition is one of {now.partitions} already"
        return "" if change.fence == now.fence else "a doubling of this partition was taken back since it was looked at; look again"
    if step is Phase.NONE and not child:
        return f"{under_way}: it was split by it already" if now.id == change.doubling else ""
    if step is Phase.LEARNING and child:
        if now.phase is Phase.LEARNING:
            return ""
        return under_way if now.id else ""
    if step is Phase.OPEN and child:
        same = now.id == change.doubling and now.partitions == total and now.phase is Phase.LEARNING
        return "" if same else f"{under_way}: it opens when it was LEARNING of the same doubling"
    if step is Phase.CLEANING:
        same = now.id == change.doubling and now.partitions == total and now.phase in (Phase.SPLIT, Phase.OPEN)
        return "" if same else under_way
    return f"{step.name} is not a step of a {'child' if child else 'parent'}: partition {partition} of {total}"


def after(now: Doubling, change: Change, partition: int, counter: int, clock_us: int) -> Doubling:
    """What stands behind an entry at a counter and a time of the state, Unix µs. One that does not fit changes nothing."""
    if reached(now, change) or problem_of(now, change, partition):
        return now
    number, total = change.doubling, change.partitions
    if change.step is Phase.NONE:
        return replace(now, fence=counter)
    if change.step is Phase.SPLIT:
        return Doubling(number, total, Phase.SPLIT, counter, clock_us, now.cut_us, now.fence)
    if change.step is Phase.LEARNING:
        return Doubling(number, total, Phase.LEARNING)
    if change.step is Phase.OPEN:
        return Doubling(number, total, Phase.OPEN, change.split_at, 0, change.split_us)
    return replace(now, phase=Phase.NONE)


def counted(now: Doubling, layout: int) -> int:
    """How many partitions a partition counts by: its log's number, or the layout's where that is larger or the log has none. One
    whose own number is not below takes nothing: it is a child that is not open."""
    if now.phase is Phase.LEARNING:
        return now.partitions // 2
    return max(now.partitions, layout)


def takes(now: Doubling, partition: int, key: int) -> bool:
    """Whether an entry of the log that was proposed before the last step may store a key's mail behind it."""
    if now.phase is Phase.LEARNING:
        return False
    return now.phase is not Phase.SPLIT or key % now.partitions == partition


def is_asked(now: Doubling, clock_us: int, snowflake: int, derived: bool) -> bool:
    """Whether the parent may have stored a SnowflakeID before the cut. `clock_us`: the time of the child's state."""
    if not now.cut_us or clock_us >= now.cut_us + ASK_US:
        return False
    return derived or snowflake >> 22 < now.cut_us // 1000 - SNOWFLAKE_EPOCH_MS + ASK_AHEAD_MS
