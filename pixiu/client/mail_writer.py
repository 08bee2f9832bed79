"""What users call to send mail, and the shell of its core: one stream to a proxy at a time.

    receipt = await px.user(7).mail(b"hello")                       # returns when it is confirmed
    async with px.mail_writer() as writer:                         # pipelined
        for uin in users:
            await writer.room()
            writer.send(uin, b"hello", level="persisted")
        await writer.wait_finished()

Source: DESIGN section 9 ("Mail"); seed 002 (flush, waitSent, waitFinish).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self

from pixiu.client.awaited import Awaited
from pixiu.client.events import CloseStream, Failure, RefreshCluster, Writable
from pixiu.client.mail import (
    Effect,
    MailBatch,
    MailCounters,
    MailLevel,
    MailOutcome,
    MailResolved,
    MailSender,
    MailTicket,
    MailTriple,
    OpenMailStream,
)
from pixiu.errors import InvalidArgument, LeaseExpired, NotConnected, Overloaded, PixiuError, TooManyReceivers
from pixiu.ids import MAX_ID, MsgID, SnowflakeID
from pixiu.rpc.channels import STREAM_ERRORS, Channels, reason_of
from pixiu.rpc.deadline_timer import DeadlineTimer
from pixiu.wire.inbox_appends import MAX_RECEIVERS
from pixiu.wire.record import LANE_FIRST, LANE_NORMAL
from pixiu.wire.v1 import mail_pb2, mail_pb2_grpc

if TYPE_CHECKING:
    from pixiu.client.client import Draft
    from pixiu.client.worker import WorkerLease

Level = Literal["replicated", "persisted", "accepted"]
LEVELS: Final = {"replicated": MailLevel.REPLICATED, "persisted": MailLevel.PERSISTED, "accepted": MailLevel.ACCEPTED}
MAX_WAITING: Final = 10_000
"""Coroutines that may wait for room; more are refused as `Overloaded`."""
MAX_EXPIRE_MIN: Final = 65_535
LEAST_TICK_S: Final = 0.01
Check = Callable[[], bool]


class MailOptions(NamedTuple):
    """How a mail is to be sent."""

    level: str = "replicated"
    lane: int = LANE_NORMAL
    expire: timedelta | None = None
    to: Iterable[int] = ()


Drafted = Callable[[int], Callable[..., "Draft"]]
"""UIN → what checks a mail to that user."""


class MailReceipt(Awaited, MailTicket):
    """What sending a mail returns. `await receipt` waits until it is confirmed at its level, and raises why it failed.

    Source: DESIGN section 9: "a Future exists only for a message that is awaited".
    """

    __slots__ = ("_waiters",)

    def __init__(self, record: bytes, message_id: int, level: MailLevel, more: tuple[int, ...] = ()) -> None:
        super().__init__(record, message_id, level, more)
        self._waiters: list[asyncio.Future[None]] | None = None

    @property
    def id(self) -> SnowflakeID:
        """The sender's ID of the mail, the same for every time it is sent."""
        return SnowflakeID(self.message_id)

    @property
    def stored_as(self) -> MsgID:
        """The MsgID that Xiu gave it; 0 until it is known."""
        return MsgID(self.msg_id)

    @property
    def replicas(self) -> int:
        """How many replicas had it, of Xiu and of Pi, when it was confirmed."""
        return self.copies

    @property
    def error(self) -> PixiuError | None:
        """Why it failed; None when it is confirmed or not resolved yet."""
        return self.problem()


