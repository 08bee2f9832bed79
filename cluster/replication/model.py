"""What replication speaks about: positions, entries, the state of a partition in ZooKeeper, and the log as a core sees it.

Source: docs/identifiers.md, docs/protocol.md, "Record", docs/replication.md.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, NewType, Protocol

MemberID = NewType("MemberID", int)
"""A replica's data directory: made once with it and kept in it, so that an empty disk never passes for a full one."""

NOBODY: Final = MemberID(0)
"""The leader of a partition that was handed over and not taken yet."""


class Position(NamedTuple):
    """A place in a partition's log. Counters are dense from 1; epochs never fall along the log."""

    epoch: int
    """u32."""
    counter: int
    """u64."""


START: Final = Position(0, 0)
"""Before the first entry."""


CLOCK: Final = struct.Struct("<Q")
"""Unix µs."""


class EntryKind(IntEnum):
    """Kinds of entries that replication knows; roles number theirs from 16."""

    NOOP = 1
    """The first entry of an epoch. Without it what a former leader left beyond the common end would stay there."""
    DATA = 2
    SET_CLOCK = 3
    """The time of the state goes back to the payload's (`CLOCK`), by an operator's word."""


class Entry(NamedTuple):
    """One entry of the log."""

    epoch: int
    counter: int
    kind: int
    """u8."""
    at_us: int
    """When the leader took it, Unix µs."""
    payload: bytes

    @property
    def position(self) -> Position:
        """Where it is in the log."""
        return Position(self.epoch, self.counter)


MAX_FORCED: Final = 16
"""Forced promotions that a partition's state remembers. Policy: the oldest are forgotten."""


class Forced(NamedTuple):
    """An epoch that began by an operator's force: what others had acknowledged beyond its beginning was given up."""

    epoch: int
    after: Position
    """Up to here the promoted replica had the log, or the state."""

    def gave_up(self, end: Position) -> bool:
        """Whether a replica whose log ends here has entries that were given up. Logs that ended before in a lower epoch were
        overtaken, as always, by a leader that had all that was committed."""
        return end.epoch < self.epoch and end > self.after


@dataclass(frozen=True, slots=True)
class PartitionState:
    """What ZooKeeper holds of a partition; it changes only by compare-and-set on its version."""

    epoch: int
    leader: MemberID
    incarnation: int
    """The leader's, when it was promoted."""
    in_sync: frozenset[MemberID]
    forced: tuple[Forced, ...] = ()
    """Forced promotions that the leader's log goes back to, rising; at most `MAX_FORCED`."""


@dataclass(frozen=True, slots=True)
class Versioned:
    """A partition's state as it was read. `state` None: the node is not there, its version counts as -1."""

    version: int
    state: PartitionState | None


@dataclass(frozen=True, slots=True)
class Presence:
    """A live replica in the registry."""

    node: int
    """The number that ZooKeeper gave its node."""
    member: MemberID
    incarnation: int
    """Grows with every start and every session of the member; kept with its log."""
    end: int = 0
    """The counter of its log's last entry when it registered."""


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with a log that was opened: entries that were acknowledged are missing or broken."""

    position: Position
    """The last entry before the damage."""
    sealed: Position
    """Up to here the replica had acknowledged; START when the seal itself cannot be read."""
    reason: str


class Log(Protocol):
    """A replica's log as its core uses it. Calls are short and touch memory, at most the page cache.

    Every change is seen by the next call at once and becomes durable, in order, by the `Sync` effect that follows it.
    """

    @property
    def first(self) -> Position:
        """The last position that is no longer kept; START when nothing was trimmed."""

    @property
    def last(self) -> Position:
        """Position of the last entry."""

    @property
    def promised(self) -> int:
        """The highest epoch that this replica knows of: it takes nothing from a lower one."""

    @property
    def unclean(self) -> bool:
        """Acknowledged entries may be missing: the replica must not lead until it has been repaired."""

    def epoch_at(self, counter: int) -> int | None:
        """The epoch of an entry between `first` (included) and `last`; None outside."""

    def is_ready(self, counter: int) -> bool:
        """Whether an entry and what follows it can be looked at without reading a whole file."""

    def kept_within(self, max_bytes: int) -> int:
        """A counter behind which the log has at most so many bytes, or a little more; the lowest that is cheap to find."""

    def start_of_epoch(self, counter: int) -> int:
        """A counter kept, at most this one, from which on all entries have this one's epoch; the lowest that is cheap to find."""

    def read(self, after: int, max_entries: int, max_bytes: int) -> Sequence[Entry]:
        """Entries from `after` + 1 on, at least one if there is one. `after` is not below `first`."""

    def append(self, entries: Sequence[Entry]) -> None:
        """Entries that follow the end."""

    def cut(self, after: int) -> None:
        """Drop every entry beyond a counter."""

    def reset(self, position: Position) -> None:
        """Drop everything; the log goes on after a position that a snapshot stands for."""

    def trim(self, up_to: int) -> None:
        """Entries up to a counter are no longer needed; how many of them go is the log's choice."""

    def promise(self, epoch: int) -> None:
        """Raise `promised` to this epoch."""

    def set_unclean(self, unclean: bool) -> None:
        """Set or clear the mark `unclean`."""
