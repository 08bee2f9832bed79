"""A mail that came, as an application has it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Protocol

from pixiu.client.inbox_core import Held
from pixiu.client.message import Message
from pixiu.ids import MsgID, SnowflakeID


class Acknowledger(Protocol):
    """What takes the acknowledgement of a mail."""

    def acknowledge(self, held: Held) -> None:
        """The application has it."""


class Mail:
    """A mail that came: the message, its place in the inbox, and the way to acknowledge it."""

    __slots__ = ("_inbox", "held", "message")

    def __init__(self, inbox: Acknowledger, held: Held, message: Message) -> None:
        self._inbox = inbox
        self.held = held
        """What the inbox keeps of it until it is acknowledged."""
        self.message = message
        """All that the sender said. `message.user` is the first of several receivers."""

    def __repr__(self) -> str:
        return f"Mail(lane={self.lane}, seq={self.seq}, msg_id={self.msg_id:016x}, bytes={len(self.payload)})"

    @property
    def payload(self) -> bytes:
        """The bytes that the sender sent."""
        return self.message.payload

    @property
    def sender(self) -> int:
        """The sender's UIN, 0 for a service."""
        return self.message.sender

    @property
    def message_id(self) -> SnowflakeID:
        """The sender's ID of the mail."""
        return self.message.message_id

    @property
    def sent_at_ms(self) -> int:
        """When it was sent, Unix milliseconds; 0 where the ID holds no time."""
        return self.message.sent_at_ms

    @property
    def sent_at(self) -> datetime | None:
        """When it was sent, UTC; None where the ID holds no time."""
        return self.message.sent_at

    @property
    def type(self) -> int:
        """The application's type, 0 to 63."""
        return self.message.type

    @property
    def extension(self) -> bytes:
        """What the application sent beside the payload: its headers, as bytes, or another format; empty where there is nothing."""
        return self.message.extension

    @property
    def headers(self) -> Mapping[str, str]:
        """The application's headers; empty where it sent none, or an extension of another format."""
        return self.message.headers

    @property
    def lane(self) -> int:
        """The inbox's lane; order holds within a lane."""
        return self.held.lane

    @property
    def seq(self) -> int:
        """InboxSeq: its number in the inbox and lane."""
        return self.held.seq

    @property
    def msg_id(self) -> MsgID:
        """The MsgID that the cluster gave it: the same in every inbox that it went to."""
        return MsgID(self.held.msg_id)

    @property
    def redelivered(self) -> bool:
        """Whether the cluster sent it to this device before. An earlier process of the device may have handled it."""
        return self.held.redelivered

    @property
    def acknowledged(self) -> bool:
        """Whether it was acknowledged."""
        return self.held.acknowledged

    def acknowledge(self) -> None:
        """The application has it: the device does not get it again. Once more changes nothing; it never waits.

        The acknowledgement leaves within some milliseconds, with others. `Inbox.flush` waits until the gateway has it.
        Raises `NotConnected` when the inbox was closed before: then the mail comes again.
        """
        self._inbox.acknowledge(self.held)