def minutes_of(expire: timedelta | None) -> int:
    """A lifetime in whole minutes, rounded up; 0 for none. Raises `InvalidArgument`."""
    if expire is None:
        return 0
    minutes = -int(-expire.total_seconds() // 60)
    if not 0 < minutes <= MAX_EXPIRE_MIN:
        raise InvalidArgument(f"expire is above 0 and at most {MAX_EXPIRE_MIN} minutes, not {expire}")
    return minutes


def receivers_of(uin: int, to: Iterable[int]) -> tuple[int, ...]:
    """The receivers beside the first one. Raises `InvalidArgument` and `TooManyReceivers`."""
    receivers = list(dict.fromkeys([uin, *to]))
    if len(receivers) > MAX_RECEIVERS:
        raise TooManyReceivers(f"{len(receivers)} receivers; one mail has at most {MAX_RECEIVERS}: send several")
    for each in receivers:
        if not 0 < each <= MAX_ID:
            raise InvalidArgument(f"a UIN is from 1 to 2^63-1, not {each}")
    return tuple(receivers[1:])


def level_of(level: str) -> MailLevel:
    """A level by its name. Raises `InvalidArgument`."""
    found = LEVELS.get(level)
    if found is None:
        raise InvalidArgument(f"a level is one of {', '.join(LEVELS)}, not {level!r}")
    return found


class MailShell:
    """Runs one `MailSender`. `on_refresh` is called when a proxy failed or goes."""

    def __init__(self, core: MailSender, client: str, channels: Channels, on_refresh: Callable[[], None]) -> None:
        self.core = core
        self._client = client
        self._channels = channels
        self._on_refresh = on_refresh
        self._loop = asyncio.get_running_loop()
        self._kick = asyncio.Event()
        self._stream = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[tuple[Check, asyncio.Future[None]]] = deque()
        self._alarm = DeadlineTimer(self._tick, least_s=LEAST_TICK_S)
        self._closed = False

    def offer(self, ticket: MailTicket) -> None:
        """Hand a mail to the core."""
        if self._closed:
            raise NotConnected("the client is closed; open it again with `async with pixiu.connect(…)`")
        effects = self.core.offer(ticket, self._loop.time())
        if effects:
            self._apply(effects)
        if not self._alarm.is_set:
            self._arm()

    async def wait(self, check: Check) -> None:
        """Until a condition of the core holds; `mail_timeout_s` bounds it, since nothing is unresolved for longer."""
        if check() or self._closed:
            return
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} callers wait already: await each before the next one")
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((check, future))
        await future

    def set_proxies(self, addresses: tuple[str, ...]) -> None:
        """The cluster's proxies changed."""
        if not self._closed:
            self._apply(self.core.set_proxies(addresses, self._loop.time()))

    async def close(self) -> None:
        """End the stream; what is unresolved fails, its outcome unknown."""
        text = "the client was closed before the mail was confirmed: its outcome is unknown"
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
                self._kick.set()
            elif isinstance(effect, MailResolved):
                for ticket in effect.tickets:
                    if isinstance(ticket, MailReceipt):
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
        self._stream, self._kick = effect.stream, asyncio.Event()
        self._task = self._loop.create_task(self._run(effect, self._kick), name=f"pixiu-mail-{effect.address}")
        self._tasks.add(self._task)
        self._task.add_done_callback(self._tasks.discard)

    def _arm(self) -> None:
        if not self._closed:
            self._alarm.set(self.core.next_deadline())

    def _tick(self) -> None:
        self._apply(self.core.tick(self._loop.time()))

    async def _run(self, effect: OpenMailStream, kick: asyncio.Event) -> None:
        """One stream from its opening to its end."""
        call: Any = mail_pb2_grpc.MailerStub(self._channels.acquire(effect.address)).Send()
        number = effect.stream
        reader = self._loop.create_task(self._read(call, number), name=f"pixiu-mail-replies-{effect.address}")
        writer = self._loop.create_task(self._write(call, effect, kick), name=f"pixiu-mail-batches-{effect.address}")
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if not reader.done():  # a write failed: the reader knows why
                await asyncio.wait({reader}, timeout=1.0)
            error = reader.exception() if reader.done() else writer.exception()
            if error is not None and not isinstance(error, STREAM_ERRORS):
                raise error
            self._apply(self.core.stream_died(number, self._loop.time(), f"{effect.address}: {reason_of(error)}"))
        finally:
            for task in (reader, writer):
                task.cancel()
            call.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
            await self._channels.release(effect.address)

    async def _write(self, call: Any, effect: OpenMailStream, kick: asyncio.Event) -> None:
        hello = mail_pb2.MailHello(client=self._client, worker=effect.worker, generation=effect.generation)
        await call.write(mail_pb2.MailRequest(hello=hello))
        while True:
            batch = self.core.next_batch(effect.stream, self._loop.time())
            if batch is not None:
                await call.write(_request_of(batch))
                self._let_go()
                continue
            kick.clear()
            await kick.wait()

    async def _read(self, call: Any, number: int) -> None:
        while isinstance(reply := await call.read(), mail_pb2.MailReply):
            for triple in reply.triples:
                place = ("pi" if triple.pi else "xiu", triple.partition)
                self.core.triples[place] = MailTriple(triple.layout_version, triple.epoch, triple.committed)
            outcomes = [
                MailOutcome(
                    result.position, result.count, result.copies, result.msg_ids,
                    Failure(result.code, result.text) if result.code else None, result.open,
                )
                for result in reply.results
            ]  # fmt: skip
            now = self._loop.time()
            self._apply(self.core.reply(number, now, outcomes, reply.taken, reply.window_bytes, reply.draining))
            if reply.HasField("end"):
                end = reply.end
                self._apply(self.core.ended(number, now, Failure(end.code, end.text, end.retry_after_ms)))


