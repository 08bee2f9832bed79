"""The receipt of a mail."""

from __future__ import annotations

import asyncio

from pixiu.client.mail.policy import MailTicket
from pixiu.client.send.awaited import Awaited
from pixiu.errors import InboxFull, OutcomeUnknown, PixiuError
from pixiu.ids import MsgID
from pixiu.wire.levels import Level


class MailReceipt(Awaited, MailTicket):
    """Receipt of a mail. `await receipt` waits until the mail is confirmed at its level, and raises its failure.

    Source: docs/architecture.md: "a Future exists only for a message that is awaited".
    """

    __slots__ = ("_waiters", "unclaimed")

    def __init__(self, record: bytes, message_id: int, level: Level, more: tuple[int, ...] = ()) -> None:
        super().__init__(record, message_id, level, more)
        self._waiters: list[asyncio.Future[None]] | None = None

    @property
    def stored_as(self) -> MsgID:
        """The MsgID that Xiu assigned; 0 until it is known."""
        return MsgID(self.msg_id)

    @property
    def replicas(self) -> int:
        """Number of replicas, of Xiu and of Pi, that had the mail when it was confirmed."""
        return self.copies

    def _problem(self) -> PixiuError | None:
        error = super()._problem()
        if isinstance(error, OutcomeUnknown | InboxFull):
            error.open_inboxes = self.open
        return error
