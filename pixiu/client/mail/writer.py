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

from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Self, Unpack

from pixiu.client.mail.options import MailSendOptions
from pixiu.client.mail.publisher import MailPublisher
from pixiu.client.mail.receipt import MailReceipt
from pixiu.client.send.events import SendCounters
from pixiu.errors import InvalidArgument
from pixiu.wire.levels import Triple


class MailWriter:
    """Sends mail without waiting for each: `async with px.mail_writer() as writer`. All writers of a client share its
    streams. Mail to one user goes through one of them, so mail of one client to one inbox and lane is stored in the order of the
    calls of `send`. With several `mail_streams` that holds for the first receiver of a mail, and not for those of `to`.

    Source: docs/architecture.md, "A mail is sent"; Swift.
    """

    def __init__(self, publisher: MailPublisher) -> None:
        self._publisher = publisher
        self._first_failure: MailReceipt | None = None
        self._unfinished: deque[MailReceipt] = deque()

    async def __aenter__(self) -> Self:
        await self.space()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            await self.wait_finished()

    def send(self, uin: int, payload: bytes, **options: Unpack[MailSendOptions]) -> MailReceipt:
        """Queue a mail; arguments as for `User.mail`. Never waits: the mail is sent together with others that are queued.

        Raises `Overloaded` when too much is unconfirmed (`queue_records`, `queue_bytes`) or no number for IDs is held: `await
        space()` first. Any other error is about the arguments.
        """
        receipt = self._publisher.send(uin, payload, **options)
        self._note(receipt)
        return receipt

    def resend(self, receipt: MailReceipt) -> MailReceipt:
        """Queue a failed mail again, with the same ID: inboxes that already have it do not get it twice."""
        if not receipt.resolved or receipt.failure is None:
            raise InvalidArgument("only a mail that failed can be sent again")
        self._publisher.resend(receipt)
        self._note(receipt)
        return receipt

    def _note(self, receipt: MailReceipt) -> None:
        while self._unfinished and self._unfinished[0].resolved:
            self._keep_failure(self._unfinished.popleft())
        self._unfinished.append(receipt)

    def _keep_failure(self, receipt: MailReceipt) -> None:
        if receipt.failure is not None and self._first_failure is None:
            self._first_failure = receipt

    async def space(self) -> None:
        """Wait until one more mail may be sent."""
        await self._publisher.space()

    async def flush(self) -> None:
        """Wait until all mail sent so far has left for a proxy at least once."""
        await self._publisher.flushed()

    async def wait_sent(self) -> None:
        """Wait until a proxy has all mail sent so far: from then on both it and this process hold the unconfirmed mail."""
        await self._publisher.sent()

    async def wait_finished(self) -> None:
        """Wait until all mail sent so far is confirmed at its level. Raises the error of the first mail that failed since the last
        call; the errors of others are in their receipts."""
        await self._publisher.finished()
        while self._unfinished and self._unfinished[0].resolved:
            self._keep_failure(self._unfinished.popleft())
        failed, self._first_failure = self._first_failure, None
        if failed is not None and (error := failed.error) is not None:
            raise error

    @property
    def triples(self) -> Mapping[tuple[str, int], Triple]:
        """(role, partition) → its state at its last answer."""
        return self._publisher.triples()

    @property
    def counters(self) -> SendCounters:
        """Totals of all mail of the client."""
        return self._publisher.counters()
