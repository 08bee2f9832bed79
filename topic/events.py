"""Events and effects of a topic replica's core. Those of every stored role are in `cluster.store.events`. Pure.

    writer    WriteRequested                          WriteReply
    member    Joined, Credited, Reported, Touched     Deliver, ReportReply
              Left
    admin     Requested (OPEN, SEAL, CHANNEL …)       Reply
    parents   ParentFinished                          AskParent

Source: docs/topics.md, "Driving the core".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.core.contract import EndOfTurn, Tick
from cluster.replication.core.events import Accepted
from cluster.store.events import Committed, LeaderChanged, Propose, Refused
from pixiu.errors import Refusal
from pixiu.wire.levels import Triple
from topic.entries import Settlement
from topic.state.parts import Verdict

# --- events


@dataclass(slots=True)
class WriteRequested:
    """A block of a writer. Answered by `WriteReply`."""

    stream: int
    request: int
    sender: int
    """UIN of the login."""
    block: bytes


@dataclass(frozen=True, slots=True)
class Requested:
    """An entry that admin asks for, OPEN, SEAL, CHANNEL or TRIM, or the shell: TRIM by retention, LOST for a gap that no replica
    can fill. Answered by `Reply`."""

    request: int
    kind: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Joined:
    """A member wants a channel's messages. A member has one channel; its number is not used again."""

    member: int
    channel: int
    credit: int
    """Messages that it takes before it has reported any."""


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


Event = (
    WriteRequested | Requested | Joined | Credited | Reported | Touched | Left | ParentFinished
    | LeaderChanged | Accepted | Refused | Committed | EndOfTurn | Tick
)  # fmt: skip

# --- effects


class Delivery(NamedTuple):
    """A message that a member gets."""

    offset: int
    attempts: int
    """Deliveries, this one included."""


@dataclass(slots=True)
class WriteReply:
    """Answer a writer, when its block is replicated and applied, or refused."""

    stream: int
    request: int
    triple: Triple
    position: int = 0
    """Its last stored position in the part; what follows is to be sent again after a refusal. Counts if `verdict` does."""
    base: int = -1
    """Offset of the block's first message; -1: unknown."""
    verdict: Verdict | None = None
    """None: nothing is known of the block, see `refusal`."""
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
    messages: Sequence[Delivery]


@dataclass(slots=True)
class ReportReply:
    """Answer a member: what it reported is committed, as far as the settlement has it; the rest it no longer had."""

    member: int
    request: int
    settlement: Settlement | None = None
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class AskParent:
    """Ask the leader that holds a parent whether a channel has finished it; answered by `ParentFinished` when it has."""

    channel: int
    part: int


Effect = Propose | WriteReply | Reply | Deliver | ReportReply | AskParent
