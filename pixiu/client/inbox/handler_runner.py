"""Calling an application's handler with the mail of one lane: retries, and the dead-letter inbox after the last one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from inspect import isawaitable
from typing import Final, Protocol

from pixiu.client.inbox.core import MailIntakeCounters
from pixiu.client.inbox.dead_letters import dead_letter_uin, encode
from pixiu.client.inbox.mail import Mail
from pixiu.client.mail.publisher import MailPublisher
from pixiu.client.mail.receipt import MailReceipt
from pixiu.client.messages.load_test import handling
from pixiu.client.options import ClientOptions
from pixiu.errors import InvalidArgument, LocalError, NotConnected, PixiuError, RecordTooLarge
from pixiu.ids import UIN
from pixiu.rpc.backoff import Backoff

MAX_RETRIES: Final = 1_000
log = logging.getLogger("pixiu.client")


@dataclass(frozen=True, slots=True)
class Retries:
    """Policy for mail that a handler failed with: number of retries and waits between them."""

    retries: int
    backoff_s: float
    max_backoff_s: float

    def validate(self) -> None:
        """Check the bounds. Raises `InvalidArgument`."""
        if not 0 <= self.retries <= MAX_RETRIES:
            raise InvalidArgument(f"retries is from 0 to {MAX_RETRIES}, not {self.retries}")
        if not 0 < self.backoff_s <= self.max_backoff_s:
            raise InvalidArgument(f"backoff_s ({self.backoff_s:g}) is above 0 and at most max_backoff_s ({self.max_backoff_s:g})")


class Source(Protocol):
    """The inbox whose mail is handled."""

    uin: UIN

    @property
    def device(self) -> str:
        """The name of the device that handles the mail."""

    @property
    def counters(self) -> MailIntakeCounters:
        """The inbox's counters."""

    async def next(self, lanes: range) -> Mail | None:
        """The next mail of some lanes; None once the inbox is closed."""

    def give_back(self, mail: Mail) -> None:
        """Return a mail that was not handled."""


class LaneHandler:
    """Handles the mail of one lane, one after the other. Dead letters are sent through `mails`."""

    def __init__(
        self,
        inbox: Source,
        lane: int,
        handler: Callable[[Mail], Awaitable[None] | None],
        plan: Retries,
        options: ClientOptions,
        uniform: Callable[[], float],
        mails: Callable[[], MailPublisher],
    ) -> None:
        self.lane = lane
        self._inbox = inbox
        self._handler = handler
        self._plan = plan
        self._options = options
        self._backoff = Backoff(plan.backoff_s, plan.max_backoff_s, uniform)
        self._mails = mails

    async def run(self) -> None:
        """Handle mail until the inbox is closed. Raises the error that ended it."""
        while (mail := await self._inbox.next(range(self.lane, self.lane + 1))) is not None:
            try:
                await self._handle(mail)
            except NotConnected:
                return  # closed meanwhile: the mail is delivered again
            finally:
                if not mail.acknowledged:
                    self._inbox.give_back(mail)

    async def _handle(self, mail: Mail) -> None:
        failures = 0
        while True:
            try:
                with handling(marked=mail.load_test):
                    result = self._handler(mail)
                    if isawaitable(result):
                        await result
            except Exception as error:
                failures += 1
                if mail.acknowledged:
                    log.warning("mail_handler_failed_late lane=%d seq=%d error=%s", mail.lane, mail.seq, _name(error))
                    return
                if failures > self._plan.retries:
                    await self._bury(mail, failures, error)
                    return
                self._inbox.counters.retries += 1
                await asyncio.sleep(self._backoff.after_s(failures))
            else:
                mail.acknowledge()
                return

    async def _bury(self, mail: Mail, attempts: int, error: Exception) -> None:
        """Send the dead letter, again until it succeeds; then acknowledge the mail."""
        log.warning(
            "mail_given_up uin=%d device=%s lane=%d seq=%d attempts=%d error=%s",
            self._inbox.uin, self._inbox.device, mail.lane, mail.seq, attempts, _name(error),
        )  # fmt: skip
        failed_at_ms, reason = time.time_ns() // 1_000_000, f"{_name(error)}: {error}"
        limit, failures = self._options.max_record_bytes, 0
        receipt: MailReceipt | None = None
        while True:
            try:
                publisher = self._mails()
                await publisher.space()
                if receipt is None:
                    held = mail.held
                    whose, device = self._inbox.uin, self._inbox.device
                    body = encode(
                        whose, held.msg_id, held.seq, held.lane, attempts, failed_at_ms, reason, held.record, device, limit=limit
                    )
                    receipt = publisher.send(dead_letter_uin(self._inbox.uin), body)
                else:
                    publisher.resend(receipt)  # with the same ID, so the inbox has it once
                await receipt
            except NotConnected:
                raise
            except PixiuError as why:
                failure = receipt.failure if receipt is not None else None
                too_large = isinstance(why, RecordTooLarge) or (failure is not None and failure.cause == RecordTooLarge.code)
                if too_large:
                    limit = 0  # the cluster allows less than the client's option: send it without the record
                if too_large or isinstance(why, LocalError) or (receipt is not None and not receipt.resolved):
                    receipt = None  # use another ID
                failures += 1
                self._inbox.counters.dead_letter_failures += 1
                log.warning("dead_letter_not_sent lane=%d seq=%d error=%s", mail.lane, mail.seq, why)
                await asyncio.sleep(self._backoff.after_s(failures))
            else:
                self._inbox.counters.dead_letters += 1
                mail.acknowledge()
                return


def _name(error: Exception) -> str:
    return type(error).__name__
