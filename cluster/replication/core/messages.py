"""Messages between the replicas of one partition. Every message carries an epoch; the side with the lower one steps down.

Source: docs/replication.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.replication.model import Entry, Forced, MemberID, Position


@dataclass(frozen=True, slots=True)
class Append:
    """Leader to follower: entries that follow `previous`, or none. Every message is a heartbeat too."""

    epoch: int
    sender: MemberID
    previous: Position | None
    """None: a heartbeat for a follower that takes a snapshot, or that waits until an old part of the log has been read."""
    entries: Sequence[Entry]
    committed: int
    end: int
    """The counter of the leader's last entry."""
    sent_at: float
    """The leader's clock, returned in the reply."""
    time_us: int = 0
    """Time that entries carry now, Unix µs; 0: not known yet."""
    forced: tuple[Forced, ...] = ()
    """Positions where its log began anew by force: a replica that has more must not follow."""


@dataclass(frozen=True, slots=True)
class Appended:
    """Follower to leader: it has synced this epoch's log up to `matched`, and took part in this epoch at `sent_at`."""

    epoch: int
    sender: MemberID
    incarnation: int
    matched: int
    sent_at: float
    full: bool = False
    """Its disk has no space for the next entry: no commit can wait for it."""
    wall_us: int = 0
    """Its wall clock, Unix µs; 0: not known."""
    space: bool = False
    """It has space to lead: a leader without space may hand over to it."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Follower to leader: it has no entry at `previous`, or a different one. The leader tries again from `hint`."""

    epoch: int
    sender: MemberID
    incarnation: int
    hint: int
    sent_at: float
    full: bool = False
    wall_us: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """Reply of a replica that has promised a higher epoch than the request's."""

    epoch: int
    sender: MemberID


Message = Append | Appended | Mismatch | Refused
