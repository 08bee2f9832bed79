"""Plays a schedule of mail: one sender, in the log's order; receivers who connect, take and acknowledge their mail, and leave.

    sender      ──mail──mail──mail──────▶ one writer
    receiver        [connect, take, acknowledge, leave]  …  once more at the end, until nothing more waits for it

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

from pixiu.client.inbox.core import MailGap
from pixiu.client.inbox.inbox import Inbox
from pixiu.client.mail.receipt import MailReceipt
from pixiu.client.mail.writer import MailWriter
from pixiu.errors import PixiuError
from pixiu.ids import UIN
from tools.load.ledger import Ledger
from tools.load.payload import monotonic_us
from tools.replay.inbox import inbox_of
from tools.replay.mail.plan import MailPlan, Stay

SENDER: Final = UIN(0)
"""The writer, which sends for all users: so the ledger checks the order of each inbox."""
DEVICE: Final = "replay"
"""The name of each receiver's device."""
FAILURES: Final = (PixiuError, OSError, asyncio.TimeoutError)
SWEEP_S: Final = 0.1
"""Interval at which confirmations are checked and progress is reported, seconds."""
MAX_OPEN: Final = 2000
"""Limit of mails whose outcome is not known. Policy: the next one waits."""
PAUSE_S: Final = 0.5
"""Wait before a user whose connection failed connects again, seconds."""


class MailClient(Protocol):
    """The part of `pixiu.Client` that the driver uses."""

    def mail_writer(self) -> MailWriter:
        """Open a writer that sends mail."""

    def inbox(self, *, uin: int, device: str, on_gap: Callable[[MailGap], None] | None) -> Inbox:
        """Open an inbox that receives mail."""


