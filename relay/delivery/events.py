"""What happens to deliveries, and what they ask their shell to do. Every one is a batch.

Source: PiXiu §6.4; docs/delivery.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from cluster.runtime.contract import Tick


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
    """A lane of an inbox has new entries, which are committed in Pi and in Xiu; without a number it may be so a moment later."""

    uin: int
    lane: int
    first: int
    """InboxSeq of the first one, the others follow it; 0: not known, and there is one."""
    msg_ids: Sequence[int]
    records: Sequence[bytes]
    """Of each; empty: not in the notify."""

    @property
    def last(self) -> int:
        """InboxSeq of the last one; 0: not known."""
        return self.first + len(self.msg_ids) - 1 if self.first else 0

    def part(self, begin: int, end: int) -> Notice:
        """The entries from the index `begin` to below `end`; itself when these are all."""
        if begin == 0 and end == len(self.msg_ids):
            return self
        return Notice(self.uin, self.lane, self.first + begin, self.msg_ids[begin:end], self.records[begin:end])


class Acknowledgement(NamedTuple):
    """What a device has got."""

    uin: int
    device: int
    session: int
    lane: int
    up_to: int
    bits: int
    written: int = -1
    """The highest InboxSeq that its gateway wrote to the connection; -1: it does not say."""


class DeviceLane(NamedTuple):
    """A lane of what is sent to a device under a session."""

    uin: int
    device: int
    session: int
    lane: int


class Asked(NamedTuple):
    """Who asked for something; echoed in the answer."""

    uin: int
    device: int
    token: int


class Read(NamedTuple):
    """Entries of a lane after `start`; None: what the device has not acknowledged."""

    lane: int
    start: int | None
    num: int


class Listing(NamedTuple):
    """What Pi says of one lane."""

    entries: Sequence[tuple[int, int]]
    """(InboxSeq, MsgID)."""
    floor: int
    gap: int
    last: int
    up_to: int
    """As the device's cursor is stored."""


class Missing(Enum):
    """Why there is no record."""

    NOT_YET = "not yet"
    GONE = "gone"
    LATER = "not now"
    FULL = "not asked for: others had their turn"


class Failure(Enum):
    """Why a call was not answered with what it asked for."""

    LATER = "try again"
    FENCED = "a newer session"
    REFUSED = "never"


# --- events


@dataclass(frozen=True, slots=True)
class LoggedIn:
    """Devices have connected, or this relay has become their owner."""

    logins: Sequence[Login]
    taken_over: bool = False
    """Others may have taken themselves for the owner until now, or do so still: what they are told is read for once more."""


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
    """What is under way to a gateway is lost; sessions send nothing to it before `StreamReady`.

    Comes whenever something that was to be delivered was not, and before anything goes through a stream that is new.
    """

    gateway: int


@dataclass(frozen=True, slots=True)
class StreamReady:
    """Deliveries to a gateway go again."""

    gateway: int


@dataclass(frozen=True, slots=True)
class OwnersChanged:
    """Ask again which users this relay serves."""


@dataclass(frozen=True, slots=True)
class Notified:
    """A batch of notices from `peer`, under its number."""

    peer: int
    number: int
    notices: Sequence[Notice]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Gateways report what devices acknowledged."""

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
    """The answer to `SaveCursors`: None for what is done. `results` None: the call failed."""

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
    """Read inboxes: who asks, under which session, and the reads."""

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
    """How many, gap markers included."""
    data: bytes
    """Their envelopes with their records, end to end."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Send to a gateway, in order."""

    gateway: int
    chunks: Sequence[Chunk]


@dataclass(frozen=True, slots=True)
class AskWritten:
    """Ask a gateway, behind what was delivered, up to where these lanes were written."""

    gateway: int
    lanes: Sequence[DeviceLane]


@dataclass(frozen=True, slots=True)
class ConfirmNotices:
    """A batch of notices is taken, but for these users, whom another relay serves."""

    peer: int
    number: int
    elsewhere: Sequence[int]


Effect = OpenSessions | ReadInboxes | FetchMessages | SaveCursors | Deliver | AskWritten | ConfirmNotices
