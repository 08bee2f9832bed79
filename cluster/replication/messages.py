"""What replicas of one partition say to each other. Every message carries an epoch: the lower side steps down.

Source: docs/replication.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.replication.model import Entry, Forced, MemberID, Position


@dataclass(frozen=True, slots=True)
class Append:
    """Leader to follower: entries that follow `previous`, or none; every one is a heartbeat too."""

    epoch: int
    sender: MemberID
    previous: Position | None
    """None: a heartbeat for a follower that takes a snapshot, or that waits until an old part of the log has been read."""
    entries: Sequence[Entry]
    committed: int
    end: int
    """The counter of the leader's last entry."""
    sent_at: float
    """The leader's clock; the reply returns it."""
    time_us: int = 0
    """The time that entries carry now, Unix µs; 0: not known yet."""
    forced: tuple[Forced, ...] = ()
    """Where its log began anew by force: a replica that has more must not follow."""


@dataclass(frozen=True, slots=True)
class Appended:
    """Follower to leader: it holds this epoch's log up to `matched`, synced, and took part at `sent_at` in this epoch."""

    epoch: int
    sender: MemberID
    incarnation: int
    matched: int
    sent_at: float
    full: bool = False
    """Its disk has no space for the next entry: no commit can wait for it."""
    wall_us: int = 0
    """Its wall clock, Unix µs; 0: not known."""
    room: bool = False
    """It has space to lead: a leader without may hand over to it."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Follower to leader: it has no entry at `previous`, or another one. The leader tries again from `hint`."""

    epoch: int
    sender: MemberID
    incarnation: int
    hint: int
    sent_at: float
    full: bool = False
    wall_us: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """Reply of a replica that promised a higher epoch than the request's."""

    epoch: int
    sender: MemberID


Message = Append | Appended | Mismatch | Refused