class MailDriver:
    """Drives one replay of mentions as mail.

    Args:
        client: client of a service: it sends in its name, and receives for every user.
        run: bytes that mark the mail of this replay.
        slots: limit of connections being opened, and of users on their last visit, at a time.
        login_s: time limit of a login, seconds.
        settle_s: time without mail after which a user leaves although mail still waits, seconds.
    """

    def __init__(
        self,
        plan: MailPlan,
        client: MailClient,
        *,
        run: bytes,
        slots: int = 64,
        login_s: float = 30.0,
        settle_s: float = 30.0,
        on_progress: Callable[[], None] = lambda: None,
        now_us: Callable[[], int] = monotonic_us,
    ) -> None:
        self._plan, self._client = plan, client
        self.ledger = Ledger(run)
        for uin in plan.stays:  # who is away is owed its mail as well
            self.ledger.joining(inbox_of(uin), uin, now_us())
            self.ledger.joined(inbox_of(uin), uin)
        self._slots = asyncio.Semaphore(slots)
        self._last_visits = asyncio.Semaphore(slots)
        self._login_s, self._settle_s = login_s, settle_s
        self._on_progress, self._now_us = on_progress, now_us
        self._receipts: deque[tuple[int, MailReceipt]] = deque()
        self._sender: asyncio.Task[None] | None = None
        self.interrupted = False
        self.logins = 0
        self.failed_logins = 0
        self.online = 0
        """Number of users who are connected now."""
        self.most_online = 0
        self.gaps = 0
        """Gaps reported to receivers."""

    def interrupt(self) -> None:
        """Send nothing more; mail already sent is still received."""
        self.interrupted = True
        if self._sender is not None:
            self._sender.cancel()

    async def run(self) -> None:
        """Play everything, then let every receiver connect once more; `ledger` holds the result."""
        sweeper = asyncio.create_task(self._sweep(), name="replay-mail-sweeper")
        start = asyncio.get_running_loop().time()
        self._sender = asyncio.create_task(self._send_all(start), name="replay-mail-sender")
        users = [asyncio.create_task(self._come_and_go(uin, stays, start)) for uin, stays in self._plan.stays.items()]
        try:
            for outcome in await asyncio.gather(self._sender, return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise outcome
            if self.interrupted:
                for task in users:
                    task.cancel()
            await asyncio.gather(*users, return_exceptions=self.interrupted)
            await self._come_once_more()
        finally:
            for task in (sweeper, self._sender, *users):
                task.cancel()
            await asyncio.gather(sweeper, self._sender, *users, return_exceptions=True)

    # --- sending

    async def _send_all(self, start: float) -> None:
        loop = asyncio.get_running_loop()
        async with self._client.mail_writer() as writer:
            try:
                for number, letter in enumerate(self._plan.letters):
                    wait_s = start + letter.at_s - loop.time()
                    if wait_s > 0:
                        await asyncio.sleep(wait_s)
                    while len(self._receipts) >= MAX_OPEN:
                        await asyncio.sleep(SWEEP_S)
                    await writer.space()
                    payload = self.ledger.send(number, inbox_of(letter.to), SENDER, letter.text, self._now_us())
                    self._receipts.append((number, writer.send(letter.to, payload)))
            finally:
                while self._receipts:
                    await asyncio.sleep(SWEEP_S)

    def _take_answers(self) -> None:
        """Take known outcomes, in order, up to the first that is not known."""
        while self._receipts and self._receipts[0][1].done:
            number, receipt = self._receipts.popleft()
            if receipt.error is not None:
                self.ledger.refused(number, receipt.error.code)
            else:
                self.ledger.acknowledged(number, self._now_us())

    async def _sweep(self) -> None:
        while True:
            self._take_answers()
            self._on_progress()
            await asyncio.sleep(SWEEP_S)

    # --- receiving

    async def _come_and_go(self, uin: UIN, stays: Sequence[Stay], start: float) -> None:
        loop = asyncio.get_running_loop()
        for stay in stays:
            await asyncio.sleep(max(start + stay.begin_s - loop.time(), 0))
            until = start + stay.end_s
            while loop.time() < until and not await self._visit(uin, until, empty=False):
                await asyncio.sleep(PAUSE_S)

    async def _come_once_more(self) -> None:
        """Let everybody for whom mail waits connect again, as long as that brings any."""
        while users := [uin for uin in self._plan.stays if self._waiting(uin)]:
            before = self.ledger.delivered
            await asyncio.gather(*(self._last_visit(uin) for uin in users))
            if self.ledger.delivered == before:
                return

    def _waiting(self, uin: UIN) -> int:
        """Number of mails that may still come to a user: neither refused nor acknowledged."""
        return self.ledger.owed(inbox_of(uin), uin)

    async def _last_visit(self, uin: UIN) -> None:
        loop = asyncio.get_running_loop()
        async with self._last_visits:
            if self._waiting(uin):
                await self._visit(uin, loop.time() + self._login_s + self._settle_s, empty=True)

    async def _visit(self, uin: UIN, until: float, *, empty: bool) -> bool:
        """Connect, and take mail until a time, or (`empty`) until nothing waits. True if the connection held."""
        inbox = self._client.inbox(uin=uin, device=DEVICE, on_gap=self._on_gap)
        try:
            async with self._slots:
                await inbox.ready(timeout_s=self._login_s)
        except FAILURES:
            self.failed_logins += 1
            await _closed(inbox)
            return False
        self.logins += 1
        self.online += 1
        self.most_online = max(self.most_online, self.online)
        try:
            await self._take(inbox, uin, until, empty=empty)
        except FAILURES:
            return False
        finally:
            self.online -= 1
            await _closed(inbox)
        return True

    async def _take(self, inbox: Inbox, uin: UIN, until: float, *, empty: bool) -> None:
        loop = asyncio.get_running_loop()
        while not (empty and not self._waiting(uin)):
            try:
                async with asyncio.timeout_at(until):
                    mail = await anext(inbox, None)
            except TimeoutError:
                return
            if mail is None:
                return
            self.ledger.deliver(inbox_of(uin), uin, mail.payload, self._now_us(), again=mail.redelivered)
            mail.acknowledge()
            if empty:
                until = max(until, loop.time() + self._settle_s)

    def _on_gap(self, gap: MailGap) -> None:
        self.gaps += 1


async def _closed(inbox: AbstractAsyncContextManager[object]) -> None:
    try:
        await inbox.__aexit__(None, None, None)
    except FAILURES:
        pass  # mail that was not acknowledged is delivered again
