"""The gRPC side of a proxy's mail, and the shell of its pipeline.

Source: docs/architecture.md, "A mail is sent".
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Final

import grpc.aio

from cluster.access.login_guard import LoginGuard, LoginSession
from cluster.access.logins import enter
from cluster.core.contract import END_OF_TURN, TICK
from cluster.core.role import totals
from cluster.core.runner import Runner
from cluster.listeners.request_limits import MAX_BATCH_BYTES, MAX_BATCH_RECORDS, check_batch, slices
from cluster.metrics.histogram import OneAtATime
from cluster.process.context import Context
from cluster.rpc.served import ServedStream, ServedStreams
from cluster.trust.loans import Lent
from pixiu.discovery.view import View
from pixiu.errors import InvalidArgument, PixiuError, Refusal, Unavailable
from pixiu.ids import WORKERS
from pixiu.rpc.deadline_timer import DeadlineTimer
from pixiu.rpc.duplex import Served
from pixiu.rpc.grpc_streams import GrpcHandler
from pixiu.wire.inbox_operations import MAX_GENERATION, MAX_RECEIVERS
from pixiu.wire.levels import Level
from pixiu.wire.v1 import mail_pb2, mail_pb2_grpc
from proxy import mail_events as ev
from proxy.mail.pipeline import MailCore
from proxy.mail.store_links import StoreLink
from proxy.notices.notice_links import NoticeLinks
from proxy.options import Options
from proxy.publishers.message_ids import MessageIDs
from proxy.publishers.permits import Foreseeing, permitted

MAX_CLIENT_BYTES: Final = 128
MAX_PUBLISHERS: Final = 10_000
"""Streams of publishers at one time, and as many of writers of mail. Policy: more are refused with OVERLOADED."""
MAX_UNTOLD: Final = 16_384
"""Results that wait for a writer that does not read them, besides those of a window. Policy: its mail is not read until it does."""
FINISH_TIMEOUT_S: Final = 30.0
"""Time for which a writer that has ended its side is still answered, seconds."""
TAKEN_S: Final = 0.02
"""Time for which a writer's reply waits that only says what was taken, seconds: results mostly come before, and leave with it."""
CONFIRM: Final = "Time from taking a writer's batch of mail until its first record is confirmed; one batch at a time is timed."
POLL_S: Final = 0.02
"""Interval at which a draining proxy checks whether everything is answered, seconds."""

Call = grpc.aio.ServicerContext[mail_pb2.MailRequest, mail_pb2.MailReply]


class WriterStream:
    """One writer: the reply that waits, and the amount of its mail that is not confirmed.

    Args:
        handler: the stream's transport.
        window_bytes: limit of its unconfirmed mail.
        take: takes a request.
        over: called when the stream is over.
    """

    def __init__(
        self, handler: Served[mail_pb2.MailReply, mail_pb2.MailRequest], window_bytes: int,
        take: Callable[[WriterStream, mail_pb2.MailRequest], Awaitable[None]], over: Callable[[WriterStream], None],
    ) -> None:  # fmt: skip
        self.number = 0
        """0 until it is admitted."""
        self._window = window_bytes
        self._reply = mail_pb2.MailReply()
        self.opened = False
        self.access: LoginSession | None = None
        """Session of a writer that has logged in; None: nobody has to."""
        self.lent: Lent | None = None
        """Message IDs that it may use; None: any, because nobody has to log in."""
        self.unconfirmed = 0
        self.served = ServedStream(handler, lambda request: take(self, request), self, lambda: self._end(over), FINISH_TIMEOUT_S)
        self._taken_timer = DeadlineTimer(self.served.changed)

    def _end(self, over: Callable[[WriterStream], None]) -> None:
        self._taken_timer.cancel()
        over(self)

    def took(self, up_to: int, size: int) -> None:
        """Note that the pipeline has a batch up to this position; the writer learns it with the next results, or soon."""
        self._reply.taken = up_to
        self.unconfirmed += size
        self.served.took()
        self._taken_timer.set(asyncio.get_running_loop().time() + TAKEN_S)

    def answered(self, answer: ev.Answer) -> None:
        """Queue a batch's results for the next reply."""
        for result in answer.results:
            self._reply.results.add(
                position=result.position, count=result.count, copies=result.copies, msg_ids=result.msg_ids, code=result.code,
                text=result.text, open=result.open,
            )  # fmt: skip
        for store, triple in answer.triples.items():
            self._reply.triples.add(
                pi=store.pi, partition=store.partition, layout_version=triple.layout_version, epoch=triple.epoch,
                committed=triple.committed,
            )  # fmt: skip
        self.unconfirmed = answer.unconfirmed_bytes
        self.served.changed()

    def say(self, reply: mail_pb2.MailReply) -> None:
        """Merge other fields into the next reply."""
        self._reply.MergeFrom(reply)
        self.served.changed()

    def login_over(self, text: str) -> None:
        """End the stream: its login has expired, or an operator ended it. Mail in flight is confirmed to the next stream."""
        self.refuse(Refusal(Unavailable.code, text, 100))

    def refuse(self, why: Refusal) -> None:
        """End the stream with a reason, after what waits is written."""
        self.say(mail_pb2.MailReply(end=mail_pb2.MailEnd(code=why.code, text=why.text, retry_after_ms=why.retry_after_ms)))
        self.served.end(why.text or why.code)

    def unanswered(self) -> bool:
        """Return True while mail is unconfirmed."""
        return self.unconfirmed > 0

    def full(self) -> bool:
        """Return True while the window is full, or too many results wait."""
        return self.unconfirmed >= self._window or len(self._reply.results) >= MAX_UNTOLD

    def give(self) -> mail_pb2.MailReply | None:
        """Next reply: everything that has come while the one before was written."""
        if not self._reply.ByteSize():
            return None
        self._taken_timer.cancel()
        reply, self._reply = self._reply, mail_pb2.MailReply()
        return reply


