"""A mail as the application receives it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Protocol

from pixiu.client.inbox.core import Held
from pixiu.client.messages.message import Message
from pixiu.ids import MsgID, SnowflakeID


class Acknowledger(Protocol):
    """Takes the acknowledgement of a mail."""

    def acknowledge(self, held: Held) -> None:
        """Acknowledge a mail for the application."""


class Mail:
    """A received mail: the message, its place in the inbox, and the way to acknowledge it."""

    __slots__ = ("_inbox", "held", "message")

    def __init__(self, inbox: Acknowledger, held: Held, message: Message) -> None:
        self._inbox = inbox
        self.held = held
        """State that the inbox keeps until the mail is acknowledged."""
        self.message = message
        """The message as sent. `message.user` is the first of several receivers."""

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
        """Time of sending, Unix milliseconds; 0 if the ID holds no time."""
        return self.message.sent_at_ms

    @property
    def sent_at(self) -> datetime | None:
        """Time of sending, UTC; None if the ID holds no time."""
        return self.message.sent_at

    @property
    def load_test(self) -> bool:
        """True if it belongs to a load test."""
        return self.message.load_test

    @property
    def type(self) -> int:
        """The application's type, 0 to 63."""
        return self.message.type

    @property
    def extension(self) -> bytes:
        """Bytes that the application sent beside the payload: its headers, encoded, or another format; empty if it sent none."""
        return self.message.extension

    @property
    def headers(self) -> Mapping[str, str]:
        """The application's headers; empty if it sent none, or an extension in another format."""
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
        """The MsgID that the cluster assigned: the same in every inbox that has the mail."""
        return MsgID(self.held.msg_id)

    @property
    def redelivered(self) -> bool:
        """True if the cluster sent the mail to this device before. An earlier process of the device may have handled it."""
        return self.held.redelivered

    @property
    def acknowledged(self) -> bool:
        """True if the mail was acknowledged."""
        return self.held.acknowledged

    def acknowledge(self) -> None:
        """Acknowledge the mail: the device does not get it again. Never waits; repeated calls have no effect.

        The acknowledgement leaves within some milliseconds, with others. `Inbox.flush` waits until the gateway has it.
        Raises `NotConnected` when the inbox was closed before: then the mail is delivered again.
        """
        self._inbox.acknowledge(self.held)
