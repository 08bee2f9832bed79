"""What the parts of a replica's core share: who it is, its log, what is durable, what is committed. Pure."""

from __future__ import annotations

from cluster.replication.clock import Clock
from cluster.replication.events import Committed, Effect, Sync
from cluster.replication.model import Log, MemberID, Position, Presence, Versioned
from cluster.replication.options import ReplicationOptions


class Context:
    """What the parts of one replica's core share.

    Args:
        member: its data directory.
        incarnation: of this start.
        log: opened and verified.
        applied: its state holds everything up to this counter.
    """

    def __init__(self, member: MemberID, incarnation: int, log: Log, options: ReplicationOptions, applied: int) -> None:
        self.member = member
        self.incarnation = incarnation
        self.log = log
        self.options = options
        self.clock = Clock()
        self.room = True
        """There is space here for what a leader takes."""
        self.committed = max(applied, log.first.counter)
        self.read: Versioned | None = None
        """The state as it was read last."""
        self.live: dict[MemberID, Presence] = {}
        self.issued = 0
        """The ticket of the last change of the log."""
        self.promise = 0
        """The ticket of the last promise."""
        self.synced = 0
        """Every change up to this ticket is durable."""

    @property
    def end(self) -> Position:
        """The end of the log, or of a state that has more: nothing behind it was acknowledged here."""
        last = self.log.last
        return last if last.counter >= self.committed else Position(last.epoch, self.committed)

    def sync(self, out: list[Effect]) -> int:
        """The log was changed: have it made durable; returns the ticket."""
        self.issued += 1
        out.append(Sync(self.issued))
        return self.issued

    def promise_epoch(self, epoch: int, out: list[Effect]) -> None:
        """Take nothing from a lower epoch from here on."""
        self.log.promise(epoch)
        self.promise = self.sync(out)

    def commit(self, counter: int, copies: int, out: list[Effect]) -> None:
        """Everything up to here is committed."""
        self.committed = counter
        out.append(Committed(counter, copies))

    def is_live(self, member: MemberID, incarnation: int) -> bool:
        """Whether a member's session of this incarnation is in the registry, as far as this replica knows."""
        presence = self.live.get(member)
        return presence is not None and presence.incarnation == incarnation
