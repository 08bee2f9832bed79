"""Types shared by the sender's core and its shells: tickets, states, effects. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Final, NamedTuple

from pixiu.errors import (
    Dropped,
    IdReused,
    IdTooOld,
    InboxFull,
    OutcomeUnknown,
    PixiuError,
    RecordTooLarge,
    TooManyReceivers,
    Undelivered,
    error_of_code,
)
from pixiu.wire.levels import Level

PERHAPS: Final = frozenset({OutcomeUnknown.code, Dropped.code, Undelivered.code, IdTooOld.code})
"""Failures that themselves mean that the message may have been delivered."""
LOOKED: Final = frozenset({IdReused.code, InboxFull.code, IdTooOld.code})
"""Answers that the stores give only after they have looked for the mail."""
ALWAYS: Final = frozenset({RecordTooLarge.code, TooManyReceivers.code})
"""Refusals that every attempt of the message gets: they depend on the message, and on a limit that is the same in the whole cluster
as long as it runs."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why messages failed; shared by all of a range."""

    code: str
    text: str
    retry_after_ms: int = 0
    cause: str = ""
    """For an unknown outcome: the code with which the last attempt was refused."""

    def error(self) -> PixiuError:
        """Make a new exception of the failure."""
        return error_of_code(self.code, self.text, self.retry_after_ms)


def in_doubt(why: Failure, advice: str) -> Failure:
    """The failure of a message with an earlier attempt that was sent and not answered: the answer to a later attempt does not
    settle the earlier one, unless every attempt gets it. `retry_after_ms` is kept."""
    if why.code in PERHAPS or why.code in ALWAYS:
        return why
    text = f"{why.code}: {why.text}; an earlier attempt was not answered and may have been delivered: {advice}"
    return Failure(OutcomeUnknown.code, text, why.retry_after_ms, why.code)


class Group:
    """Messages that one `flush` waits for: those offered since the previous flush."""

    __slots__ = ("unresolved",)

    def __init__(self) -> None:
        self.unresolved = 0


class Ticket:
    """A message from its offer until it is resolved."""

    __slots__ = (
        "attempts", "deadline", "failure", "group", "in_doubt", "key", "lane", "message_id", "number", "record", "resolved", "size",
        "watched",
    )  # fmt: skip
    level: Level | None = None
    """Level at which it is confirmed; None: it has none. A batch has one."""
    more: tuple[int, ...] = ()
    """Receivers besides the record's key."""

    def __init__(self, record: bytes, key: int, lane: int, message_id: int) -> None:
        self.record = record
        self.size = len(record)
        """Bytes that it takes of queues and windows."""
        self.key = key
        self.lane = lane
        self.message_id = message_id
        self.number = 0
        """Number of the offer, from 1."""
        self.deadline = 0.0
        self.attempts = 0
        """Attempts that were sent, without those that a proxy refused unseen."""
        self.in_doubt = False
        """True if an earlier attempt was sent and not answered."""
        self.failure: Failure | None = None
        self.resolved = False
        self.watched = False
        """True if somebody waits: `Resolved` lists such tickets, and those that failed."""
        self.group: Group | None = None

    def begin(self, record: bytes, message_id: int) -> None:
        """Set record and ID, which a message gets after its receipt was given out."""
        self.record, self.message_id = record, message_id
        self.size += len(record)

    def learn(self, outcome: Outcome, index: int) -> None:
        """Note details of an outcome, of whose tickets this one is at `index`."""


class Outcome(NamedTuple):
    """Outcome of consecutive messages, as a proxy reports it."""

    position: int
    number: int
    failure: Failure | None
    copies: int = 0
    msg_ids: Sequence[int] = ()
    open: Sequence[int] = ()
    """Inboxes that may not have the mail."""


class ProxyState(Enum):
    """State of one proxy, as the sender sees it."""

    IDLE = "idle"
    """Usable; no stream yet."""
    OPEN = "open"
    """Usable; has a stream."""
    DRAINING = "draining"
    """Has a stream that only finishes what is under way."""
    DOWN = "down"
    """Not usable until its back-off is over."""


class ProxyEvent(Enum):
    """Events of one proxy."""

    WANTED = "a message is queued"
    DIED = "the stream died or stalled, or has drained"
    LEAVING = "it is draining, or is no longer listed"
    RESTED = "the back-off is over"


TRANSITIONS: Final[dict[tuple[ProxyState, ProxyEvent], ProxyState]] = {
    (ProxyState.IDLE, ProxyEvent.WANTED): ProxyState.OPEN,
    (ProxyState.IDLE, ProxyEvent.LEAVING): ProxyState.DOWN,
    (ProxyState.OPEN, ProxyEvent.DIED): ProxyState.DOWN,
    (ProxyState.OPEN, ProxyEvent.LEAVING): ProxyState.DRAINING,
    (ProxyState.DRAINING, ProxyEvent.DIED): ProxyState.DOWN,
    (ProxyState.DOWN, ProxyEvent.RESTED): ProxyState.IDLE,
}
"""Pairs that are missing here change nothing."""


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Open a stream to a proxy; the stream is known by its number from now on."""

    address: str
    stream: int
    worker: int = 0
    generation: int = 0
    """Number and generation of the writer, for mail."""


@dataclass(frozen=True, slots=True)
class CloseStream:
    """End a stream; ignore everything that still arrives on it."""

    stream: int


@dataclass(frozen=True, slots=True)
class Writable:
    """`next_batch` of this stream may have something to send."""

    stream: int


@dataclass(frozen=True, slots=True)
class Resolved:
    """Resolved tickets that are watched or have failed."""

    tickets: tuple[Ticket, ...]


@dataclass(frozen=True, slots=True)
class RefreshCluster:
    """Ask again for the list of proxies, because one failed or is leaving."""


Effect = OpenStream | CloseStream | Writable | Resolved | RefreshCluster


@dataclass(frozen=True, slots=True)
class Batch:
    """Records that are sent together on a stream."""

    data: bytes
    count: int
    position: int
    """Position of the first record in the stream, from 1."""
    more: bool = False
    """True if the next batch follows at once, without an answer to this one."""
    level: Level | None = None
    receivers: Sequence[tuple[int, tuple[int, ...]]] = ()
    """Further receivers of records, by index."""


@dataclass(slots=True)
class SendCounters:
    """Totals since the client connected."""

    offered: int = 0
    confirmed: int = 0
    failed: int = 0
    expired: int = 0
    """Those of `failed` whose time ran out: the outcome is unknown, or they were never sent."""
    resent: int = 0
    """Messages sent again, with the same SnowflakeID."""
    batches: int = 0
    streams_opened: int = 0
    streams_died: int = 0
    malformed_replies: int = 0
    failures_by_code: dict[str, int] = field(default_factory=dict)

    def add(self, other: SendCounters) -> None:
        """Add those of another sender."""
        for each in fields(self):
            if each.name != "failures_by_code":
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        for code, count in other.failures_by_code.items():
            self.failures_by_code[code] = self.failures_by_code.get(code, 0) + count
