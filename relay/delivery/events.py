"""Events and effects of deliveries. Every one is a batch.

Source: PiXiu §6.4; docs/delivery.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from cluster.core.contract import Tick


class Device(NamedTuple):
    """A user's device, as Pi numbers it."""

    uin: int
    device: int


class Login(NamedTuple):
    """A device is connected."""

    uin: int
    device: int
    gateway: int
    """The gateway's endpoint."""
    connection: int
    """The connection's time: a newer connection of the device has a higher one."""


class Notice(NamedTuple):
    """New entries in a lane of an inbox, committed in Pi and in Xiu; without a number they may be committed a moment later."""

    uin: int
    lane: int
    first: int
    """InboxSeq of the first one, the others follow it; 0: unknown, and there is one."""
    msg_ids: Sequence[int]
    records: Sequence[bytes]
    """Record of each; empty: not in the notice."""

    @property
    def last(self) -> int:
        """InboxSeq of the last one; 0: unknown."""
        return self.first + len(self.msg_ids) - 1 if self.first else 0

    def part(self, begin: int, end: int) -> Notice:
        """The entries from the index `begin` to below `end`; itself if these are all."""
        if begin == 0 and end == len(self.msg_ids):
            return self
        return Notice(self.uin, self.lane, self.first + begin, self.msg_ids[begin:end], self.records[begin:end])


class Acknowledgement(NamedTuple):
    """Acknowledgements of a device in a lane."""

    uin: int
    device: int
    session: int
    lane: int
    up_to: int
    bits: int
    written: int = -1
    """The highest InboxSeq that its gateway wrote to the connection; -1: not reported."""


class DeviceLane(NamedTuple):
    """A lane of a device's deliveries under a session."""

    uin: int
    device: int
    session: int
    lane: int


class Asked(NamedTuple):
    """Identity of a question; echoed in the answer."""

    uin: int
    device: int
    token: int


class Read(NamedTuple):
    """A request for entries of a lane after `start`; None: those that the device has not acknowledged."""

    lane: int
    start: int | None
    num: int


class Listing(NamedTuple):
    """Pi's answer for one lane."""

    entries: Sequence[tuple[int, int]]
    """(InboxSeq, MsgID)."""
    floor: int
    gap: int
    last: int
    up_to: int
    """The device's stored cursor."""


class Missing(Enum):
    """Reason why there is no record."""

    NOT_YET = "not yet"
    GONE = "gone"
    LATER = "not now"
    FULL = "not asked for: others had their turn"


class Failure(Enum):
    """Reason why a call failed."""

    LATER = "try again"
    FENCED = "a newer session"
    REFUSED = "never"


# --- events


@dataclass(frozen=True, slots=True)
class LoggedIn:
    """Devices have connected, or this relay has become their owner."""

    logins: Sequence[Login]
    taken_over: bool = False
    """Other relays may have owned the devices until now, or still do: read once more later, for notices sent to them."""


@dataclass(frozen=True, slots=True)
class StillThere:
    """Heartbeats of devices that are logged in."""

    logins: Sequence[Login]


@dataclass(frozen=True, slots=True)
class LoggedOut:
    """Connections of devices have ended."""

    logins: Sequence[Login]


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """A gateway is gone, and all connections with it."""

    gateway: int


@dataclass(frozen=True, slots=True)
class StreamBroken:
    """Deliveries in progress to a gateway are lost; sessions send nothing to it before `StreamReady`.

    Follows whenever a delivery failed, and precedes all deliveries through a new stream.
    """

    gateway: int


@dataclass(frozen=True, slots=True)
class StreamReady:
    """A gateway's stream accepts deliveries again."""

    gateway: int


@dataclass(frozen=True, slots=True)
class OwnersChanged:
    """Check again which users this relay serves."""


@dataclass(frozen=True, slots=True)
class Notified:
    """A batch of notices from `peer`, under its number."""

    peer: int
    number: int
    notices: Sequence[Notice]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A gateway reports what devices acknowledged. It is believed for sessions at it only."""

    gateway: int
    """The gateway's endpoint."""
    acknowledgements: Sequence[Acknowledgement]


@dataclass(frozen=True, slots=True)
class Opened:
    """Answers to `OpenSessions`: the session number, or why there is none."""

    answers: Sequence[tuple[Asked, int | Failure]]


@dataclass(frozen=True, slots=True)
class Listed:
    """Answers to `ReadInboxes`: a listing for each read."""

    answers: Sequence[tuple[Asked, Sequence[Listing] | Failure]]


@dataclass(frozen=True, slots=True)
class Fetched:
    """Answers to `FetchMessages`: a record or a reason for each MsgID; fewer when the answer was full."""

    answers: Sequence[tuple[Asked, Sequence[bytes | Missing] | Failure]]


@dataclass(frozen=True, slots=True)
class Saved:
    """The answer to `SaveCursors`: None for each saved one. `results` None: the call failed."""

    number: int
    results: Sequence[Failure | None] | None


@dataclass(frozen=True, slots=True)
class Stopping:
    """The process drains: all sessions end."""


Event = (
    LoggedIn | StillThere | LoggedOut | GatewayLost | StreamBroken | StreamReady | OwnersChanged | Notified | Acknowledged | Opened
    | Listed | Fetched | Saved | Stopping | Tick
)  # fmt: skip


# --- effects


@dataclass(frozen=True, slots=True)
class OpenSessions:
    """Ask Pi for session numbers."""

    items: Sequence[Asked]


@dataclass(frozen=True, slots=True)
class ReadInboxes:
    """Read inboxes: the question, its session number, and the reads."""

    items: Sequence[tuple[Asked, int, Sequence[Read]]]


@dataclass(frozen=True, slots=True)
class FetchMessages:
    """Ask Xiu for messages."""

    items: Sequence[tuple[Asked, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class SaveCursors:
    """Save acknowledgements at Pi."""

    number: int
    items: Sequence[Acknowledgement]


class Chunk(NamedTuple):
    """Mails for one device."""

    uin: int
    device: int
    mails: int
    """Number of mails, gap markers included."""
    data: bytes
    """Their envelopes with their records, end to end."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Send to a gateway, in order."""

    gateway: int
    chunks: Sequence[Chunk]


@dataclass(frozen=True, slots=True)
class AskWritten:
    """Ask a gateway up to where these lanes were written, after the deliveries sent before."""

    gateway: int
    lanes: Sequence[DeviceLane]


@dataclass(frozen=True, slots=True)
class ConfirmNotices:
    """Confirm a batch of notices, except for these users, whom another relay serves."""

    peer: int
    number: int
    elsewhere: Sequence[int]


Effect = OpenSessions | ReadInboxes | FetchMessages | SaveCursors | Deliver | AskWritten | ConfirmNotices