class MailService(mail_pb2_grpc.MailerServicer):
    """Serves `pixiu.v1.Mailer`, and runs one `proxy.mail.pipeline.MailCore`.

    Args:
        context: of the process.
        ids: checks the message IDs of writers.
        guard: authenticates writers; None: nobody has to log in.
    """

    def __init__(self, context: Context[Options], ids: MessageIDs, guard: LoginGuard | None = None) -> None:
        self._context, self._ids, self._guard = context, ids, guard
        options = context.options
        self._window = options.publisher_window_bytes
        self.core = MailCore(
            max_record_bytes=context.cluster.max_record_bytes, timeout_s=options.mail_timeout_s, taken="mail" in options.kinds
        )
        self.runner: Runner[ev.Event, ev.Effect] = Runner(self.core, context.now, tick=TICK, end_of_turn=END_OF_TURN)
        self.notices = NoticeLinks(context.endpoint_id, lambda: context.view, context.now, context.crash, context.framed)
        self._confirming = OneAtATime(context.metrics.histogram("pixiu_mail_confirm_seconds", CONFIRM))
        self._enter_effects()
        self._streams: ServedStreams[WriterStream] = ServedStreams(MAX_PUBLISHERS, "this proxy has %d writers of mail")
        self.own_writer: Callable[[ev.Answer | ev.EndWriter], None] = lambda _effect: None
        """Takes what concerns streams that no client opened: those of the proxy's own writer."""
        self._link_numbers = itertools.count(1)
        self._links: dict[ev.Store, StoreLink] = {}

    # --- what the proxy's service calls

    def on_view(self, view: View) -> None:
        """Report the numbers of partitions to the core."""
        roles = view.layout.roles
        xius, pis = (view.layout.partitions(role) if role in roles else 0 for role in ("xiu", "pi"))
        next_xius, next_pis = (roles[role].next if role in roles else 0 for role in ("xiu", "pi"))
        self.runner.step(ev.StoresChanged(xius, pis, next_xius, next_pis))

    async def drain(self) -> None:
        """Ask writers to use another proxy, and wait until everything in flight is confirmed."""
        self._streams.draining = True
        for stream in self._streams.values():
            stream.say(mail_pb2.MailReply(draining=True))
        while self.core.under_way or self._streams:
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """End all streams and links."""
        self.runner.stop()
        for stream in self._streams.values():
            stream.served.end("this proxy stops")
        await asyncio.gather(*(link.close() for link in self._links.values()), self.notices.stop())

    def next_stream(self) -> int:
        """Number a stream of the proxy's own writer."""
        return next(self._streams.numbers)

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        return {
            **totals(self.core.counters, "mail_"),
            **self.notices.samples(),
            "mail_writers": len(self._streams),
            "mail_batches_under_way": self.core.under_way,
            "mail_waiting_bytes": self.core.waiting_bytes,
            "mail_cut_pause_seconds{role}": dict(self.core.pauses.longest),
        }

    # --- writers

    async def Send(  # type: ignore[override]  # the generated base has the synchronous signature as well
        self, request_iterator: AsyncIterator[mail_pb2.MailRequest], context: Call
    ) -> None:
        """Serve one writer's stream."""
        handler: GrpcHandler[mail_pb2.MailReply, mail_pb2.MailRequest] = GrpcHandler(context)
        stream = WriterStream(handler, self._window, self._request, self._over)
        try:
            stream.access = await enter(self._guard, context, "", stream.login_over)
            stream.lent = None if stream.access is None else self._ids.of(stream.access)
        except PixiuError as refused:
            await handler.refuse(refused)
        try:
            stream.number = self._streams.enter(stream)
        except PixiuError as refused:
            stream.refuse(Refusal.of(refused))
        try:
            await stream.served.run()
        except PixiuError as error:
            await handler.refuse(error)

    def _over(self, stream: WriterStream) -> None:
        if stream.access is not None:
            stream.access.close()
        if self._confirming.mark is not None and self._confirming.mark[0] == stream.number:
            self._confirming.drop()
        if self._streams.pop(stream.number, None) is not None:
            self.runner.step(ev.WriterClosed(stream.number))

    async def _request(self, stream: WriterStream, request: mail_pb2.MailRequest) -> None:
        try:
            if stream.lent is not None:
                self._ids.show(stream.lent, request.loans)
            if request.HasField("hello") and not stream.opened:
                self._hello(stream, request.hello)
                stream.opened = True
            if request.count:
                if not stream.opened:
                    raise InvalidArgument("a stream begins with `hello`")
                await self._batch(stream, request)
        except PixiuError as wrong:
            stream.refuse(Refusal.of(wrong))

    async def _batch(self, stream: WriterStream, request: mail_pb2.MailRequest) -> None:
        """Take a batch: checked, charged, and processed in slices, each in its turn."""
        count, access, turn = request.count, stream.access, self._context.turn
        if len(request.more) > count:
            raise InvalidArgument(f"a batch of {count} records has further receivers of {len(request.more)}")
        further_receivers = sum(len(each.uins) for each in request.more)
        check_batch(count, len(request.batch), further_receivers)
        if access is not None and access.spend(count + further_receivers, len(request.batch)):
            await access.hold()
        level, further = Level.from_wire(request.level) or Level.REPLICATED, _more(request)
        self._confirming.begin((stream.number, request.position), self._context.now())
        for first, part, records in slices(request.batch, count):
            more = further
            if further and part < count:
                more = {index - first: uins for index, uins in further.items() if first <= index < first + part}
            if access is not None and access.asks:
                await turn.run(partial(permitted, records, part, Foreseeing(access), None, more), len(records))
                await access.ask()
            batch = ev.MailReceived(stream.number, records, part, request.position + first, level, more)
            await turn.run(partial(self._take, stream, batch), len(request.batch))
            if (space := stream.served.space()) is not None:
                await space
            if stream.served.ended:
                return

    def _hello(self, stream: WriterStream, hello: mail_pb2.MailHello) -> None:
        if len(hello.client.encode()) > MAX_CLIENT_BYTES or hello.worker >= WORKERS or not 0 < hello.generation <= MAX_GENERATION:
            raise InvalidArgument(f"a client's name has at most {MAX_CLIENT_BYTES} bytes, a worker is below {WORKERS}")
        if stream.access is not None and stream.lent is not None:
            self._ids.check_writer(stream.access, stream.lent, hello.worker, hello.generation)
        stream.say(
            mail_pb2.MailReply(window_bytes=self._window, max_batch_bytes=MAX_BATCH_BYTES, max_batch_records=MAX_BATCH_RECORDS)
        )
        self.runner.step(ev.WriterOpened(stream.number, hello.worker, hello.generation))

    def _take(self, stream: WriterStream, batch: ev.MailReceived) -> None:
        if stream.served.ended:
            return
        if stream.access is not None and stream.lent is not None:
            data = self._ids.permitted(batch.data, batch.count, stream.access, stream.lent, batch.more)
            batch = replace(batch, data=data)
        stream.took(batch.position + batch.count - 1, len(batch.data))
        self.runner.step(batch)

    # --- the core

    def _enter_effects(self) -> None:
        effects = self.runner.effects
        effects.on(ev.Answer, self._answer)
        effects.on(ev.EndWriter, self._end_writer)
        effects.on(ev.InboxesGrew, self.notices.runner.step)
        effects.on(ev.Connect, self._connect)
        effects.on(ev.Hurry, lambda effect: self._links[effect.store].hurry())
        effects.on(ev.Disconnect, lambda effect: self._links[effect.store].leave(effect.link, again=effect.again))
        effects.on(ev.SendStore, lambda effect: self._links[ev.Store(False, effect.partition)].send(effect))
        effects.on(ev.SendAppend, lambda effect: self._links[ev.Store(True, effect.partition)].send(effect))

    def _answer(self, effect: ev.Answer) -> None:
        mark = self._confirming.mark
        if mark is not None and mark[0] == effect.stream:
            for result in effect.results:
                if result.position <= mark[1] < result.position + result.count:
                    self._confirming.end(self._context.now())
                    break
        stream = self._streams.get(effect.stream)
        if stream is not None:
            stream.answered(effect)
        else:
            self.own_writer(effect)

    def _end_writer(self, effect: ev.EndWriter) -> None:
        stream = self._streams.get(effect.stream)
        if stream is not None:
            stream.refuse(effect.why)
        else:
            self.own_writer(effect)

    def _connect(self, effect: ev.Connect) -> None:
        self._links[effect.store] = StoreLink(
            effect.store,
            lambda: self._context.view,
            self._context.framed,
            lambda: next(self._link_numbers),
            self.runner.step,
            self._context.crash,
        )


def _more(request: mail_pb2.MailRequest) -> dict[int, list[int]]:
    """Index of a mail → its further receivers; one too many is passed on, so that the pipeline refuses this mail alone."""
    return {each.index: list(each.uins[: MAX_RECEIVERS + 1]) for each in request.more}
