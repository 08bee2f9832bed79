"""Data shared by the parts of a replica's core: identity, log, durable and committed positions. Pure."""

from __future__ import annotations

from cluster.replication.core.clock import Clock
from cluster.replication.core.events import Committed, Effect, Sync
from cluster.replication.model import Log, MemberID, Position, Presence, Versioned
from cluster.replication.options import ReplicationOptions


class Context:
    """Data shared by the parts of one replica's core.

    Args:
        member: ID of the data directory.
        incarnation: number of this start.
        log: opened and verified.
        applied: last counter that the state holds.
    """

    def __init__(self, member: MemberID, incarnation: int, log: Log, options: ReplicationOptions, applied: int) -> None:
        self.member = member
        self.incarnation = incarnation
        self.log = log
        self.options = options
        self.clock = Clock()
        self.space = True
        """True if there is enough space to lead."""
        self.committed = max(applied, log.first.counter)
        self.read: Versioned | None = None
        """The partition's state as last read."""
        self.live: dict[MemberID, Presence] = {}
        self.issued = 0
        """Ticket of the last change of the log."""
        self.promise = 0
        """Ticket of the last promise."""
        self.synced = 0
        """Every change up to this ticket is durable."""

    @property
    def end(self) -> Position:
        """End of the log, or of a state that has more. Nothing after it was acknowledged here."""
        last = self.log.last
        return last if last.counter >= self.committed else Position(last.epoch, self.committed)

    def sync(self, out: list[Effect]) -> int:
        """Have the last change of the log made durable; returns its ticket."""
        self.issued += 1
        out.append(Sync(self.issued))
        return self.issued

    def promise_epoch(self, epoch: int, out: list[Effect]) -> None:
        """Take nothing from a lower epoch from now on."""
        self.log.promise(epoch)
        self.promise = self.sync(out)

    def commit(self, counter: int, copies: int, out: list[Effect]) -> None:
        """Commit everything up to this counter."""
        self.committed = counter
        out.append(Committed(counter, copies))

    def is_live(self, member: MemberID, incarnation: int) -> bool:
        """True if a session of this incarnation of the member is in the registry, as far as this replica knows."""
        presence = self.live.get(member)
        return presence is not None and presence.incarnation == incarnation
