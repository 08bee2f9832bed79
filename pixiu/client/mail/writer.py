"""The writer, which sends mail without waiting for each one.

    receipt = await px.user(7).mail(b"hello")                       # returns when it is confirmed
    async with px.mail_writer() as writer:                         # pipelined
        for uin in users:
            await writer.space()
            writer.send(uin, b"hello", level="persisted")
        await writer.wait_finished()

Source: docs/architecture.md, "A mail is sent"; Swift (flush, waitSent, waitFinish).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self, Unpack

from pixiu.client.mail.options import MailSendOptions
from pixiu.client.mail.publisher import MailPublisher
from pixiu.client.mail.receipt import MailReceipt
from pixiu.client.send.base_writer import BaseWriter
from pixiu.client.send.events import SendCounters
from pixiu.errors import InvalidArgument
from pixiu.wire.levels import Triple


class MailWriter(BaseWriter[MailReceipt]):
    """Sends mail without waiting for each: `async with px.mail_writer() as writer`. All writers of a client share its
    streams. Mail to one user goes through one of them, so mail of one client to one inbox and lane is stored in the order of the
    calls of `send`. With several `mail_streams` that holds for the first receiver of a mail, and not for those of `to`.

    Source: docs/architecture.md, "A mail is sent"; Swift.
    """

    def __init__(self, publisher: MailPublisher) -> None:
        super().__init__()
        self._publisher = publisher

    async def __aenter__(self) -> Self:
        await self.space()
        return self

    def send(self, uin: int, payload: bytes, **options: Unpack[MailSendOptions]) -> MailReceipt:
        """Queue a mail; arguments as for `User.mail`. Never waits: the mail is sent together with others that are queued.

        Raises `Overloaded` when too much is unconfirmed (`queue_records`, `queue_bytes`) or no number for IDs is held: `await
        space()` first. Any other error is about the arguments.
        """
        return self._note(self._publisher.send(uin, payload, **options))

    def resend(self, receipt: MailReceipt) -> MailReceipt:
        """Queue a failed mail again, with the same ID: inboxes that already have it do not get it twice."""
        if not receipt.resolved or receipt.failure is None:
            raise InvalidArgument("only a mail that failed can be sent again")
        self._publisher.resend(receipt)
        return self._note(receipt)

    async def space(self) -> None:
        """Wait until one more mail may be sent."""
        await self._publisher.space()

    async def flush(self) -> None:
        """Wait until all mail sent so far has left for a proxy at least once."""
        await self._publisher.flushed()

    async def wait_sent(self) -> None:
        """Wait until a proxy has all mail sent so far: from then on both it and this process hold the unconfirmed mail."""
        await self._publisher.sent()

    @property
    def triples(self) -> Mapping[tuple[str, int], Triple]:
        """(role, partition) → its state at its last answer."""
        return self._publisher.triples()

    @property
    def counters(self) -> SendCounters:
        """Totals of all mail of the client."""
        return self._publisher.counters()
