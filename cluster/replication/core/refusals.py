"""The errors with which a replica refuses writes, which reach the caller as they are. Pure."""

from __future__ import annotations

from typing import Final

from cluster.replication.core.events import Rejection
from cluster.replication.options import ReplicationOptions
from pixiu.errors import DiskFull, Draining, NotLeader, Overloaded, PixiuError, TooFewInSync

RETRY_AFTER_MS: Final = 100


def not_leader(leader: str) -> NotLeader:
    """Return the refusal of a replica that does not lead. `leader`: host:port of the leader; empty if it is not known."""
    return NotLeader(f"this replica does not lead; the leader is {leader or 'not known'}", leader)


def refusal_of(reason: Rejection, options: ReplicationOptions, leader: str, folder: object) -> PixiuError:
    """Return the error for a reason of the core. `leader`: as in `not_leader`. `folder`: of the log."""
    match reason:
        case Rejection.DRAINING:
            return Draining("this replica is draining; another one takes its place")
        case Rejection.OVERLOADED:
            return Overloaded(f"more than {options.max_uncommitted} entries wait to be replicated", RETRY_AFTER_MS)
        case Rejection.NO_TIME:
            return Overloaded("the clocks of the other replicas are not known yet; retry in a moment", RETRY_AFTER_MS)
        case Rejection.TOO_FEW_IN_SYNC:
            return TooFewInSync(f"fewer than min_in_sync = {options.min_in_sync} replicas are in sync")
        case Rejection.DISK_FULL:
            return DiskFull(f"{folder}: no space left for the log; free some, writes then continue without a restart")
        case Rejection.NOT_LEADER:
            return not_leader(leader)
