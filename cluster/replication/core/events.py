"""Events and effects of a replica's core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from cluster.replication.core.messages import Message
from cluster.replication.model import Damage, MemberID, PartitionState, Position, Presence, Versioned


class CompareAndSetOutcome(Enum):
    """The result of a compare-and-set."""

    OK = "ok"
    CONFLICT = "conflict"
    """The version differed; nothing was changed."""
    UNKNOWN = "unknown"
    """No answer: it may have been applied, or may still be."""


class Rejection(Enum):
    """Reason why a write was not taken."""

    NOT_LEADER = "not leader"
    DRAINING = "draining"
    OVERLOADED = "overloaded"
    TOO_FEW_IN_SYNC = "too few replicas in sync"
    DISK_FULL = "disk full"
    NO_TIME = "the other replicas' clocks are not known yet"


# --- events


@dataclass(frozen=True, slots=True)
class SessionStarted:
    """The replica is registered. Its incarnation is higher than all before, and is already durable."""

    node: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class SessionLost:
    """ZooKeeper reports that the session has ended."""


@dataclass(frozen=True, slots=True)
class StateRead:
    """The partition's state, read on request or reported by a watch."""

    read: Versioned


@dataclass(frozen=True, slots=True)
class StateUnread:
    """The requested read failed."""


@dataclass(frozen=True, slots=True)
class Swapped:
    """Outcome of a compare-and-set."""

    token: int
    outcome: CompareAndSetOutcome


@dataclass(frozen=True, slots=True)
class PresenceChanged:
    """The live replicas of the partition, including this one."""

    live: tuple[Presence, ...]


@dataclass(frozen=True, slots=True)
class Received:
    """A message from another replica."""

    message: Message


@dataclass(frozen=True, slots=True)
class Synced:
    """Every change of the log up to this ticket is durable."""

    ticket: int


@dataclass(frozen=True, slots=True)
class LogFailed:
    """The disk failed or the log turned out to be broken: this process promises nothing more on it."""

    reason: str


@dataclass(frozen=True, slots=True)
class SegmentRotten:
    """The scrub found that the segment which ends at this counter is broken."""

    last: int


@dataclass(frozen=True, slots=True)
class SegmentScanned:
    """The entries that `ScanSegment` asked for have been read."""


@dataclass(slots=True)
class Propose:
    """Payloads to append, at least one; each is (kind, payload)."""

    token: int
    payloads: Sequence[tuple[int, bytes]]
    at_us: int
    """Wall clock, Unix µs; entries carry it unless it is wrong (`cluster.replication.core.clock`)."""
    replicated: bool = True
    """The sender waits for level `replicated`: refused if too few replicas are in sync."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """The state is durable up to here: a restart needs only the log after it."""

    counter: int


@dataclass(frozen=True, slots=True)
class Pinned:
    """A learner or a snapshot needs the log after this counter; None: no longer."""

    name: str
    counter: int | None


@dataclass(frozen=True, slots=True)
class SnapshotSent:
    """The transfer of a snapshot has ended; `position` None: it failed."""

    member: MemberID
    position: Position | None


@dataclass(frozen=True, slots=True)
class SnapshotReceived:
    """A complete snapshot from the leader is here, durable and not yet in use."""

    epoch: int
    sender: MemberID
    position: Position


@dataclass(frozen=True, slots=True)
class Drain:
    """Hand over and never lead again."""


@dataclass(frozen=True, slots=True)
class ForcePromotion:
    """Lead with the data of this replica, whatever is missing; ordered by an operator."""

    operator: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline has passed."""

    wall_us: int = 0
    """Wall clock, Unix µs; 0: not known."""
    space: bool = True
    """True if there is enough space to lead."""


@dataclass(frozen=True, slots=True)
class OutOfSpace:
    """The role refuses writes for lack of space, although the log has some."""


Event = (
    SessionStarted | SessionLost | StateRead | StateUnread | Swapped | PresenceChanged | Received | Synced | LogFailed
    | SegmentRotten | SegmentScanned | Propose | Flushed | Pinned | SnapshotSent | SnapshotReceived | Drain | ForcePromotion
    | Tick | OutOfSpace
)  # fmt: skip


# --- effects, to be performed in this order


@dataclass(frozen=True, slots=True)
class Sync:
    """Make every change of the log up to here durable, then report `Synced`. Later changes may be synced with it."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to another replica. It may be lost."""

    to: MemberID
    message: Message


@dataclass(frozen=True, slots=True)
class ReadState:
    """Read the state from ZooKeeper, not older than this request, and report `StateRead` or `StateUnread`."""


@dataclass(frozen=True, slots=True)
class CompareAndSet:
    """Set the state if its version is still `expected` (-1: create it) and report `Swapped`; UNKNOWN after a time-out."""

    token: int
    expected: int
    state: PartitionState


@dataclass(slots=True)
class Accepted:
    """A proposal is in the leader's log at these counters."""

    token: int
    epoch: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """A proposal was refused."""

    token: int
    reason: Rejection


@dataclass(slots=True)
class Persisted:
    """The leader's entries up to here are on its disk."""

    counter: int


@dataclass(slots=True)
class Committed:
    """Apply entries up to here. A leader also answers its writers."""

    counter: int
    copies: int
    """Number of replicas that have the entries. 0 on a follower, and on a leader with fewer than `min_in_sync` disks: then no
    writer is informed that its write is replicated."""


@dataclass(frozen=True, slots=True)
class Leading:
    """This replica took office: it takes writes, and everything before its first entry is committed with that entry."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Deposed:
    """This replica no longer leads: the outcome of unanswered writes is unknown."""

    epoch: int


@dataclass(frozen=True, slots=True)
class SendSnapshot:
    """Send a follower a snapshot of the state at a committed position, then the log; report `SnapshotSent` in any case."""

    member: MemberID
    epoch: int


@dataclass(frozen=True, slots=True)
class ScanSegment:
    """Read the part of the log with this entry and the one after it without blocking; report `SegmentScanned` or `SegmentRotten`.
    One runs at a time; others are requested again."""

    counter: int


@dataclass(frozen=True, slots=True)
class InstallSnapshot:
    """Replace the state by the received snapshot. The log was reset to its position."""

    position: Position


@dataclass(frozen=True, slots=True)
class ReportDamage:
    """Inform operators that acknowledged entries are missing here. `sole`: no other replica is in sync, nothing is served."""

    damage: Damage
    sole: bool


@dataclass(frozen=True, slots=True)
class LogDropped:
    """A broken segment and everything before it were dropped: the state holds them durably, followers that need them get a
    snapshot."""

    last: int
    reason: str


@dataclass(frozen=True, slots=True)
class Audit:
    """Write to the audit log, durably, before anything that follows."""

    operator: str
    reason: str
    last: Position
    before: PartitionState | None


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The drain is complete: another replica may be promoted without waiting for this one's session."""


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Leave the registry so that another replica may lead."""

    reason: str


Effect = (
    Sync | Send | ReadState | CompareAndSet | Accepted | Rejected | Persisted | Committed | Leading | Deposed
    | SendSnapshot | ScanSegment | InstallSnapshot | ReportDamage | LogDropped | Audit | HandedOver | CloseSession
)  # fmt: skip
