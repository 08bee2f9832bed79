"""Events and effects of a topic replica's core. Those of every stored role are in `cluster.store.events`. Pure.

    writer    WriteRequested                          WriteReply
    member    Joined, Credited, Reported, Touched     Deliver, ReportReply, PartsFinished
              Left                                    MemberEnded
    admin     Requested (OPEN, SEAL, CHANNEL …)       Reply
    parents   ParentFinished                          AskParent
    log       Accepted, Persisted, Committed …        Propose

Source: docs/topics.md, "Driving the core".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from cluster.core.contract import EndOfTurn, Tick
from cluster.replication.core.events import Accepted, Persisted
from cluster.store.events import Committed, LeaderChanged, Propose, Refused
from pixiu.errors import Refusal
from pixiu.wire.levels import Level, Triple
from topic.state.parts import Verdict

# --- events


class LoadTest(IntEnum):
    """Treatment of messages of load tests. The values are those on the wire. All members of a channel have the same."""

    BLOCK = 0
    """They count as acknowledged, and are not given."""
    PASS = 1
    ONLY = 2
    """All others count as acknowledged, and are not given."""


@dataclass(slots=True)
class WriteRequested:
    """A block of a writer. Answered by `WriteReply`, once: at a lower level nothing is said of what becomes of it later."""

    stream: int
    request: int
    sender: int
    """UIN of the login."""
    block: bytes
    level: Level = Level.REPLICATED
    epoch: int = 0
    """Of a writer with a name, when it was opened; 0: it has none."""


@dataclass(frozen=True, slots=True)
class Requested:
    """An entry to be appended. Answered by `Reply`. Of the admin: one of `cluster.topics.entries.ADMIN_KINDS`. Of the shell: TRIM
    by retention, LOST for a gap that no replica can fill, UPLOADED and REMOVED; SEEK and RESEND that a client asks for."""

    request: int
    kind: int
    payload: bytes
    force: bool = False
    """A SEEK is wanted although the channel has members: what they have counts no longer."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A member wants a channel's messages, of the parts that are here. A member has one channel; its number is not used again.

    If it is refused, and when its channel ends here, `MemberEnded` says so.
    """

    member: int
    topic: str
    """Name."""
    channel: str
    """Name."""
    credit: int
    """Messages that it takes before it has reported any."""
    name: str = ""
    """For people."""
    tag: str = ""
    """It gets the messages with this tag; empty: those without a tag, and those whose tag no member has."""
    load_test: LoadTest = LoadTest.BLOCK
    filter: str = ""
    """The channel's; empty: whatever that is."""


@dataclass(frozen=True, slots=True)
class Credited:
    """A member takes another number of messages at a time."""

    member: int
    credit: int


@dataclass(slots=True)
class Reported:
    """A member acknowledges and refuses messages of one part. Answered by `ReportReply`."""

    member: int
    request: int
    part: int
    acknowledged: Sequence[tuple[int, int]] = ()
    """Ranges [low, high) of offsets."""
    refused: Sequence[tuple[int, float]] = ()
    """(offset, delay in seconds before it is delivered again)."""
    rejected: Sequence[tuple[int, str]] = ()
    """(offset, reason) of those that go to the dead letters at once."""


@dataclass(frozen=True, slots=True)
class Touched:
    """A member needs more time for messages of a part."""

    member: int
    part: int
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True)
class Left:
    """A member is gone: others get what it has not reported."""

    member: int


@dataclass(frozen=True, slots=True)
class ParentFinished:
    """A channel has acknowledged all of a sealed part of another group, or retention has dropped that part."""

    channel: int
    part: int


@dataclass(frozen=True, slots=True)
class StoreLeft:
    """Nobody is to wait for the object store any more: writers of level stored are refused."""

    refusal: Refusal
    part: int = -1
    """Those of one part; -1: all."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Blocks that `Parts.blocks` was asked for, and that only the object store had, are in memory."""

    part: int


Event = (
    WriteRequested | Requested | Joined | Credited | Reported | Touched | Left | ParentFinished | StoreLeft | Loaded
    | LeaderChanged | Accepted | Persisted | Refused | Committed | EndOfTurn | Tick
)  # fmt: skip

# --- effects


class Run(NamedTuple):
    """Messages [low, high) that a member gets."""

    low: int
    high: int
    attempts: int
    """Deliveries of each, this one included."""


@dataclass(slots=True)
class WriteReply:
    """Answer a writer, when its block has reached its level, or is refused."""

    stream: int
    request: int
    triple: Triple
    position: int = 0
    """Its last stored position in the part; what follows is to be sent again after a refusal. Counts if `verdict` does."""
    base: int = -1
    """Offset of the block's first message; -1: unknown."""
    verdict: Verdict | None = None
    """None: nothing is known of the block, see `refusal`. At a lower level than replicated STORED is expected, not committed."""
    children: Sequence[tuple[int, int, int, int]] = ()
    """Of a sealed part: (number, low, high, group)."""
    refusal: Refusal | None = None


@dataclass(slots=True)
class Reply:
    """Answer admin: with the state's answer (`Sealed`, `Done`), or a refusal."""

    request: int
    answer: object = None
    refusal: Refusal | None = None


@dataclass(slots=True)
class Deliver:
    """Send messages to a member: read from the part's blocks, in this order."""

    member: int
    channel: int
    part: int
    runs: Sequence[Run]


@dataclass(slots=True)
class ReportReply:
    """Answer a member: this much of what it reported is committed; the rest it no longer had."""

    member: int
    request: int
    part: int
    acknowledged: Sequence[tuple[int, int]] = ()
    """Ranges [low, high)."""
    refused: Sequence[int] = ()
    """Offsets."""
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class MemberEnded:
    """A member gets nothing any more, or never got anything: end its stream. No `Left` is needed."""

    member: int
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class PartsFinished:
    """Inform a member that its channel has everything of sealed parts."""

    member: int
    parts: Sequence[int]
    """IDs."""


@dataclass(frozen=True, slots=True)
class AskParent:
    """Ask the leader that holds a parent whether a channel has finished it; answered by `ParentFinished` when it has."""

    channel: int
    part: int


Effect = Propose | WriteReply | Reply | Deliver | ReportReply | MemberEnded | PartsFinished | AskParent

# --- answers of queries


class MemberView(NamedTuple):
    """A member of a channel, as its leader sees it."""

    name: str
    tag: str
    credit: int
    having: int
    """Messages of the part that it has and did not report."""


class ChannelView(NamedTuple):
    """A channel in one part: `ChannelPart` on the wire, without the time of its oldest message."""

    channel: int
    part: int
    floor: int
    """Everything below is acknowledged; the oldest unacknowledged message has this offset."""
    end: int
    unacknowledged: int
    with_members: int
    waiting: int
    """For another delivery."""
    dead: int
    lost: int
    members: Sequence[MemberView]
    stuck: Sequence[str]
    """Why messages wait, in words."""
    filter_errors: int = 0
    """Messages for which the filter's expression had no value since this leader began."""
