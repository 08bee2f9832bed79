"""Types shared by a topic writer's core and its shell: tickets, streams of parts, results, effects. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain, islice, takewhile
from typing import Final, NamedTuple

from pixiu.client.send.events import Failure
from pixiu.client.topics.leader_link import LeaderLink
from pixiu.errors import DiskFull, InvalidArgument, MalformedData, NotAllowed, NotAuthenticated, RecordTooLarge, Refusal
from pixiu.placement.slots import Part
from pixiu.wire.block import INDEX_BYTES, Encoded
from pixiu.wire.levels import Level

FINAL: Final = frozenset(
    kind.code for kind in (NotAllowed, InvalidArgument, RecordTooLarge, MalformedData, DiskFull, NotAuthenticated)
)
"""Refusals that fail a block. After any other it is sent again."""


class TopicTicket:
    """A message from its offer until it is resolved."""

    __slots__ = (
        "at", "attempts", "deadline", "encoded", "failure", "level", "message_id", "offset", "part", "progress", "resolved", "size",
        "watched",
    )  # fmt: skip

    def __init__(self, encoded: Encoded, level: Level, progress: int = 0) -> None:
        self.encoded: Encoded | None = encoded
        """None once it is confirmed."""
        self.size = INDEX_BYTES + len(encoded.data)
        """Bytes in a block."""
        self.level = level
        self.progress = progress
        """The application's number; 0: none."""
        self.message_id = 0
        """Number of the offer, from 1."""
        self.at = self.deadline = 0.0
        """Monotonic seconds."""
        self.attempts = 0
        """Times that it was sent under the position that it has."""
        self.part = 0
        """Part that stored it; 0: not known."""
        self.offset = -1
        """Offset in the part; -1: not known."""
        self.failure: Failure | None = None
        self.resolved = False
        self.watched = False


def encoded(tickets: Iterable[TopicTicket]) -> Iterator[Encoded]:
    """Messages that are not confirmed, as a block has them."""
    for ticket in tickets:
        assert ticket.encoded is not None
        yield ticket.encoded


class SentBlock:
    """A block under way, or to be sent again."""

    __slots__ = ("data", "done", "first", "request", "tickets")

    def __init__(self, first: int, tickets: list[TopicTicket], data: bytes) -> None:
        self.first, self.tickets, self.data = first, tickets, data
        self.request = 0
        """Its number while it is under way; 0: it is not."""
        self.done = False
        """True if it is stored, while one before it is not."""

    @property
    def last(self) -> int:
        """Position of the last message."""
        return self.first + len(self.tickets) - 1


class PartStream:
    """Messages of a writer for one part, in order: blocks, the first of which are under way, then messages without a block."""

    __slots__ = (
        "blocks",
        "confirmed",
        "doubtful",
        "ended",
        "group",
        "high",
        "low",
        "part",
        "queue",
        "queue_bytes",
        "rest_until",
        "safe",
        "sent",
        "touched",
    )

    def __init__(self, part: int, low: int, high: int, group: int) -> None:
        self.part, self.low, self.high, self.group = part, low, high, group
        self.confirmed = 0
        """Position of the last message before `blocks`."""
        self.safe = 0
        """Position of the last message that is confirmed as replicated: no leader has less."""
        self.doubtful = False
        """True if the part may have messages under positions that this process gave to others."""
        self.touched = False
        """True if the part has something of this writer, or of the parts before it."""
        self.blocks: deque[SentBlock] = deque()
        self.sent = 0
        """Number of the first blocks that are under way."""
        self.queue: deque[TopicTicket] = deque()
        self.queue_bytes = 0
        self.ended = False
        """True once the part is known to be sealed for this writer: what is left goes to its children."""
        self.rest_until = 0.0

    @property
    def busy(self) -> bool:
        """True if something is not confirmed."""
        return bool(self.blocks or self.queue)

    def may_have(self, block: SentBlock) -> bool:
        """True if a block whose positions the part has may be in it: it is, unless others had used the positions."""
        return not self.doubtful or all(ticket.attempts > 1 for ticket in block.tickets)

    def first_number(self) -> int:
        """Number of the first message that is not confirmed."""
        return (self.blocks[0].tickets[0] if self.blocks else self.queue[0]).message_id

    def tickets_from(self, block: SentBlock) -> frozenset[TopicTicket]:
        """Messages of a block and of those after it."""
        return frozenset(ticket for each in islice(self.blocks, self.blocks.index(block), None) for ticket in each.tickets)

    def tickets(self) -> Iterator[TopicTicket]:
        """Messages that are not confirmed, in order."""
        for block in self.blocks:
            yield from block.tickets
        yield from self.queue

    def requeue(self, tickets: Sequence[TopicTicket]) -> None:
        """Put messages back to the head of the queue."""
        self.queue.extendleft(reversed(tickets))
        self.queue_bytes += sum(ticket.size for ticket in tickets)

    def dissolve(self) -> None:
        """Put what is in blocks, none of which is under way, back to the queue, to be sent under other positions. What is stored
        is left out."""
        tickets = [ticket for block in self.blocks if not block.done for ticket in block.tickets]
        self.blocks.clear()
        for ticket in tickets:
            ticket.attempts = 0
        self.requeue(tickets)

    def expired(self, now: float) -> list[TopicTicket]:
        """Unresolved messages whose time is over; later ones have later deadlines."""
        return [ticket for ticket in takewhile(lambda each: each.deadline <= now, self.tickets()) if not ticket.resolved]

    def unsent(self, number: int) -> bool:
        """True if one of the messages up to a number has not left for a leader."""
        held = (ticket for block in islice(self.blocks, self.sent, None) for ticket in block.tickets)
        left = takewhile(lambda each: each.message_id <= number, chain(held, self.queue))
        return any(not ticket.attempts and not ticket.resolved for ticket in left)


