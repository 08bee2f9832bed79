"""All mail of one client: it is checked, gets an ID, and is handed to the stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Unpack

from pixiu.client.drafts import MAIL_KIND, Draft, draft, encode, no_such_option
from pixiu.client.mail_options import MailSendOptions, level_of, minutes_of, receivers_of
from pixiu.client.mail_receipt import MailReceipt
from pixiu.client.mail_shell import MIN_TICK_S, MailShell
from pixiu.client.worker import WorkerLease
from pixiu.errors import InvalidArgument, LeaseExpired, Overloaded
from pixiu.wire.levels import Level
from pixiu.wire.record import LANE_FIRST, LANE_NORMAL


class MailPublisher:
    """All mail of one client: assigns IDs, and owns the stream.

    Args:
        shell: runs the stream.
        worker: makes the IDs.
        sender: the client's UIN, 0 for a service.
        limit: largest record, bytes.
    """

    def __init__(self, shell: MailShell, worker: WorkerLease, sender: int, limit: int) -> None:
        self.shell = shell
        self._worker, self._sender, self._limit = worker, sender, limit

    def send(self, uin: int, payload: bytes, **options: Unpack[MailSendOptions]) -> MailReceipt:
        """Queue a mail now; arguments as in `MailSendOptions`. Raises `Overloaded`, and errors of the arguments."""
        checked, wanted, more = self.check(uin, payload, **options)
        self._check_room()
        try:
            message_id = self._worker.next() if checked.derived_id is None else checked.derived_id
        except LeaseExpired:
            raise Overloaded("no worker number for message IDs is held now: await room() first") from None
        receipt = MailReceipt(encode(checked, message_id, self._sender, self._limit), message_id, wanted, more)
        self.shell.offer(receipt)
        return receipt

    async def send_later(self, checked: Draft, receipt: MailReceipt) -> None:
        """Queue a checked mail once there is space; its receipt has been given out already."""
        while True:
            await self.room()
            try:
                message_id = self._worker.next() if checked.derived_id is None else checked.derived_id
                break
            except LeaseExpired:
                continue
        receipt.begin(encode(checked, message_id, self._sender, self._limit), message_id)
        self.shell.offer(receipt)

    def check(
        self,
        uin: int,
        payload: bytes,
        *,
        level: str = "replicated",
        lane: int = LANE_NORMAL,
        expire: timedelta | None = None,
        to: Iterable[int] = (),
        type: int = 0,
        extension: bytes = b"",
        headers: Mapping[str, str] | None = None,
        derived_id: int | None = None,
        **unknown: object,
    ) -> tuple[Draft, Level, tuple[int, ...]]:
        """Check a mail; returns its draft, level and further receivers. Arguments as in `MailSendOptions`. Raises errors of the
        arguments."""
        if unknown:
            raise no_such_option(unknown, MailSendOptions.__annotations__)
        wanted, more = level_of(level), receivers_of(uin, to)
        if lane not in (LANE_FIRST, LANE_NORMAL):
            raise InvalidArgument(f"a lane is {LANE_FIRST} (first) or {LANE_NORMAL}, not {lane}")
        checked = draft(
            MAIL_KIND, uin, payload, self._limit,
            type=type, lifetime_min=minutes_of(expire), extension=extension, headers=headers,
            first_lane=lane == LANE_FIRST, derived_id=derived_id,
        )  # fmt: skip
        return checked, wanted, more

    def resend(self, receipt: MailReceipt) -> None:
        """Queue a failed mail again."""
        self._check_room()
        self.shell.offer(receipt)

    def _check_room(self) -> None:
        if not self.shell.core.has_room():
            raise Overloaded(f"{self.shell.core.unresolved} mails are not confirmed: await room() first")

    async def room(self) -> None:
        """Wait until one more mail may be sent. Raises `NotSent` when no proxy lends a number for IDs."""
        await self.shell.wait(self.shell.core.has_room)
        if not self._worker.usable():
            await self._worker.ready()

    async def send_in_turn(self, uin: int, payload: bytes, **options: Unpack[MailSendOptions]) -> MailReceipt:
        """Queue a mail, waiting for space."""
        while True:
            await self.room()
            try:
                return self.send(uin, payload, **options)
            except Overloaded:
                await asyncio.sleep(MIN_TICK_S)  # others were faster

    async def flushed(self) -> None:
        """Wait until all mail offered so far has been sent once."""
        core, number = self.shell.core, self.shell.core.counters.offered
        await self.shell.wait(lambda: core.flushed(number))

    async def sent(self) -> None:
        """Wait until a proxy has taken all mail offered so far."""
        core, number = self.shell.core, self.shell.core.counters.offered
        await self.shell.wait(lambda: core.sent(number))

    async def finished(self) -> None:
        """Wait until all mail offered so far is resolved."""
        core, number = self.shell.core, self.shell.core.counters.offered
        await self.shell.wait(lambda: core.finished(number))
