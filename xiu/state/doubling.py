"""Doubling of a Xiu by a cut in the log: a partition's phases, the steps between them, and whose mail it accepts. Pure.

    doubling entry    step u8 | doubling u64 | partitions u32 | split at u64 | split at, Unix µs u64 | fence u64
                      | OPEN: a hold entry's payload

    parent   NONE ── SPLIT: refuses moved users ────────────── CLEANING ──▶ NONE
    child    LEARNING: accepts nothing ── OPEN: accepts moved users ── CLEANING ──▶ NONE

A step NONE takes a doubling back before the cut: a SPLIT requested before it names an earlier fence, and has no effect.

Stored messages stay where they are, because their MsgIDs name the partition. To avoid storing a mail again that the parent has, the
child asks the parent for SnowflakeIDs that may be older than the cut, and for derived ones, as long as there may be any.

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
"""A SnowflakeID may be 60 s ahead of the parent's clock, and the child's clock may be 60 s late."""
ASK_US: Final = 2 * 24 * 3_600_000_000
"""Time after the cut for which the parent may know a derived ID, µs: it keeps them by the day."""
_ENTRY: Final = struct.Struct("<BQIQQQ")
_DOUBLING: Final = struct.Struct("<QIBQQQQ")
DOUBLING_BYTES: Final = _DOUBLING.size
"""Size in the head of a partition that was doubled or came from a doubling."""


class Phase(IntEnum):
    """Phase of a partition in a doubling. The numbers are those of `DoublingPhase` in doubling.proto."""

    NONE = 0
    LEARNING = 1
    SPLIT = 2
    OPEN = 3
    CLEANING = 4


_RANK: Final = {Phase.LEARNING: 1, Phase.SPLIT: 2, Phase.OPEN: 2, Phase.CLEANING: 3, Phase.NONE: 3}
"""Order of one doubling's phases; the last one is NONE."""


@dataclass(frozen=True, slots=True)
class Doubling:
    """State of doublings in a partition's log. It stays when a doubling is over."""

    id: int = 0
    """The last one; 0: there was none."""
    partitions: int = 0
    """Number of the role's partitions after it; 0: the log has none, the layout decides."""
    phase: Phase = Phase.NONE
    split_at: int = 0
    """Parent: counter of its last SPLIT entry; child: the parent's."""
    split_us: int = 0
    """Parent: time of that entry by its state, Unix µs."""
    cut_us: int = 0
    """In a partition that came from a doubling: when its parent was split; 0: in others, or before it is open."""
    fence: int = 0
    """Counter of the last entry that took a doubling back."""

    def encode(self) -> bytes:
        """Encode for the head; empty if there was no doubling."""
        if self is NO_DOUBLING or self == NO_DOUBLING:
            return b""
        return _DOUBLING.pack(self.id, self.partitions, self.phase, self.split_at, self.split_us, self.cut_us, self.fence)

    @classmethod
    def decode(cls, data: bytes) -> Doubling:
        """Decode the result of `encode`."""
        if not data:
            return NO_DOUBLING
        number, partitions, phase, *others = _DOUBLING.unpack(data)
        return cls(number, partitions, Phase(phase), *others)


NO_DOUBLING: Final = Doubling()


@dataclass(frozen=True, slots=True)
class Change:
    """A step of a doubling, as in an entry."""

    step: Phase
    doubling: int
    partitions: int
    split_at: int = 0
    """OPEN: counter and time of the parent's SPLIT entry."""
    split_us: int = 0
    holds: bytes = b""
    """OPEN: the parent's readers (`xiu.state.readers`), which have read nothing of the child."""
    fence: int = 0
    """SPLIT: the partition's fence, as the caller has seen it."""

    def encode(self) -> bytes:
        """Encode as the payload of a doubling entry."""
        return _ENTRY.pack(self.step, self.doubling, self.partitions, self.split_at, self.split_us, self.fence) + self.holds

    @classmethod
    def decode(cls, payload: bytes) -> Change:
        """Decode the result of `encode`."""
        step, number, partitions, split_at, split_us, fence = _ENTRY.unpack_from(payload)
        return cls(Phase(step), number, partitions, split_at, split_us, payload[_ENTRY.size :], fence)


def parent_of(partition: int) -> int:
    """The partition from which one was split. Partition 0 has none."""
    assert partition > 0, "the first partition has no parent"
    return partition - (1 << partition.bit_length() - 1)


def reached(now: Doubling, change: Change) -> bool:
    """True if a partition has taken this step already, or a later one."""
    same = now.id == change.doubling and now.partitions == change.partitions
    return same and change.step is not Phase.NONE and _RANK[now.phase] >= _RANK[change.step]


def problem_of(now: Doubling, change: Change, partition: int) -> str:
    """Reason why a partition cannot take this step; "" if it can."""
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
    """State after an entry at a counter and a time of the state, Unix µs. An unsuitable entry has no effect."""
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
    """Number of partitions by which a partition assigns users: its log's, or the layout's if that is larger or the log has none. A
    partition whose own number is not below it accepts nothing: it is a child that is not open."""
    if now.phase is Phase.LEARNING:
        return now.partitions // 2
    return max(now.partitions, layout)


def takes(now: Doubling, partition: int, key: int) -> bool:
    """True if an entry proposed before the last step may store a key's mail after it."""
    if now.phase is Phase.LEARNING:
        return False
    return now.phase is not Phase.SPLIT or key % now.partitions == partition


def is_asked(now: Doubling, clock_us: int, snowflake: int, derived: bool) -> bool:
    """True if the parent may have stored a SnowflakeID before the cut. `clock_us`: time of the child's state."""
    if not now.cut_us or clock_us >= now.cut_us + ASK_US:
        return False
    return derived or snowflake >> 22 < now.cut_us // 1000 - SNOWFLAKE_EPOCH_MS + ASK_AHEAD_MS