class GroupStream:
    """The stream to a group's leader."""

    __slots__ = ("busy", "draining", "link", "number", "open", "progress_at", "under_way", "window_bytes")

    def __init__(self, link: LeaderLink) -> None:
        self.link = link
        self.number = 0
        """Number of its stream; 0: there is none."""
        self.open = self.draining = False
        self.window_bytes = 0
        self.under_way = 0
        """Bytes of blocks that are not answered."""
        self.progress_at = 0.0
        self.busy: dict[int, PartStream] = {}
        """By part: those with something to send or to be answered, in order of turns."""


class Verdict(IntEnum):
    """Outcome of a block, as on the wire."""

    STORED = 0
    REPEATED = 1
    HOLE = 2
    SEALED = 3
    NOT_HERE = 4
    TOO_MANY_WRITERS = 5
    FULL = 6
    REFUSED = 7


class Result(NamedTuple):
    """The answer to a block."""

    request: int
    verdict: Verdict
    position: int = 0
    """The writer's last stored position in the part."""
    base: int = -1
    """Offset of the block's first message; -1: not known."""
    refusal: Refusal | None = None
    leader: str = ""
    """Address of the leader, if the refusal names it."""
    children: Sequence[Part] = ()
    """Of a sealed part: those that follow it."""


class Request(NamedTuple):
    """A block to send."""

    request: int
    data: bytes
    level: Level


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Open a stream to a leader."""

    address: str
    stream: int


@dataclass(frozen=True, slots=True)
class CloseStream:
    """End a stream."""

    stream: int


@dataclass(frozen=True, slots=True)
class Writable:
    """A stream has something to send."""

    stream: int


@dataclass(frozen=True, slots=True)
class Resolved:
    """Messages whose outcome is known: those that are watched, and those that failed."""

    tickets: Sequence[TopicTicket]


@dataclass(frozen=True, slots=True)
class RefreshTopic:
    """Ask for the topic's description. `newer`: for a newer version, and not only for the addresses of leaders."""

    newer: bool = False


Effect = OpenStream | CloseStream | Writable | Resolved | RefreshTopic


@dataclass(slots=True)
class TopicCounters:
    """Totals of a topic writer."""

    offered: int = 0
    confirmed: int = 0
    failed: int = 0
    repeated: int = 0
    """Messages that the topic had already, by their progress."""
    blocks: int = 0
    resent: int = 0
    """Blocks that were sent again."""
    holes: int = 0
    followed: int = 0
    """Sealed parts whose rest went to their children."""
    streams_opened: int = 0
    streams_died: int = 0
    malformed_replies: int = 0
    failures_by_code: dict[str, int] = field(default_factory=dict)