def _request_of(batch: MailBatch) -> mail_pb2.MailRequest:
    level = mail_pb2.MailLevel.ValueType(int(batch.level))
    more = [mail_pb2.MailReceivers(index=index, uins=uins) for index, uins in batch.more]
    return mail_pb2.MailRequest(batch=batch.data, count=batch.count, position=batch.position, level=level, more=more)


class MailPublisher:
    """All mail of one client: gives IDs, and owns the stream. `encode` makes a record of a draft and an ID."""

    def __init__(self, shell: MailShell, worker: WorkerLease, drafted: Drafted, encode: Callable[[Draft, int], bytes]) -> None:
        self.shell = shell
        self._worker = worker
        self._drafted = drafted
        self._encode = encode

    def send(
        self, uin: int, payload: bytes, mail: MailOptions, type_: int, extension: bytes, derived_id: int | None = None
    ) -> MailReceipt:
        """Queue a mail now. Raises `Overloaded`, and what is wrong with the arguments."""
        level, more = level_of(mail.level), receivers_of(uin, mail.to)
        if mail.lane not in (LANE_FIRST, LANE_NORMAL):
            raise InvalidArgument(f"a lane is {LANE_FIRST} (first) or {LANE_NORMAL}, not {mail.lane}")
        draft = self._drafted(uin)(
            payload,
            type=type_,
            lifetime_min=minutes_of(mail.expire),
            extension=extension,
            first_lane=mail.lane == LANE_FIRST,
            derived_id=derived_id,
        )
        self._check_room()
        try:
            message_id = self._worker.next() if derived_id is None else derived_id
        except LeaseExpired:
            raise Overloaded("no worker number for message IDs is held now: await room() first") from None
        receipt = MailReceipt(self._encode(draft, message_id), message_id, level, more)
        self.shell.offer(receipt)
        return receipt

    def resend(self, receipt: MailReceipt) -> None:
        """Queue one that failed again."""
        self._check_room()
        self.shell.offer(receipt)

    def _check_room(self) -> None:
        if not self.shell.core.has_room():
            raise Overloaded(f"{self.shell.core.unresolved} mails are not confirmed: await room() first")

    async def room(self) -> None:
        """Wait until one more may be sent. Raises `Unavailable` when no proxy lends a number for IDs."""
        await self.shell.wait(self.shell.core.has_room)
        if not self._worker.usable():
            await self._worker.ready()

    async def send_and_wait(self, uin: int, payload: bytes, mail: MailOptions, type_: int, extension: bytes) -> MailReceipt:
        """Queue a mail, waiting for room, and wait until it is confirmed."""
        while True:
            await self.room()
            try:
                receipt = self.send(uin, payload, mail, type_, extension)
                break
            except Overloaded:
                await asyncio.sleep(LEAST_TICK_S)  # others were faster
        await receipt
        return receipt

    async def flushed(self) -> None:
        """Until all that was sent before has left once."""
        core, number = self.shell.core, self.shell.core.counters.offered
        await self.shell.wait(lambda: core.flushed(number))

    async def sent(self) -> None:
        """Until proxies have it."""
        core, number = self.shell.core, self.shell.core.counters.offered
        await self.shell.wait(lambda: core.sent(number))

    async def finished(self) -> None:
        """Until it is resolved."""
        core, number = self.shell.core, self.shell.core.counters.offered
        await self.shell.wait(lambda: core.finished(number))


