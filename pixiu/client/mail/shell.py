"""The shell of the mail core: one stream to a proxy at a time, the timer, and callers that wait for the core.

Source: docs/architecture.md, "A mail is sent".
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from pixiu.client.login import refused_login
from pixiu.client.mail.core import (
    Effect,
    MailBatch,
    MailOutcome,
    MailResolved,
    MailSender,
    MailTicket,
    OpenMailStream,
)
from pixiu.client.mail.receipt import MailReceipt
from pixiu.client.send.awaited import FailureReports
from pixiu.client.send.events import CloseStream, Failure, RefreshCluster, Writable
from pixiu.errors import NotConnected, Overloaded
from pixiu.rpc.channels import Channels
from pixiu.rpc.deadline_timer import DeadlineTimer
from pixiu.rpc.duplex import Duplex
from pixiu.rpc.grpc_streams import GrpcCall
from pixiu.wire.levels import Triple
from pixiu.wire.v1 import mail_pb2, mail_pb2_grpc

MAX_WAITING: Final = 10_000
"""Coroutines that may wait for space; more are refused as `Overloaded`."""
MIN_TICK_S: Final = 0.01
Check = Callable[[], bool]


class MailShell:
    """Runs one `MailSender`. `on_refresh` is called when a proxy failed or is leaving."""

    def __init__(
        self, core: MailSender, client: str, channels: Channels, on_refresh: Callable[[], None], reports: FailureReports
    ) -> None:
        self.core = core
        self._client = client
        self._channels = channels
        self._on_refresh = on_refresh
        self.reports = reports
        self._loop = asyncio.get_running_loop()
        self._duplex: Duplex[mail_pb2.MailRequest, mail_pb2.MailReply] | None = None
        self._stream = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[tuple[Check, asyncio.Future[None]]] = deque()
        self._alarm = DeadlineTimer(self._tick, least_s=MIN_TICK_S)
        self._closed = False

    def offer(self, ticket: MailTicket) -> None:
        """Hand a mail to the core."""
        if self._closed:
            raise NotConnected("the client is closed; open it again with `async with pixiu.connect(…)`")
        effects = self.core.offer(ticket, self._loop.time())
        if len(effects) == 1 and isinstance(effects[0], Writable):
            # The usual effect, for every mail: no waiter cares about more unresolved mail, and its deadline is after the existing
            # ones.
            if self._duplex is not None:
                self._duplex.wake()
        elif effects:
            self._apply(effects)
        if not self._alarm.is_set:
            self._arm()

    async def wait(self, check: Check) -> None:
        """Wait for a condition of the core; `mail_timeout_s` bounds the wait, since nothing stays unresolved for longer."""
        if check() or self._closed:
            return
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} callers wait already: await each before the next one")
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((check, future))
        await future

    def set_proxies(self, addresses: tuple[str, ...]) -> None:
        """Pass on a change of the cluster's proxies."""
        if not self._closed:
            self._apply(self.core.set_proxies(addresses, self._loop.time()))

    async def close(self) -> None:
        """End the stream; unresolved mail fails, its outcome unknown."""
        text = "the client was closed before the mail was confirmed"
        self._apply(self.core.abandon(text, self._loop.time()))
        self._closed = True
        self._alarm.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Writable):
                if self._duplex is not None:
                    self._duplex.wake()
            elif isinstance(effect, MailResolved):
                for ticket in effect.tickets:
                    if isinstance(ticket, MailReceipt):
                        if ticket.failure is not None:
                            self.reports.watch(ticket, ticket.failure)
                        ticket.wake()
            elif isinstance(effect, OpenMailStream):
                self._open(effect)
            elif isinstance(effect, CloseStream):
                if effect.stream == self._stream and self._task is not None and self._task is not asyncio.current_task():
                    self._task.cancel()
            elif isinstance(effect, RefreshCluster):
                self._on_refresh()
        self._let_go()
        self._arm()

    def _let_go(self) -> None:
        if self._waiting:
            still = deque[tuple[Check, asyncio.Future[None]]]()
            for check, future in self._waiting:
                if future.done():
                    continue
                if check() or self._closed:
                    future.set_result(None)
                else:
                    still.append((check, future))
            self._waiting = still

    def _open(self, effect: OpenMailStream) -> None:
        if self._closed:
            return
        self._stream, self._duplex = effect.stream, None
        self._task = self._loop.create_task(self._run(effect), name=f"pixiu-mail-{effect.address}")
        self._tasks.add(self._task)
        self._task.add_done_callback(self._tasks.discard)

    def _arm(self) -> None:
        if not self._closed:
            self._alarm.set(self.core.next_deadline())

    def _tick(self) -> None:
        self._apply(self.core.tick(self._loop.time()))

    async def _run(self, effect: OpenMailStream) -> None:
        """Run one stream from its opening to its end."""
        hello = mail_pb2.MailHello(client=self._client, worker=effect.worker, generation=effect.generation)
        loans = self._channels.loans
        first, shown = [mail_pb2.MailRequest(hello=hello, loans=loans.all())], loans.version

        answered = False

        def take(reply: mail_pb2.MailReply) -> None:
            nonlocal answered
            if not answered:
                answered = True
                duplex.wake()
            self._take(effect.stream, reply)

        def give() -> mail_pb2.MailRequest | None:
            nonlocal shown
            if first:
                return first.pop()
            if not answered:
                return None  # a proxy that refuses the stream has taken nothing, and its status has the reason
            self._let_go()  # the previous batch has been sent
            batch = self.core.next_batch(effect.stream, self._loop.time())
            if batch is None:
                return None
            request = _request_of(batch)
            if shown != loans.version:
                shown = loans.version
                request.loans.extend(loans.all())
            return request

        call: GrpcCall[mail_pb2.MailRequest, mail_pb2.MailReply] = GrpcCall.over(
            self._channels,
            effect.address,
            lambda channel: mail_pb2_grpc.MailerStub(channel).Send(metadata=self._channels.metadata()),
        )
        async with call:
            duplex = Duplex(call, take, give)
            if effect.stream == self._stream:
                self._duplex = duplex
            end = await duplex.run()
            login = refused_login(end.text) if end.refused else ""
            self._apply(self.core.stream_died(effect.stream, self._loop.time(), f"{effect.address}: {end.text}", login))

    def _take(self, number: int, reply: mail_pb2.MailReply) -> None:
        for triple in reply.triples:
            place = ("pi" if triple.pi else "xiu", triple.partition)
            self.core.triples[place] = Triple(triple.layout_version, triple.epoch, triple.committed)
        outcomes = [
            MailOutcome(
                result.position, result.count, result.copies, result.msg_ids,
                Failure(result.code, result.text) if result.code else None, result.open,
            )
            for result in reply.results
        ]  # fmt: skip
        now = self._loop.time()
        largest = reply.max_batch_bytes, reply.max_batch_records
        self._apply(self.core.reply(number, now, outcomes, reply.taken, reply.window_bytes, reply.draining, *largest))
        if reply.HasField("end"):
            end = reply.end
            self._apply(self.core.ended(number, now, Failure(end.code, end.text, end.retry_after_ms)))


def _request_of(batch: MailBatch) -> mail_pb2.MailRequest:
    more = [mail_pb2.MailReceivers(index=index, uins=uins) for index, uins in batch.more]
    return mail_pb2.MailRequest(batch=batch.data, count=batch.count, position=batch.position, level=batch.level.value, more=more)
