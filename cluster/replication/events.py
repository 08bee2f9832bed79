"""What happens to a replica's core, and what it asks its shell to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from cluster.replication.messages import Message
from cluster.replication.model import Damage, MemberID, PartitionState, Position, Presence, Versioned


class Outcome(Enum):
    """The result of a compare-and-set."""

    OK = "ok"
    CONFLICT = "conflict"
    """The version was another one: nothing was changed."""
    UNKNOWN = "unknown"
    """No answer: it may have been applied, or be applied later."""


class Rejection(Enum):
    """Why a write was not taken."""

    NOT_LEADER = "not leader"
    DRAINING = "draining"
    OVERLOADED = "overloaded"
    TOO_FEW_IN_SYNC = "too few replicas in sync"
    DISK_FULL = "disk full"
    NO_TIME = "the other replicas' clocks are not known yet"


# --- events


@dataclass(frozen=True, slots=True)
class SessionStarted:
    """The replica is in the registry. Its incarnation is higher than every one before and is already durable."""

    node: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class SessionLost:
    """ZooKeeper says that the session is gone."""


@dataclass(frozen=True, slots=True)
class StateRead:
    """The partition's state, asked for or told by a watch."""

    read: Versioned


@dataclass(frozen=True, slots=True)
class StateUnread:
    """The read that was asked for failed."""


@dataclass(frozen=True, slots=True)
class Swapped:
    """What became of a compare-and-set."""

    token: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class PresenceChanged:
    """The live replicas of the partition, this one too."""

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
    """The disk failed, or the log turned out to be broken: nothing more is promised on it in this process."""

    reason: str


@dataclass(frozen=True, slots=True)
class SegmentRotten:
    """The scrub found a segment that ends at this counter broken."""

    last: int


@dataclass(frozen=True, slots=True)
class SegmentScanned:
    """What `ScanSegment` asked for was read."""


@dataclass(slots=True)
class Propose:
    """Payloads to append, at least one: (kind, payload) of each."""

    token: int
    payloads: Sequence[tuple[int, bytes]]
    at_us: int
    """The wall clock, Unix µs; the entries carry it unless it is wrong (`cluster.replication.clock`)."""
    replicated: bool = True
    """Its sender waits for level `replicated`: refused when too few are in sync."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """The state is durable up to here: the log behind it is not needed for a restart."""

    counter: int


@dataclass(frozen=True, slots=True)
class Pinned:
    """A learner or a snapshot needs the log after this counter; None: no longer."""

    name: str
    counter: int | None


@dataclass(frozen=True, slots=True)
class SnapshotSent:
    """A snapshot is on its way no more; `position` None: it failed."""

    member: MemberID
    position: Position | None


@dataclass(frozen=True, slots=True)
class SnapshotReceived:
    """A snapshot from the leader is here whole, durable, and not yet in use."""

    epoch: int
    sender: MemberID
    position: Position


@dataclass(frozen=True, slots=True)
class Drain:
    """Hand over and never lead again."""


@dataclass(frozen=True, slots=True)
class ForcePromotion:
    """An operator's word: lead with what is here, whatever is missing."""

    operator: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline is due."""

    wall_us: int = 0
    """The wall clock, Unix µs; 0: not known."""
    room: bool = True
    """There is space here for what a leader takes."""


@dataclass(frozen=True, slots=True)
class OutOfSpace:
    """The role takes no writes for want of space, which the log still has."""


Event = (
    SessionStarted | SessionLost | StateRead | StateUnread | Swapped | PresenceChanged | Received | Synced | LogFailed
    | SegmentRotten | SegmentScanned | Propose | Flushed | Pinned | SnapshotSent | SnapshotReceived | Drain | ForcePromotion
    | Tick | OutOfSpace
)  # fmt: skip


# --- effects, to be done in the order in which they stand


@dataclass(frozen=True, slots=True)
class Sync:
    """Make every change of the log up to here durable, then say `Synced`. Later ones may be synced with it."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to another replica. It may be lost."""

    to: MemberID
    message: Message


@dataclass(frozen=True, slots=True)
class ReadState:
    """Read the state from ZooKeeper (a read that is not older than the call) and say `StateRead` or `StateUnread`."""


@dataclass(frozen=True, slots=True)
class CompareAndSet:
    """Set the state if its version is still `expected` (-1: create it), and say `Swapped`: after a timeout UNKNOWN."""

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
    """A proposal was not taken."""

    token: int
    reason: Rejection


@dataclass(slots=True)
class Persisted:
    """What this replica appended as leader is on its disk up to here."""

    counter: int


@dataclass(slots=True)
class Committed:
    """Apply up to here. A leader answers its writers too: so many replicas have it."""

    counter: int
    copies: int
    """0 on a follower, and on a leader for what is on fewer disks than `min_in_sync`: no writer is told that it is replicated."""


@dataclass(frozen=True, slots=True)
class Leading:
    """This replica took office: it takes writes; what it read before is committed with its first entry."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Deposed:
    """No longer leader: the outcome of writes that were not answered is unknown."""

    epoch: int


@dataclass(frozen=True, slots=True)
class SendSnapshot:
    """Send a follower a snapshot of the state at a committed position, then the log; say `SnapshotSent` whatever came of it."""

    member: MemberID
    epoch: int


@dataclass(frozen=True, slots=True)
class ScanSegment:
    """Read the part of the log with this entry and what follows it, without holding up anything, and say `SegmentScanned`, or
    `SegmentRotten`. One at a time: more are asked for again."""

    counter: int


@dataclass(frozen=True, slots=True)
class InstallSnapshot:
    """Take the received snapshot into use instead of the state. The log was reset to its position."""

    position: Position


@dataclass(frozen=True, slots=True)
class ReportDamage:
    """Tell operators: acknowledged entries are missing here. `sole`: no other replica is in sync, nothing is served."""

    damage: Damage
    sole: bool


@dataclass(frozen=True, slots=True)
class LogDropped:
    """A broken segment and all before it went: the state holds them durably, followers that need them get a snapshot."""

    last: int
    reason: str


@dataclass(frozen=True, slots=True)
class Audit:
    """Write into the audit log, durably, before anything that follows."""

    operator: str
    reason: str
    last: Position
    before: PartitionState | None


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The drain is over: another replica may be promoted without waiting for this one's session."""


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Leave the registry, so that another may lead."""

    reason: str


Effect = (
    Sync | Send | ReadState | CompareAndSet | Accepted | Rejected | Persisted | Committed | Leading | Deposed
    | SendSnapshot | ScanSegment | InstallSnapshot | ReportDamage | LogDropped | Audit | HandedOver | CloseSession
)  # fmt: skip