class MailWriter:
    """Sends mail without waiting for each: `async with px.mail_writer() as writer`. All writers of a client share one stream,
    so mail of one client to one inbox and lane lies there in the order of the calls of `send`.

    Source: DESIGN section 9 ("Mail"); seed 002.
    """

    def __init__(self, publisher: MailPublisher) -> None:
        self._publisher = publisher
        self._first_failure: MailReceipt | None = None
        self._unfinished: deque[MailReceipt] = deque()

    async def __aenter__(self) -> Self:
        await self.room()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            await self.wait_finished()

    def send(
        self,
        uin: int,
        payload: bytes,
        *,
        level: Level = "replicated",
        lane: int = 1,
        expire: timedelta | None = None,
        to: Iterable[int] = (),
        type: int = 0,
        extension: bytes = b"",
        derived_id: int | None = None,
    ) -> MailReceipt:
        """Queue a mail; arguments as `User.mail`. Never waits: it leaves with what else is queued.

        derived_id: an ID made from where the content comes from, instead of one of its own: for a day from when it was
        stored, whoever sends it again stores nothing; with another content it fails with `IdReused`.

        Raises `Overloaded` when too much is unconfirmed (`queue_records`, `queue_bytes`), or no number for IDs is held: `await
        room()` first. What else is raised is wrong with the arguments.
        """
        receipt = self._publisher.send(uin, payload, MailOptions(level, lane, expire, to), type, extension, derived_id)
        self._note(receipt)
        return receipt

    def resend(self, receipt: MailReceipt) -> MailReceipt:
        """Queue a mail that failed once more, with the same ID: inboxes that have it already do not get it twice."""
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

    async def room(self) -> None:
        """Wait until one more mail may be sent."""
        await self._publisher.room()

    async def flush(self) -> None:
        """Wait until all that was sent before has left for a proxy at least once."""
        await self._publisher.flushed()

    async def wait_sent(self) -> None:
        """Wait until a proxy has all that was sent before: from then on both it and this process hold what is not confirmed."""
        await self._publisher.sent()

    async def wait_finished(self) -> None:
        """Wait until all that was sent before is confirmed at its level. Raises the error of the first one that failed since
        the last call; the others' are in their receipts."""
        await self._publisher.finished()
        while self._unfinished and self._unfinished[0].resolved:
            self._keep_failure(self._unfinished.popleft())
        failed, self._first_failure = self._first_failure, None
        if failed is not None and (error := failed.error) is not None:
            raise error

    @property
    def triples(self) -> Mapping[tuple[str, int], MailTriple]:
        """(role, partition) → where it stood at its last answer."""
        return self._publisher.shell.core.triples

    @property
    def counters(self) -> MailCounters:
        """Totals of the client."""
        return self._publisher.shell.core.counters
