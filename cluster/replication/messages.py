"""What replicas of one partition say to each other. Every message carries an epoch: the lower side steps down.

Source: docs/replication.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.replication.model import Entry, MemberID, Position


@dataclass(frozen=True, slots=True)
class Append:
    """From the leader: entries that follow `previous`, or none; every one is a heartbeat too."""

    epoch: int
    sender: MemberID
    previous: Position | None
    """None: a heartbeat for a follower that takes a snapshot."""
    entries: Sequence[Entry]
    committed: int
    end: int
    """The counter of the leader's last entry."""
    sent_at: float
    """The leader's clock; the reply returns it."""


@dataclass(frozen=True, slots=True)
class Appended:
    """From a follower: it holds this epoch's log up to `matched`, synced, and took part at `sent_at` in this epoch."""

    epoch: int
    sender: MemberID
    incarnation: int
    matched: int
    sent_at: float


@dataclass(frozen=True, slots=True)
class Mismatch:
    """From a follower: it has no entry at `previous`, or another one. The leader tries again from `hint`."""

    epoch: int
    sender: MemberID
    incarnation: int
    hint: int
    sent_at: float


@dataclass(frozen=True, slots=True)
class Refused:
    """From a replica that promised a higher epoch than the request's."""

    epoch: int
    sender: MemberID


Message = Append | Appended | Mismatch | Refused
