"""What the publisher's core and its shell say to each other: tickets, states, effects. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from pixiu.errors import Dropped, IdReused, IdTooOld, InboxFull, OutcomeUnknown, PixiuError, Undelivered, error_of_code

PERHAPS: Final = frozenset({OutcomeUnknown.code, Dropped.code, Undelivered.code, IdTooOld.code})
"""Failures that say themselves that the message may have been delivered."""
LOOKED: Final = frozenset({IdReused.code, InboxFull.code, IdTooOld.code})
"""Answers that the stores give only after a look whether they have the mail."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why messages failed; shared by all of a range."""

    code: str
    text: str
    retry_after_ms: int = 0
    cause: str = ""
    """Of an unknown outcome: the code with which the last attempt was refused."""

    def error(self) -> PixiuError:
        """A new exception that says it."""
        return error_of_code(self.code, self.text, self.retry_after_ms)


def in_doubt(why: Failure, advice: str) -> Failure:
    """How a message fails of which an earlier attempt left and was not answered: what is said of a later attempt says nothing
    of that one. `retry_after_ms` is kept."""
    if why.code in PERHAPS:
        return why
    text = f"{why.code}: {why.text}; an earlier attempt was not answered and may have been delivered: {advice}"
    return Failure(OutcomeUnknown.code, text, why.retry_after_ms, why.code)


class Group:
    """Messages that one `flush` waits for: those offered since the flush before."""

    __slots__ = ("unresolved",)

    def __init__(self) -> None:
        self.unresolved = 0


class Ticket:
    """A message from its offer until it is resolved."""

    __slots__ = (
        "attempts", "deadline", "failure", "group", "in_doubt", "key", "lane", "message_id", "record", "resolved", "watched",
    )  # fmt: skip

    def __init__(self, record: bytes, key: int, lane: int, message_id: int) -> None:
        self.record = record
        self.key = key
        self.lane = lane
        self.message_id = message_id
        self.deadline = 0.0
        self.attempts = 0
        """That left; none that a proxy refused unseen."""
        self.in_doubt = False
        """Whether an earlier attempt left and was not answered."""
        self.failure: Failure | None = None
        self.resolved = False
        self.watched = False
        """Whether somebody waits: `Resolved` names such tickets, and those that failed."""
        self.group: Group | None = None


class ProxyState(Enum):
    """What the publisher thinks of one proxy."""

    IDLE = "idle"
    """Usable; no stream yet."""
    OPEN = "open"
    """Usable; has a stream."""
    DRAINING = "draining"
    """Has a stream that only finishes what is under way."""
    DOWN = "down"
    """Not usable until its back-off is over."""


class ProxyEvent(Enum):
    """What happens to one proxy."""

    WANTED = "a message is queued"
    DIED = "the stream died or stalled"
    LEAVING = "it is draining, or is no longer listed"
    FINISHED = "nothing is under way any more"
    RESTED = "the back-off is over"


TRANSITIONS: Final[dict[tuple[ProxyState, ProxyEvent], ProxyState]] = {
    (ProxyState.IDLE, ProxyEvent.WANTED): ProxyState.OPEN,
    (ProxyState.IDLE, ProxyEvent.LEAVING): ProxyState.DOWN,
    (ProxyState.OPEN, ProxyEvent.DIED): ProxyState.DOWN,
    (ProxyState.OPEN, ProxyEvent.LEAVING): ProxyState.DRAINING,
    (ProxyState.DRAINING, ProxyEvent.FINISHED): ProxyState.DOWN,
    (ProxyState.DRAINING, ProxyEvent.DIED): ProxyState.DOWN,
    (ProxyState.DOWN, ProxyEvent.RESTED): ProxyState.IDLE,
}
"""What is not here changes nothing."""


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Open a stream to a proxy; it is known by its number from now on."""

    address: str
    stream: int


@dataclass(frozen=True, slots=True)
class CloseStream:
    """End a stream; nothing that it still says counts."""

    stream: int


@dataclass(frozen=True, slots=True)
class Writable:
    """`next_batch` of this stream may have something."""

    stream: int


@dataclass(frozen=True, slots=True)
class Resolved:
    """Tickets that are resolved: those that are watched, and those that failed."""

    tickets: tuple[Ticket, ...]


@dataclass(frozen=True, slots=True)
class RefreshCluster:
    """A proxy failed or goes: ask again which ones there are."""


Effect = OpenStream | CloseStream | Writable | Resolved | RefreshCluster


@dataclass(frozen=True, slots=True)
class Batch:
    """Records that leave together on a stream."""

    data: bytes
    count: int
    position: int
    """Of its first record in the stream, from 1."""
    more: bool = False
    """Whether the next batch leaves at once, without an answer to this one."""


@dataclass(slots=True)
class PublisherCounters:
    """Totals since the client connected."""

    offered: int = 0
    accepted: int = 0
    failed: int = 0
    expired: int = 0
    """Those among `failed` whose outcome is unknown, or that were never sent, when the time was over."""
    resent: int = 0
    batches: int = 0
    streams_opened: int = 0
    streams_died: int = 0
    malformed_replies: int = 0
    failures_by_code: dict[str, int] = field(default_factory=dict)
