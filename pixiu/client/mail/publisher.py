"""All mail of one client: it is checked, gets an ID, and is handed to a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Unpack

from pixiu.client.mail.options import MailSendOptions, level_of, minutes_of, receivers_of
from pixiu.client.mail.receipt import MailReceipt
from pixiu.client.mail.shell import MailShell
from pixiu.client.messages.drafts import MAIL_KIND, Draft, draft, encode, no_such_option
from pixiu.client.send.events import SendCounters
from pixiu.client.send.sender import Sender
from pixiu.client.worker import WorkerLease
from pixiu.errors import InvalidArgument, LeaseExpired, Overloaded
from pixiu.wire.levels import Triple
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
        checked, receipt = self.check(uin, payload, **options)
        shell, worker = self._of(uin)
        _check_space(shell, checked.size)
        try:
            self._offer(shell, worker, checked, receipt)
        except LeaseExpired:
            raise Overloaded("no worker number for message IDs is held now: await space() first") from None
        return receipt

    async def send_in_turn(self, checked: Draft, receipt: MailReceipt) -> None:
        """Queue a checked mail once there is space for it and a worker number for its ID."""
        shell, worker = self._of(checked.key)
        while True:
            await shell.admit(checked.size)
            try:
                return self._offer(shell, worker, checked, receipt)
            except LeaseExpired:
                await worker.ready()

    def _offer(self, shell: MailShell, worker: WorkerLease, checked: Draft, receipt: MailReceipt) -> None:
        own = worker.next()  # for a derived ID as well: the stream shows whose number it is
        message_id = own if checked.derived_id is None else checked.derived_id
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
        load_test: bool | None = None,
        **unknown: object,
    ) -> tuple[Draft, MailReceipt]:
        """Check a mail; returns its draft and receipt. Arguments as in `MailSendOptions`. Raises errors of the
        arguments."""
        if unknown:
            raise no_such_option(unknown, MailSendOptions.__annotations__)
        wanted, more = level_of(level), receivers_of(uin, to)
        if lane not in (LANE_FIRST, LANE_NORMAL):
            raise InvalidArgument(f"a lane is {LANE_FIRST} (first) or {LANE_NORMAL}, not {lane}")
        checked = draft(
            MAIL_KIND, uin, payload, self._limit,
            type=type, lifetime_min=minutes_of(expire), extension=extension, headers=headers,
            first_lane=lane == LANE_FIRST, derived_id=derived_id, load_test=load_test,
        )  # fmt: skip
        return checked, MailReceipt(b"", 0, wanted, more)

    def resend(self, receipt: MailReceipt) -> None:
        """Queue a failed mail again."""
        shell, _ = self._of(decode(receipt.record).key)
        _check_space(shell, receipt.size)
        shell.offer(receipt)

    async def space(self) -> None:
        """Wait until one more mail may be sent, to whomever. Raises `NotSent` when no proxy lends a number for IDs."""
        for shell, worker in self._streams:
            await shell.wait(partial(shell.core.has_space, self._limit))
            if not worker.usable():
                await worker.ready()

    async def flushed(self) -> None:
        """Wait until all mail offered so far has been sent once."""
        await self._reach(Sender.flushed)

    async def sent(self) -> None:
        """Wait until a proxy has taken all mail offered so far."""
        await self._reach(Sender.sent)

    async def finished(self) -> None:
        """Wait until all mail offered so far is resolved."""
        for shell, _ in self._streams:
            await shell.flush()

    async def _reach(self, reached: Callable[[Sender, int], bool]) -> None:
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
            for place, triple in shell.triples.items():
                found[place] = max(found.get(place, triple), triple)
        return found

    def counters(self) -> SendCounters:
        """Totals of all streams."""
        total = SendCounters()
        for shell, _ in self._streams:
            total.add(shell.core.counters)
        return total

    async def close(self, grace_s: float) -> None:
        """End the streams, and give their worker numbers back; unresolved mail fails, its outcome unknown."""
        await asyncio.gather(*(shell.close(grace_s) for shell, _ in self._streams))
        await asyncio.gather(*(worker.close(grace_s) for _, worker in self._streams[1:]))


def _check_space(shell: MailShell, size: int) -> None:
    if not shell.try_admit(size):
        raise Overloaded(f"{shell.core.unresolved} mails are not confirmed: await space() first")
