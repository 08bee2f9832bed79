"""Receiving mail for programs without asyncio: the synchronous twin of `Inbox`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from pixiu.client.inbox import ALL_LANES, Inbox, Mail
from pixiu.client.inbox_core import Held, MailIntakeCounters
from pixiu.errors import InvalidArgument, NotConnected
from pixiu.ids import UIN

T = TypeVar("T")


class Background(Protocol):
    """The synchronous client: what it does in its background thread."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it."""

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call something there, without waiting."""


class SyncInbox:
    """`Inbox` for a thread: `with px.inbox(uin=7, device="phone") as inbox: for mail in inbox`. One thread at a time may take
    mail; any may acknowledge it. `on_gap` runs in the background thread.

    Source: DESIGN sections 9 ("Delivery of mail") and 15 ("a synchronous twin").
    """

    def __init__(self, background: Background, inbox: Inbox) -> None:
        self._background = background
        self._inbox = inbox
        self._running = False

    @property
    def uin(self) -> UIN:
        """Whose mail it is."""
        return self._inbox.uin

    @property
    def gateway(self) -> str:
        """The address of the gateway that serves now; empty while there is none."""
        return self._inbox.gateway

    @property
    def counters(self) -> MailIntakeCounters:
        """Totals."""
        return self._inbox.counters

    @property
    def unacknowledged(self) -> int:
        """As `Inbox.unacknowledged`."""
        return self._inbox.unacknowledged

    def ready(self, *, timeout_s: float | None = None) -> None:
        """As `Inbox.ready`."""
        self._background.run(self._inbox.ready(timeout_s=timeout_s))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Mail:
        if self._running:
            raise InvalidArgument("`run` takes this inbox's mail: iterate when it has ended, or use another device")
        mail = self._background.run(self._inbox.next(ALL_LANES))
        if mail is None:
            raise StopIteration
        return Mail(self, mail.held, mail.message)

    def run(
        self, handler: Callable[[Mail], None], *, retries: int = 5, backoff_s: float = 0.2, max_backoff_s: float = 30.0
    ) -> None:
        """As `Inbox.run`; waits until the inbox is closed, by another thread. `handler` is called in threads of its own, one
        for each lane, and may block."""

        async def run() -> None:
            await self._inbox.run(called, retries=retries, backoff_s=backoff_s, max_backoff_s=max_backoff_s)

        async def called(mail: Mail) -> None:
            await asyncio.to_thread(handler, Mail(self, mail.held, mail.message))

        self._running = True
        try:
            self._background.run(run())
        finally:
            self._running = False

    def acknowledge(self, held: Held) -> None:
        """As `Mail.acknowledge`, from any thread."""
        if held.acknowledged:
            return
        if self._inbox.closed:
            raise NotConnected("the inbox is closed: the mail is not acknowledged, and comes again with the device's next inbox")

        def acknowledge() -> None:
            with suppress(NotConnected):  # closed meanwhile
                self._inbox.acknowledge(held)

        self._background.call_soon(acknowledge)

    def flush(self, *, timeout_s: float | None = None) -> None:
        """As `Inbox.flush`."""
        self._background.run(self._inbox.flush(timeout_s=timeout_s))

    def close(self) -> None:
        """As `Inbox.close`."""
        self._background.run(self._inbox.close())

    def __enter__(self) -> Self:
        try:
            self.ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
