"""What a proxy holds of mail under way: writers, parcels, and a link to each partition's leader. Pure.

Source: DESIGN section 9, "Mail".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pixiu.wire.levels import Level
from proxy.mail_events import Store

Waiting = TypeVar("Waiting")


@dataclass(slots=True, eq=False)
class Writer:
    """One stream of a sender."""

    stream: int
    worker: int
    generation: int
    expected: int = 1
    size: int = 0
    """Bytes that are not confirmed."""
    ended: bool = False
    parcels: dict[Parcel, None] = field(default_factory=dict)
    """Under way, in order."""
    channels: dict[int, deque[Parcel]] = field(default_factory=dict)
    """By partition of Xiu (UIN % n): what goes to inboxes of these users, in order. A mail to several users may stand in
    several; it goes on when it is the first in all of them."""


@dataclass(slots=True, eq=False)
class Parcel:
    """Mail of one writer and one level that goes the same way: many to one receiver each, or one to many."""

    writer: Writer
    level: Level
    partition: int
    """Of Xiu."""
    channels: tuple[int, ...]
    deadline: float
    positions: list[int] = field(default_factory=list)
    uins: list[int] = field(default_factory=list)
    """One receiver each; of a mail to many all of them."""
    many: bool = False
    ends: list[int] = field(default_factory=list)
    """Where each record ends in `data`."""
    types: bytearray = field(default_factory=bytearray)
    size: int = 0
    data: bytes = b""
    msg_ids: list[int] = field(default_factory=list)
    codes: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Index → why Xiu refused it."""
    copies: int = 0
    stored: bool = False
    pending: int = 0
    """Parts that Pi has not answered."""
    open: set[int] = field(default_factory=set)
    """Of a mail to many: inboxes that have it not yet."""
    refused: tuple[str, str] | None = None
    """Of a mail to many: why some inbox did not take it."""
    done: bool = False

    @property
    def count(self) -> int:
        """Records."""
        return len(self.positions)

    def finish(self) -> None:
        """Nobody asks for it any more. It may stand in queues for a while, without its records."""
        self.done, self.data, self.uins, self.msg_ids = True, b"", [], []


@dataclass(slots=True, eq=False)
class Part:
    """Appends of a parcel to inboxes of one partition of Pi."""

    parcel: Parcel
    indexes: Sequence[int]
    """In the parcel, one for each receiver in `uins`."""
    uins: Sequence[int]


@dataclass(slots=True, eq=False)
class Request(Generic[Waiting]):
    """What went to a store and is not answered."""

    waiting: list[Waiting]
    size: int
    count: int = 0
    remaining: int = 0
    found: list[int] = field(default_factory=list)
    """MsgIDs."""
    codes: dict[int, tuple[str, str]] = field(default_factory=dict)
    retry: tuple[str, str] | None = None


@dataclass(slots=True, eq=False)
class Link(Generic[Waiting]):
    """To the leader of one partition."""

    store: Store
    number: int = 0
    """Of the stream that is open; 0: none is."""
    epoch: int = 0
    queue: deque[Waiting] = field(default_factory=deque)
    in_flight: dict[int, Request[Waiting]] = field(default_factory=dict)
    """By the request's number, for a Xiu the position of its first record; in order."""
    in_flight_bytes: int = 0
    next_number: int = 1
    progress_at: float = 0.0
    not_before: float = 0.0
    trouble: tuple[str, str] | None = None
    """The last refusal."""

    def finished(self, number: int) -> Request[Waiting] | None:
        """A request is answered."""
        request = self.in_flight.pop(number, None)
        if request is not None:
            self.in_flight_bytes -= request.size
        return request

    def drop(self) -> list[Request[Waiting]]:
        """The stream is gone; what it had, in order."""
        lost = list(self.in_flight.values())
        self.in_flight, self.in_flight_bytes, self.number, self.epoch = {}, 0, 0, 0
        return lost
