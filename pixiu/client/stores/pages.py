"""Pages, devices and dead letters of users' inboxes. Pure.

Source: docs/delivery.md, docs/pi.md; docs/protocol.md, "Inboxes".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from pixiu.client.inbox.dead_letters import DeadLetter
from pixiu.client.messages.message import Message, message_of
from pixiu.errors import MalformedData
from pixiu.wire.inbox_operations import DEVICE_ID_BYTES
from pixiu.wire.record import HEADER_SIZE, MAX_RECORD_BYTES, SIZE_FIELD, is_over
from pixiu.wire.v1 import pi_pb2, xiu_pb2

LANES: Final = (0, 1)
MAX_PAGE: Final = 1000
MAX_DEVICE_NAME_BYTES: Final = 128
NEWEST: Final = (1 << 64) - 1
"""As `before`: begin with the newest entry."""


@dataclass(slots=True)
class InboxEntry:
    """One entry of an inbox."""

    lane: int
    seq: int
    msg_id: int
    code: str = ""
    """The reason why the message cannot be shown; empty if it is here, or was not asked for."""
    message: Message | None = None
    record: bytes = b""
    """The record as it was stored (`pixiu.wire.record`)."""

    def expired(self, now_ms: int) -> bool:
        """True if the lifetime of the mail is over."""
        message = self.message
        return message is not None and is_over(message.lifetime_min, message.sent_at_ms, now_ms)


@dataclass(frozen=True, slots=True)
class DeviceState:
    """One device of a user, and its position in one lane."""

    number: int
    """DeviceID."""
    device_id: int
    """DeviceID, derived from the device's name (`pixiu.ids.device_of_name`) or chosen by its client; 0: device 0."""
    name: str
    """Name at its last connection; empty: it has none."""
    seen_s: int
    """Time of its last connection, Unix seconds, to the hour."""
    counts: bool
    """True if the inbox keeps entries for it; false after 30 days (`pi.device_age_s`) without a connection."""
    up_to: int
    """The device has acknowledged everything up to here."""
    unread: int
    """Number of entries that it could read and has not acknowledged."""


@dataclass(slots=True)
class Lane:
    """A page of one lane of an inbox."""

    lane: int
    floor: int = 0
    """Entries up to here can no longer be read."""
    gap: int = 0
    """The newest entry that was dropped before every device had acknowledged it."""
    last: int = 0
    """The newest InboxSeq."""
    dropped: int = 0
    """Total of entries that were dropped unacknowledged."""
    entries: list[InboxEntry] = field(default_factory=list)
    readable: int = 0
    """Number of entries that can be read: all after the floor, without deleted ones."""
    devices: list[DeviceState] = field(default_factory=list)
    """Devices, if they were asked for."""


@dataclass(slots=True)
class DeadLetterEntry:
    """One dead letter: its place, and its content."""

    entry: InboxEntry
    """The entry in the dead-letter inbox; its MsgID identifies the dead letter."""
    letter: DeadLetter | None = None
    """The content; None if it cannot be read, then `entry.code` holds the reason."""
    original: Message | None = None
    """The original mail; None if the dead letter does not include it."""


def lane_of(lane: int, reply: pi_pb2.PiReadReply) -> Lane:
    """Convert the answer to one read."""
    entries = [InboxEntry(lane, seq, number) for seq, number in zip(reply.seqs, reply.msg_ids, strict=True)]
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


def take(entries: Sequence[InboxEntry], reply: xiu_pb2.FetchReply) -> None:
    """Put Xiu's answers into the entries that were asked for: the records, or the reasons why they are missing."""
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
