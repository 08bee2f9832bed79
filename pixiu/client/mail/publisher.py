"""All mail of one client: it is checked, gets an ID, and is handed to a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Unpack

from pixiu.client.mail.core import MailCounters, MailSender
from pixiu.client.mail.options import MailSendOptions, level_of, minutes_of, receivers_of
from pixiu.client.mail.receipt import MailReceipt
from pixiu.client.mail.shell import MIN_TICK_S, MailShell
from pixiu.client.messages.drafts import MAIL_KIND, Draft, draft, encode, no_such_option
from pixiu.client.worker import WorkerLease
from pixiu.errors import InvalidArgument, LeaseExpired, Overloaded
from pixiu.wire.levels import Level, Triple
from pixiu.wire.record import LANE_FIRST, LANE_NORMAL, decode


class MailPublisher:
    """All mail of one client: assigns IDs, and owns the streams. UIN modulo their number chooses one.

    Args:
        streams: each with what makes its IDs; only the first may share its worker number with other messages.
        sender: the client's UIN, 0 for a service.
        limit: largest record, bytes.
    """

    def __init__(self, streams: Sequence[tuple[MailShell, WorkerLease]], sender: int, limit: int) -> None:
        self._streams = streams
        self._sender, self._limit = sender, limit

    def usable(self, uin: int) -> bool:
        """True if an ID for a mail to this user can be made now."""
        return self._of(uin)[1].usable()

    def _of(self, uin: int) -> tuple[MailShell, WorkerLease]:
        return self._streams[uin % len(self._streams)]

    def send(self, uin: int, payload: bytes, **options: Unpack[MailSendOptions]) -> MailReceipt:
        """Queue a mail now; arguments as in `MailSendOptions`. Raises `Overloaded`, and errors of the arguments."""
        checked, wanted, more = self.check(uin, payload, **options)
        shell, worker = self._of(uin)
        _check_space(shell)
        try:
            message_id = worker.next() if checked.derived_id is None else checked.derived_id
        except LeaseExpired:
            raise Overloaded("no worker number for message IDs is held now: await space() first") from None
        receipt = MailReceipt(encode(checked, message_id, self._sender, self._limit), message_id, wanted, more)
        shell.offer(receipt)
        return receipt

    async def send_later(self, checked: Draft, receipt: MailReceipt) -> None:
        """Queue a checked mail once there is space; its receipt has been given out already."""
        shell, worker = self._of(checked.key)
        while True:
            await self._space(shell, worker)
            try:
                message_id = worker.next() if checked.derived_id is None else checked.derived_id
                break
            except LeaseExpired:
                continue
        receipt.begin(encode(checked, message_id, self._sender, self._limit), message_id)
        shell.offer(receipt)

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
        shell, _ = self._of(decode(receipt.record).key)
        _check_space(shell)
        shell.offer(receipt)

    async def space(self) -> None:
        """Wait until one more mail may be sent, to whomever. Raises `NotSent` when no proxy lends a number for IDs."""
        for shell, worker in self._streams:
            await self._space(shell, worker)

    async def _space(self, shell: MailShell, worker: WorkerLease) -> None:
        await shell.wait(shell.core.has_space)
        if not worker.usable():
            await worker.ready()

    async def send_in_turn(self, uin: int, payload: bytes, **options: Unpack[MailSendOptions]) -> MailReceipt:
        """Queue a mail, waiting for space."""
        while True:
            await self._space(*self._of(uin))
            try:
                return self.send(uin, payload, **options)
            except Overloaded:
                await asyncio.sleep(MIN_TICK_S)  # others were faster

    async def flushed(self) -> None:
        """Wait until all mail offered so far has been sent once."""
        await self._reach(MailSender.flushed)

    async def sent(self) -> None:
        """Wait until a proxy has taken all mail offered so far."""
        await self._reach(MailSender.sent)

    async def finished(self) -> None:
        """Wait until all mail offered so far is resolved."""
        await self._reach(MailSender.finished)

    async def _reach(self, reached: Callable[[MailSender, int], bool]) -> None:
        for shell, check in [(shell, partial(reached, shell.core, shell.core.counters.offered)) for shell, _ in self._streams]:
            await shell.wait(check)

    def set_proxies(self, addresses: tuple[str, ...]) -> None:
        """Pass on a change of the cluster's proxies."""
        for shell, _ in self._streams:
            shell.set_proxies(addresses)

    def triples(self) -> Mapping[tuple[str, int], Triple]:
        """(role, partition) → its state at its last answer, of any stream."""
        found: dict[tuple[str, int], Triple] = {}
        for shell, _ in self._streams:
            for place, triple in shell.core.triples.items():
                found[place] = max(found.get(place, triple), triple)
        return found

    def counters(self) -> MailCounters:
        """Totals of all streams."""
        total = MailCounters()
        for shell, _ in self._streams:
            total.add(shell.core.counters)
        return total

    async def close(self, grace_s: float) -> None:
        """End the streams, and give their worker numbers back; unresolved mail fails, its outcome unknown."""
        for shell, _ in self._streams:
            await shell.close()
        await asyncio.gather(*(worker.close(grace_s) for _, worker in self._streams[1:]))


def _check_space(shell: MailShell) -> None:
    if not shell.core.has_space():
        raise Overloaded(f"{shell.core.unresolved} mails are not confirmed: await space() first")
