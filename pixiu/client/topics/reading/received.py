"""Messages of a topic as readers and members get them: decoded when they are looked at.

Source: docs/topics.md, "Blocks".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import NamedTuple

from pixiu.client.topics.drafts import time_of
from pixiu.errors import MalformedData
from pixiu.wire.block import INDEX, INDEX_BYTES, Flag, Message, decode_message, fits


class Origin(NamedTuple):
    """Fields that the messages of one block have in common."""

    topic: str
    part: int
    time_us: int
    """Time at which the block was appended, Unix µs."""
    sender: int
    """UIN of the writer's login, 0 for a service."""
    writer: int


class TopicMessage:
    """A message of a topic. Its fields are decoded when the first of them is read."""

    __slots__ = ("_at", "_data", "_end", "_flags", "_found", "_origin", "offset", "slot")

    def __init__(self, origin: Origin, offset: int, data: bytes, at: int, end: int, slot: int, flags: int) -> None:
        self._origin, self._data = origin, data
        self._at, self._end, self._flags = at, end, flags
        self._found: Message | None = None
        self.offset = offset
        """Offset in its part."""
        self.slot = slot
        """Logical partition, 0 to 65535: the messages of one stay in order."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(topic={self.topic}, part={self.part}, offset={self.offset}, bytes={self._end - self._at})"

    def _message(self) -> Message:
        if self._found is None:
            if self._flags & ~Flag.LOAD_TEST and not fits(self._data, self._flags, self._at, self._end):
                raise MalformedData(f"the message at {self.part}:{self.offset} was damaged on its way")
            self._found = decode_message(self._data, self._at, self._end, self.slot, self._flags)
        return self._found

    @property
    def size(self) -> int:
        """Bytes of the message as it is stored: body, key, headers. Known without decoding it."""
        return self._end - self._at

    @property
    def body(self) -> bytes:
        """The bytes that the writer sent."""
        if not self._flags & ~Flag.LOAD_TEST:
            return self._data[self._at : self._end]  # it has no other field
        return self._message().body

    @property
    def key(self) -> bytes | None:
        """The key; None if it has none."""
        return self._message().key

    @property
    def headers(self) -> Mapping[str, bytes]:
        """Named values."""
        return dict(self._message().headers)

    @property
    def event_time(self) -> datetime | None:
        """Time at which it happened, UTC, as its writer says; None if it does not."""
        at = self.event_time_us
        return None if at is None else time_of(at)

    @property
    def event_time_us(self) -> int | None:
        """Time at which it happened, Unix µs, as its writer says; None if it does not."""
        return self._message().event_at_us

    @property
    def tag(self) -> str:
        """The tag; empty if it has none."""
        return self._message().tag or ""

    @property
    def load_test(self) -> bool:
        """True if the message belongs to a load test."""
        return bool(self._flags & Flag.LOAD_TEST)

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self._origin.topic

    @property
    def part(self) -> int:
        """The part that stored it."""
        return self._origin.part

    @property
    def position(self) -> tuple[int, int]:
        """(part, offset), which no other message of the topic has."""
        return self._origin.part, self.offset

    @property
    def time(self) -> datetime:
        """Time of storing, UTC."""
        return time_of(self._origin.time_us)

    @property
    def time_us(self) -> int:
        """Time of storing, Unix µs."""
        return self._origin.time_us

    @property
    def sender(self) -> int:
        """UIN of the writer's login, which no writer can choose; 0 for a service."""
        return self._origin.sender

    @property
    def writer(self) -> int:
        """ID of the writer."""
        return self._origin.writer


class Span(NamedTuple):
    """Place of one message in the data of a delivery."""

    at: int
    end: int
    slot: int
    flags: int


def spans(index: bytes, data: bytes) -> Iterator[Span]:
    """The places of the messages of a delivery. Raises `MalformedData` if they do not fit."""
    if len(index) % INDEX_BYTES:
        raise MalformedData("the index of a delivery is not whole")
    at = 0
    for end, slot, flags, _ in INDEX.iter_unpack(index):
        if not at <= end <= len(data):
            raise MalformedData("the index of a delivery does not fit its messages")
        yield Span(at, end, slot, flags)
        at = end
