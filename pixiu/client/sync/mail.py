"""Mail for programs without asyncio: the blocking twins of `MailReceipt`, `MailWriter` and `Inbox`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self, Unpack

from pixiu.client.inbox.core import Held, MailIntakeCounters
from pixiu.client.inbox.inbox import ALL_LANES, Inbox
from pixiu.client.inbox.mail import Mail
from pixiu.client.mail.options import MailSendOptions
from pixiu.client.mail.receipt import MailReceipt
from pixiu.client.mail.writer import MailWriter
from pixiu.client.send.events import SendCounters
from pixiu.client.sync.blocking import Background, Twin, TwinWriter, blocking, blocking_as
from pixiu.client.sync.receipts import TwinReceipt
from pixiu.errors import InvalidArgument, NotConnected
from pixiu.ids import UIN, MsgID
from pixiu.wire.levels import Triple


class SyncMailReceipt(TwinReceipt[MailReceipt]):
    """Receipt of a mail."""

    __slots__ = ()

    @property
    def stored_as(self) -> MsgID:
        """The MsgID that Xiu assigned; 0 until it is known."""
        return self._wrapped.stored_as

    @property
    def replicas(self) -> int:
        """Number of replicas, of Xiu and of Pi, that had the mail when it was confirmed."""
        return self._wrapped.replicas

    @property
    def receipt(self) -> MailReceipt:
        """The receipt in the background thread."""
        return self._wrapped


async def _send(writer: MailWriter, uin: int, payload: bytes, **options: Unpack[MailSendOptions]) -> MailReceipt:
    """Queue a mail, waiting while too much is unconfirmed; arguments as for `User.mail`. It is sent together with others in the
    queue.

    Raises `NotSent` when no proxy lends a number for message IDs, and errors of the arguments.
    """
    await writer.space()
    return writer.send(uin, payload, **options)


class SyncMailWriter(TwinWriter[MailWriter]):
    """`MailWriter` for a thread: `with px.mail_writer() as writer`. `send` waits while too much is unconfirmed.

    Source: docs/architecture.md, "A mail is sent", docs/operations.md.
    """

    send = blocking_as(SyncMailReceipt, _send)
    flush = blocking(MailWriter.flush)
    wait_sent = blocking(MailWriter.wait_sent)

    def resend(self, receipt: SyncMailReceipt) -> SyncMailReceipt:
        """Queue a failed mail again, with the same ID: inboxes that already have it do not get it twice."""

        async def resend() -> None:
            await self._wrapped.space()
            self._wrapped.resend(receipt.receipt)

        self._background.run(resend())
        return receipt

    @property
    def triples(self) -> Mapping[tuple[str, int], Triple]:
        """(role, partition) → its state at its last answer."""
        return self._wrapped.triples

    @property
    def counters(self) -> SendCounters:
        """Totals of all mail of the client."""
        return self._wrapped.counters


class SyncInbox(Twin[Inbox]):
    """`Inbox` for a thread: `with px.inbox(uin=7, device="phone") as inbox: for mail in inbox`. One thread at a time may take
    mail; any may acknowledge it. `on_gap` runs in the background thread.

    Source: docs/delivery.md, docs/operations.md.
    """

    def __init__(self, background: Background, inbox: Inbox) -> None:
        super().__init__(background, inbox)
        self._running = False

    ready = blocking(Inbox.ready)
    flush = blocking(Inbox.flush)
    close = blocking(Inbox.close)

    @property
    def uin(self) -> UIN:
        """The user whose mail it receives."""
        return self._wrapped.uin

    @property
    def device(self) -> str:
        """The name of the device as given; if there is only a number, that in hex."""
        return self._wrapped.device

    @property
    def gateway(self) -> str:
        """The address of the gateway that serves now; empty while there is none."""
        return self._wrapped.gateway

    @property
    def counters(self) -> MailIntakeCounters:
        """Counters since the inbox was opened."""
        return self._wrapped.counters

    @property
    def unacknowledged(self) -> int:
        """Number of mails in this process, taken or not, that are not acknowledged."""
        return self._wrapped.unacknowledged

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Mail:
        if self._running:
            raise InvalidArgument("`run` consumes this inbox's mail: iterate after it has ended, or use another device")
        mail = self._background.run_until_end(self._wrapped.next(ALL_LANES))
        if mail is None:
            raise StopIteration
        return Mail(self, mail.held, mail.message)

    def run(
        self, handler: Callable[[Mail], None], *, retries: int = 5, backoff_s: float = 0.2, max_backoff_s: float = 30.0
    ) -> None:
        """Handle mail until another thread closes the inbox; arguments and retries as for `Inbox.run`. `handler` runs in threads of
        its own, one for each lane, and may block."""

        async def called(mail: Mail) -> None:
            await asyncio.to_thread(handler, Mail(self, mail.held, mail.message))

        self._running = True
        try:
            self._background.run(self._wrapped.run(called, retries=retries, backoff_s=backoff_s, max_backoff_s=max_backoff_s))
        finally:
            self._running = False

    def acknowledge(self, held: Held) -> None:
        """Acknowledge a mail; may be called from any thread. Raises `NotConnected` when the inbox was closed before."""
        if held.acknowledged:
            return
        if self._wrapped.closed:
            raise NotConnected("the inbox is closed: the mail is not acknowledged, and is redelivered to the device's next inbox")

        def acknowledge() -> None:
            with suppress(NotConnected):  # closed meanwhile
                self._wrapped.acknowledge(held)

        self._background.call_soon(acknowledge)

    def __enter__(self) -> Self:
        try:
            self.ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
