"""What is found in a user's inbox. Pure.

Source: docs/delivery.md, docs/pi.md; docs/protocol.md, "Inboxes".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from pixiu.client.dead_letters import DeadLetter
from pixiu.client.message import Message, message_of
from pixiu.errors import MalformedData
from pixiu.wire.inbox_operations import DEVICE_ID_BYTES
from pixiu.wire.record import HEADER_SIZE, MAX_RECORD_BYTES, SIZE_FIELD, is_over
from pixiu.wire.v1 import pi_pb2, xiu_pb2

LANES: Final = (0, 1)
MAX_PAGE: Final = 1000
MAX_DEVICE_NAME_BYTES: Final = 128
NEWEST: Final = (1 << 64) - 1
"""Before this is everything."""


@dataclass(slots=True)
class Entry:
    """One entry of an inbox."""

    lane: int
    seq: int
    msg_id: int
    code: str = ""
    """Why the message cannot be shown; empty: it is here, or was not asked for."""
    message: Message | None = None
    record: bytes = b""
    """As it was stored (`pixiu.wire.record`)."""

    def expired(self, now_ms: int) -> bool:
        """Whether its lifetime is over."""
        message = self.message
        return message is not None and is_over(message.lifetime_min, message.sent_at_ms, now_ms)


@dataclass(frozen=True, slots=True)
class DeviceState:
    """One device of a user, and where it is in one lane."""

    number: int
    """DeviceID."""
    device_id: int
    """Of the device's name (`pixiu.ids.device_of_name`), or as its client said it; 0: device 0."""
    name: str
    """What it was called when it connected last; empty: it has no name."""
    seen_s: int
    """When it was last seen, Unix seconds, to the hour."""
    counts: bool
    """Whether the inbox keeps entries for it; not after 30 days (`pi.device_age_s`) without it."""
    up_to: int
    """It has acknowledged everything up to here."""
    unread: int
    """Entries that it could read and has not acknowledged."""


@dataclass(slots=True)
class Lane:
    """A page of one lane of an inbox."""

    lane: int
    floor: int = 0
    """Entries up to here cannot be read any more."""
    gap: int = 0
    """The newest entry that was dropped before every device had acknowledged it."""
    last: int = 0
    """The newest InboxSeq."""
    dropped: int = 0
    """How many were dropped unacknowledged, ever."""
    entries: list[Entry] = field(default_factory=list)
    readable: int = 0
    """Entries that can be read: the newest less the floor and what was deleted."""
    devices: list[DeviceState] = field(default_factory=list)
    """If they were asked for."""


@dataclass(slots=True)
class DeadLetterEntry:
    """One dead letter: where it lies, and what it is."""

    entry: Entry
    """Its MsgID names it."""
    letter: DeadLetter | None = None
    """None: it cannot be read, `entry.code` says why."""
    original: Message | None = None
    """The mail; None where the dead letter came without it."""


def lane_of(lane: int, reply: pi_pb2.PiReadReply) -> Lane:
    """The answer to one read."""
    entries = [Entry(lane, seq, number) for seq, number in zip(reply.seqs, reply.msg_ids, strict=True)]
    devices = [
        DeviceState(
            each.device,
            int.from_bytes(each.client_id[:DEVICE_ID_BYTES], "big"),
            each.client_id[DEVICE_ID_BYTES:].decode(errors="replace"),
            each.seen_s,
            each.counts,
            each.up_to,
            each.unread,
        )
        for each in reply.devices
    ]
    return Lane(lane, reply.floor, reply.gap, reply.last, reply.dropped, entries, reply.unread, devices)


def take(entries: Sequence[Entry], reply: xiu_pb2.FetchReply) -> None:
    """Put what Xiu answered into the entries that were asked for, or why it is not there."""
    records = _records(reply.batch)
    for entry, code in zip(entries, reply.codes, strict=False):
        entry.code = code
        if not code:
            record = next(records, b"")
            try:
                if len(record) < HEADER_SIZE:
                    raise MalformedData("the record is cut off")
                entry.message, entry.record = message_of(record), record
            except MalformedData:
                entry.code = MalformedData.code


def _records(batch: bytes) -> Iterator[bytes]:
    at = 0
    while at + SIZE_FIELD <= len(batch):
        size = int.from_bytes(batch[at : at + SIZE_FIELD], "little") + SIZE_FIELD
        if size > MAX_RECORD_BYTES or at + size > len(batch):
            return
        yield batch[at : at + size]
        at += size
