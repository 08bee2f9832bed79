"""Basic types of replication: positions, entries, the state of a partition in ZooKeeper, and the log as a core sees it.

Source: docs/identifiers.md, docs/protocol.md, "Record", docs/replication.md.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, NewType, Protocol

MemberID = NewType("MemberID", int)
"""ID of a replica's data directory. It is created and kept with the directory, so that an empty disk never passes for a full
one."""

NOBODY: Final = MemberID(0)
"""Leader of a partition that was handed over and not taken yet."""


class Position(NamedTuple):
    """Position in a partition's log. Counters are dense from 1; epochs never fall along the log."""

    epoch: int
    """u32."""
    counter: int
    """u64."""


START: Final = Position(0, 0)
"""Position before the first entry."""


CLOCK: Final = struct.Struct("<Q")
"""Payload of `SET_CLOCK`: Unix µs."""


class EntryKind(IntEnum):
    """Kinds of entries used by replication; roles number theirs from 16."""

    NOOP = 1
    """The first entry of an epoch. Without it, a former leader's entries beyond the common end would stay."""
    DATA = 2
    SET_CLOCK = 3
    """Sets the time of the state back to the payload's (`CLOCK`), as ordered by an operator."""


class Entry(NamedTuple):
    """One entry of the log."""

    epoch: int
    counter: int
    kind: int
    """u8."""
    at_us: int
    """Time when the leader took it, Unix µs."""
    payload: bytes

    @property
    def position(self) -> Position:
        """Position in the log."""
        return Position(self.epoch, self.counter)


MAX_FORCED: Final = 16
"""Forced promotions kept in a partition's state. Policy: the oldest are forgotten."""


class Forced(NamedTuple):
    """An epoch that an operator began by force: entries that others had acknowledged beyond its start were given up."""

    epoch: int
    after: Position
    """Position up to which the promoted replica had the log, or the state."""

    def gave_up(self, end: Position) -> bool:
        """True if a replica whose log ends here has entries that were given up. A log of a lower epoch that ended earlier was
        overtaken in the normal way, by a leader that had everything committed."""
        return end.epoch < self.epoch and end > self.after


@dataclass(frozen=True, slots=True)
class PartitionState:
    """Contents of ZooKeeper's node of a partition; changed only by compare-and-set on its version."""

    epoch: int
    leader: MemberID
    incarnation: int
    """The leader's incarnation when it was promoted."""
    in_sync: frozenset[MemberID]
    forced: tuple[Forced, ...] = ()
    """Forced promotions in the history of the leader's log, rising; at most `MAX_FORCED`."""


@dataclass(frozen=True, slots=True)
class Versioned:
    """A partition's state as read. `state` None: the node is missing, and its version counts as -1."""

    version: int
    state: PartitionState | None


@dataclass(frozen=True, slots=True)
class Presence:
    """A live replica in the registry."""

    node: int
    """Number that ZooKeeper gave to its node."""
    member: MemberID
    incarnation: int
    """Number that grows with every start and every session of the member; kept with its log."""
    end: int = 0
    """Counter of its log's last entry when it registered."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage found when a log was opened: acknowledged entries are missing or broken."""

    position: Position
    """The last entry before the damage."""
    sealed: Position
    """Position up to which the replica had acknowledged; START if the seal itself cannot be read."""
    reason: str


class Log(Protocol):
    """A replica's log as its core uses it. Calls are short and touch memory, at most the page cache.

    Every change is visible to the next call at once, and becomes durable, in order, with the `Sync` effect that follows it.
    """

    @property
    def first(self) -> Position:
        """Position before the first kept entry; START if nothing was trimmed."""

    @property
    def last(self) -> Position:
        """Position of the last entry."""

    @property
    def promised(self) -> int:
        """The highest epoch known to this replica: it takes nothing from a lower one."""

    @property
    def unclean(self) -> bool:
        """True if acknowledged entries may be missing: the replica must not lead until it has been repaired."""

    def epoch_at(self, counter: int) -> int | None:
        """The epoch of an entry from `first` (included) to `last`; None outside."""

    def is_ready(self, counter: int) -> bool:
        """True if an entry and the next one can be read without reading a whole file."""

    def kept_within(self, max_bytes: int) -> int:
        """A counter after which the log has at most this many bytes, or slightly more; the lowest that is cheap to find."""

    def start_of_epoch(self, counter: int) -> int:
        """A kept counter, at most this one, from which on all entries have this one's epoch; the lowest that is cheap to find."""

    def read(self, after: int, max_entries: int, max_bytes: int) -> Sequence[Entry]:
        """Entries from `after` + 1 on, at least one if there is one. `after` is not below `first`."""

    def append(self, entries: Sequence[Entry]) -> None:
        """Append entries that follow the end."""

    def cut(self, after: int) -> None:
        """Drop every entry beyond a counter."""

    def reset(self, position: Position) -> None:
        """Drop everything; the log continues after the position of a snapshot."""

    def trim(self, up_to: int) -> None:
        """Allow entries up to a counter to be removed; the log decides how many."""

    def promise(self, epoch: int) -> None:
        """Raise `promised` to this epoch."""

    def set_unclean(self, unclean: bool) -> None:
        """Set or clear the mark `unclean`."""
