"""The gRPC side of a gateway: the `Subscriber` service, for SDKs and services in any language.

One stream is one connection of one user. Records go out unchanged, in one batch with everything that came during the last write.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence

import grpc
import grpc.aio

from cluster.access.login_guard import LoginGuard, LoginSession
from cluster.access.logins import address_of, brought
from cluster.access.rules import of_topic_name
from cluster.core.reading_gate import Hold
from cluster.core.turn import SMALL_READ_BYTES
from cluster.listeners.request_limits import MAX_NAMES
from cluster.mqtt.events import CloseReason
from cluster.mqtt.terms import SessionLimits
from gateway import events as ev
from gateway.clients.access import check_stream, foresee_stream, open_user
from gateway.clients.backlog import BATCH_S, BATCHED_FROM_S, Grade
from gateway.clients.clients import Clients, ClientSession, TicketSource
from gateway.mail.queue import OVERRUN, acknowledged_ranges
from gateway.mail.run import MailRun
from pixiu.errors import InvalidArgument, LimitError, LoginReplaced, NotAllowed, NotServed, Overloaded, PixiuError
from pixiu.ids import MAX_DEVICE, MAX_ID, MAX_ROOM, device_class_of_name, device_of_name, uin_of_name
from pixiu.placement.topics import ROOM_PREFIX, USER_PREFIX, TopicRefusal, parse_filter
from pixiu.rpc.duplex import Carrier, Duplex
from pixiu.rpc.grpc_streams import PUSHBACK, GrpcHandler
from pixiu.rpc.status import GRPC_STATUS
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc

MAX_CLIENT_BYTES = 128
MAX_CLASS_BYTES = 64
MAX_BATCH_BYTES = 1 << 20
"""A reply carries batches up to this size, and always at least one."""
MAX_FILTER_BYTES = SessionLimits().max_filter_bytes
"""The limit for MQTT clients."""
HELLO_TIMEOUT_S = 5.0
LATE_S = 0.5
"""A time-out this late means that the process got no CPU: input that came meanwhile is not read yet, and gets this time."""
REASON_LEFT, REASON_SEND_FAILED, REASON_MOVED, REASON_KICKED = 1, 3, 4, 5
"""`Reason` of control.proto."""
LAST_WORDS_S = 5.0
"""Time that a client has to read why its login is over, seconds; then the stream is cut."""
MAX_WAITING_REPLIES = 10_000
"""Answers that wait to be written; a client with more is not reading."""
MAX_UNREAD_REPLIES = 100
"""Answers that wait for a client that does not read them. Policy: no more is read from it until it does."""
FEW_NAMES = 32
"""A request with at most this number of names is processed at once, however long the turn has lasted. A larger one is processed in
pieces of this size, each of which waits for its turn: a join costs some 25 µs, and a request may have two thousand."""
PIECE_BYTES = SMALL_READ_BYTES + 1
"""Size of a piece for its turn: not small."""

NO_SPACE = (
    "a router or relay of the cluster has no space for what was asked (router.max_entries, relay.max_entries): nothing was joined"
)

Context = grpc.aio.ServicerContext[wire_pb2.SubscribeRequest, wire_pb2.SubscribeReply]

Channels = list[str]
"""Filters, as in `pixiu.placement.topics.parse_filter`."""

SubscriberCarrier = Carrier[wire_pb2.SubscribeReply, wire_pb2.SubscribeRequest]


class _Stream(ClientSession):
    """One Subscribe stream."""

    def __init__(self, clients: Clients, address: str) -> None:
        super().__init__(clients)
        self._address = address
        self.id = clients.arrived(self, address)
        self.hello: asyncio.Task[wire_pb2.SubscribeRequest | None] | None = None
        self.channels: set[str] = set()
        self._told_dropped = 0
        self.mail = False
        """True if it takes mail."""
        self._replies: deque[wire_pb2.SubscribeReply] = deque()
        self._mail_next = False
        self._leaving = False
        """True while a batch of the backlog is being written."""
        self._rest: asyncio.TimerHandle | None = None
        """Timer before which nothing of the backlog leaves."""
        self._rested = False
        self.work = asyncio.Event()
        """Set when `give` has something."""
        self.finish: Callable[[], None] = lambda: None
        """Ends the stream once everything is written."""
        self.cut: Callable[[str], None] = lambda _reason: None
        """Ends the stream now."""
        self.closing: str | None = None
        self.chat = False
        """True if it takes messages to its user."""
        self.reason = REASON_SEND_FAILED
        """`Reason` of control.proto for a logout by the gateway."""

    def evict(self) -> None:
        if self.hello is not None:
            self.hello.cancel()

    def shown(self) -> dict[str, object]:
        """Values for the page /sessions; see `ClientSession.shown`."""
        return {**super().shown(), "address": self._address}

    def deliver(self, data: bytes, count: int) -> None:
        self._wait(data, count)
        if self.access is not None and self.access.tenant is not None:
            self.access.tenant.spend_out(count, len(data), self._clients.now())
        if self._backlog.behind_s(self._clients.slow_consumers.now()) >= BATCHED_FROM_S:
            self._clients.slow_consumers.add(self)
        self.work.set()

    def deliver_mail(self, runs: Sequence[MailRun], anew: bool) -> None:
        if not self._mail.put([(run.data, run.count) for run in runs], anew=anew):
            self.close(OVERRUN)
        self.work.set()

    def answer(self, answer: ev.Answer) -> None:
        self.channels.difference_update(answer.refused)
        self.mail = self.mail and not answer.user_refused
        whole = self.steps.answered(answer)
        if whole is None:
            return
        if whole.refused or whole.user_refused:
            self.reply(wire_pb2.SubscribeReply(request=whole.request, error_code=LimitError.code, error_text=NO_SPACE))
        else:
            self.reply(wire_pb2.SubscribeReply(request=whole.request))

    def reply(self, reply: wire_pb2.SubscribeReply) -> None:
        """Queue a reply that carries no messages."""
        if len(self._replies) >= MAX_WAITING_REPLIES:
            self.close("the client does not read its answers")
            return
        self._replies.append(reply)
        if len(self._replies) >= MAX_UNREAD_REPLIES:
            self.gate.hold(Hold.ANSWERS, self._clients.now())
        self.work.set()

    def reads_on(self) -> bool:
        """True while there is space for more answers."""
        return not self.gate.holds(Hold.ANSWERS)

    async def rest(self, reason: Hold, seconds: float) -> None:
        """Wait before more is read."""
        self.gate.hold(reason, self._clients.now())
        await asyncio.sleep(seconds)
        self.gate.release(reason, self._clients.now())

    def announce(self) -> bool:
        self.reply(wire_pb2.SubscribeReply(draining=True))
        return True

    def end(self, reason: CloseReason, text: str) -> None:
        self.close(text)
        if reason is CloseReason.SLOW_CONSUMER:
            self.cut(text)

    def close(self, reason: str) -> None:
        """End the stream once everything is written."""
        self.closing = self.closing or reason
        self.work.set()

    def login_over(self, reason: str) -> None:
        """End the stream: the login has expired, or lost a right that it uses."""
        self.close(reason)
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self.cut, reason)

    def rules_changed(self) -> None:
        """End the stream if the client lost a right that it uses."""
        try:
            check_stream(self.access, self.uin, self.channels, chat=self.chat, mail=self.mail)
        except NotAllowed as error:
            self.login_over(str(error))

    def filters(self) -> list[str]:
        """Names of its subscriptions."""
        return [*self.channels, *([f"{USER_PREFIX}{self.uin}"] if self.chat or self.mail else [])]

    def revoked(self, filters: Sequence[str], why: str) -> None:
        """Leave filters, and notify the client."""
        found = [name for name in filters if not name.startswith(USER_PREFIX)]
        user = len(found) < len(filters)
        self.channels.difference_update(found)
        self._clients.step(ev.Leave(self.id, found, user, user and self.mail))
        self.chat, self.mail = self.chat and not user, self.mail and not user
        rooms = {name: room for name in found if isinstance(room := of_topic_name(name), int)}
        topics = [name for name in filters if name not in rooms]
        self.reply(wire_pb2.SubscribeReply(revoked_rooms=rooms.values(), revoked_topics=topics, error_text=why))

    def replaced(self, moved: bool) -> None:
        """Notify the client, and end the stream."""
        who = "the same device connected elsewhere" if moved else "another device of the user connected (login_policy)"
        text = f"a newer login took the place of this one: {who}"
        self.reply(wire_pb2.SubscribeReply(error_code=LoginReplaced.code, error_text=text))
        self.reason = REASON_MOVED if moved else REASON_KICKED
        self.close(text)
        # At once: nothing counts as delivered any more to a client that stops reading here.
        self._clients.closed(self, self.reason)

    def give(self) -> wire_pb2.SubscribeReply | None:
        """Next reply: first those without messages, then mail and batches in turn, each with everything that waits."""
        if self._leaving:
            self._leaving = False
            self._clients.slow_consumers.waited(self._backlog.behind_s(self._clients.slow_consumers.now()))
            self._backlog.left()
            if not self._backlog:
                self._clients.slow_consumers.discard(self)
        if self._replies:
            if len(self._replies) <= MAX_UNREAD_REPLIES:
                self.gate.release(Hold.ANSWERS, self._clients.now())
            return self._replies.popleft()
        self._mail_next = not self._mail_next
        if self._mail and (self._mail_next or not self._backlog):
            mail, count = self._mail.take(MAX_BATCH_BYTES)
            return wire_pb2.SubscribeReply(mail=mail, mail_count=count)
        if self._backlog:
            return self._batch()
        if self.closing is not None:
            self.finish()
        return None

    def _end_rest(self) -> None:
        self._rest, self._rested = None, True
        self.work.set()

    def _batch(self) -> wire_pb2.SubscribeReply | None:
        """Take a batch from the backlog; a client that lags gets larger batches, and fewer."""
        if not self._rested and self._backlog.grade(self._clients.slow_consumers.now()) is not Grade.PROMPT:
            if self._rest is None:
                self._rest = asyncio.get_running_loop().call_later(BATCH_S, self._end_rest)
            return None
        self._rested = False
        chunks, count = self._backlog.take(MAX_BATCH_BYTES)
        dropped = self._backlog.dropped - self._told_dropped
        self._told_dropped += dropped
        self._leaving = True
        batch = b"".join(chunks) if len(chunks) > 1 else chunks[0]
        return wire_pb2.SubscribeReply(batch=batch, count=count, dropped=dropped)


class SubscriberService(wire_pb2_grpc.SubscriberServicer):
    """The gRPC service `pixiu.v1.Subscriber`."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    async def Subscribe(  # type: ignore[override]  # the generated base has the synchronous signature as well
        self,
        request_iterator: AsyncIterator[wire_pb2.SubscribeRequest],
        context: Context,
    ) -> None:
        """Serve one connection of one user."""
        handler: GrpcHandler[wire_pb2.SubscribeReply, wire_pb2.SubscribeRequest] = GrpcHandler(context)
        stream = _Stream(self._clients, address_of(str(context.peer())))

        def over() -> None:
            self._clients.slow_consumers.discard(stream)
            stream.joins.has_now(0)
            self._clients.closed(stream, stream.reason if stream.closing else REASON_LEFT)
            if stream.access is not None:
                stream.access.close()

        try:
            first = await self._first(stream, handler)
            hello, guard = first.hello, self._clients.guard
            uin = _uin(first, anonymous=guard is None)
            self._clients.admit(stream)
            if guard is not None:
                stream.gate.hold(Hold.LOGIN, self._clients.now())
                stream.access = await _log_in(guard, self._clients.tickets, context, stream, first)
                stream.gate.release(Hold.LOGIN, self._clients.now())
                uin = stream.access.identity.uin
            stream.uin = uin
            # A stream that neither names a device nor takes messages is no login.
            login = bool(hello.device or hello.chat or hello.mail)
            device = hello.device or device_of_name(hello.client)
            duplex = Duplex(
                handler, lambda request: self._take(stream, request), stream.give, reads_on=stream.reads_on, work=stream.work,
                over=over,
            )  # fmt: skip
            stream.finish, stream.cut = duplex.finish, duplex.end
            self._clients.opened(stream, uin, device, device_class_of_name(hello.device_class), login, name=hello.client)
            stream.reply(wire_pb2.SubscribeReply(uin=uin, max_names=MAX_NAMES))
            pause = self._take(stream, first)
            if pause is not None:
                await pause
            await duplex.run()
        except Overloaded as error:
            # gRPC's own field for the retry-after.
            context.set_trailing_metadata(((PUSHBACK, str(error.retry_after_ms)),))
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except PixiuError as error:
            await context.abort(_status(error), str(error))
        finally:
            over()
        if stream.closing is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, stream.closing)

    async def _first(self, stream: _Stream, carrier: SubscriberCarrier) -> wire_pb2.SubscribeRequest:
        stream.hello = hello = asyncio.create_task(carrier.read())
        loop = asyncio.get_running_loop()
        end = loop.time() + HELLO_TIMEOUT_S
        try:
            await asyncio.wait({hello}, timeout=HELLO_TIMEOUT_S)
            if not hello.done() and loop.time() > end + LATE_S:
                await asyncio.wait({hello}, timeout=LATE_S)
        finally:
            given_up = hello.cancelled()
            hello.cancel()
        if given_up:
            raise Overloaded("too many streams of this gateway have not sent their hello yet", retry_after_ms=1_000)
        if hello.done() and isinstance(garbage := hello.exception(), PixiuError):
            raise garbage
        if not hello.done():  # it may be starved, and comes again
            text = f"the first request of a Subscribe stream must come within {HELLO_TIMEOUT_S:.0f} s"
            raise Overloaded(text, retry_after_ms=1_000)
        first = None if hello.exception() is not None else hello.result()
        if first is None:
            raise InvalidArgument("the first request of a Subscribe stream must carry `hello`")
        return first

    def _take(self, stream: _Stream, request: wire_pb2.SubscribeRequest) -> Awaitable[object] | None:
        """Take a request. Returns what to wait for before the next one is read, if the turn has no time, a callback is asked, or
        the client joins and leaves faster than it may."""
        names, turn = _names(request), self._clients.turn
        if names > MAX_NAMES:
            error = InvalidArgument(f"a request has at most {MAX_NAMES} rooms, topics and acknowledgements; send several")
            stream.reply(wire_pb2.SubscribeReply(request=request.request, error_code=error.code, error_text=str(error)))
            return None
        began = turn.now()
        try:
            return self._take_now_or_ask(stream, request)
        finally:
            turn.spend(began)

    def _take_now_or_ask(self, stream: _Stream, request: wire_pb2.SubscribeRequest) -> Awaitable[object] | None:
        access = stream.access
        if access is None or not access.asks:
            return self._take_now(stream, request)
        foreseeing = self._foresee(stream, access, request)
        if _names(request) > FEW_NAMES:
            return self._ask_first(stream, access, request, foreseeing)
        for _ in foreseeing:
            pass
        return self._ask_first(stream, access, request) if access.must_ask else self._take_now(stream, request)

    def _foresee(self, stream: _Stream, access: LoginSession, request: wire_pb2.SubscribeRequest) -> Iterator[None]:
        """Note what callbacks must be asked, one piece between two yields."""
        with contextlib.suppress(PixiuError):  # its faults are reported when it is carried out
            for joins in _pieces(request.join_rooms, request.join_topics, self._clients):
                foresee_stream(access, stream.uin, joins, chat=False, mail=False)
                yield
        foresee_stream(access, stream.uin, (), chat=request.hello.chat, mail=request.hello.mail)

    async def _ask_first(
        self, stream: _Stream, access: LoginSession, request: wire_pb2.SubscribeRequest, foreseeing: Iterator[None] | None = None
    ) -> None:
        if foreseeing is not None:
            await self._in_pieces(stream, foreseeing)
        if access.must_ask:
            stream.gate.hold(Hold.ACCESS_CHECK, self._clients.now())
            await access.ask()
            stream.gate.release(Hold.ACCESS_CHECK, self._clients.now())
        pause = self._take_now(stream, request)
        if pause is not None:
            await pause

    async def _in_pieces(self, stream: _Stream, work: Iterator[None]) -> None:
        """Run work, each of its pieces in its turn."""
        stream.gate.hold(Hold.TURN, self._clients.now())
        while not await self._clients.turn.run(lambda: _is_over(work), PIECE_BYTES):
            pass
        stream.gate.release(Hold.TURN, self._clients.now())

    def _take_now(self, stream: _Stream, request: wire_pb2.SubscribeRequest) -> Awaitable[object] | None:
        joins = len(request.join_rooms) + len(request.join_topics)
        wait_s = stream.joins.wait_s(joins, self._clients.now())
        if wait_s is None:
            text = "too many clients join rooms and topics at once (gateway.joins_per_s)"
            hold_s = stream.joins.refusal_hold_s(random.random())
            error = Overloaded(f"{text}; try again in {hold_s:.0f} s", int(hold_s * 1000))
            refusal = wire_pb2.SubscribeReply(request=request.request, error_code=error.code, error_text=str(error))
            refusal.retry_after_ms = error.retry_after_ms
            stream.reply(refusal)
            return stream.rest(Hold.JOINS, hold_s)
        return self._in_turn(stream, request, wait_s) if wait_s else self._then_hold(stream, request)

    async def _in_turn(self, stream: _Stream, request: wire_pb2.SubscribeRequest, wait_s: float) -> None:
        await stream.rest(Hold.JOIN_QUEUE, wait_s)
        pause = self._then_hold(stream, request)
        if pause is not None:
            await pause

    def _then_hold(self, stream: _Stream, request: wire_pb2.SubscribeRequest) -> Awaitable[object] | None:
        work = self._carry_out(stream, request)
        if _names(request) > FEW_NAMES:
            return self._in_pieces_then_hold(stream, request, work)
        for _ in work:
            pass
        return self._hold(stream, request)

    async def _in_pieces_then_hold(self, stream: _Stream, request: wire_pb2.SubscribeRequest, work: Iterator[None]) -> None:
        await self._in_pieces(stream, work)
        pause = self._hold(stream, request)
        if pause is not None:
            await pause

    def _hold(self, stream: _Stream, request: wire_pb2.SubscribeRequest) -> Awaitable[object] | None:
        stream.joins.has_now(len(stream.channels))
        now = self._clients.now()
        hold_s = stream.joins.hold_s(len(request.join_rooms) + len(request.join_topics), now, joined=True)
        leaves = len(request.leave_rooms) + len(request.leave_topics)
        if leaves:
            hold_s = max(hold_s, stream.joins.hold_s(leaves, now))
        return stream.rest(Hold.JOINS, hold_s) if hold_s else None

    def _carry_out(self, stream: _Stream, request: wire_pb2.SubscribeRequest) -> Iterator[None]:
        """Check a whole request, then carry it out; one piece between two yields."""
        chat, mail = request.hello.chat, request.hello.mail
        leaves: list[Channels] = []
        joins: list[Channels] = []
        try:
            ranges = acknowledged_ranges(request.mail_acknowledgements)
            self._check_served(stream, request, acknowledges=bool(ranges))
            for piece in _pieces(request.leave_rooms, request.leave_topics, self._clients):
                leaves.append(piece)
                yield
            for piece in _pieces(request.join_rooms, request.join_topics, self._clients):
                joins.append(piece)
                yield
            yield from self._check_allowed(stream, joins, chat=chat, mail=mail)
            self._check_space(stream, leaves, joins)
        except PixiuError as error:
            stream.reply(wire_pb2.SubscribeReply(request=request.request, error_code=error.code, error_text=str(error)))
            return
        # Recorded in the same piece as the checks, so that rules that change meanwhile apply to these channels.
        stream.channels.difference_update(*leaves)
        stream.channels.update(*joins)
        stream.mail, stream.chat = stream.mail or mail, stream.chat or chat
        if ranges:
            self._clients.step(ev.MailAcknowledged(stream.id, ranges))
        for piece in leaves:
            self._clients.step(ev.Leave(stream.id, piece))
            yield
        if not joins and not chat and not mail:
            if request.request:
                stream.answer(ev.Answer(stream.id, request.request, True))
            return
        numbers = stream.steps.begin(request.request, max(len(joins), 1))
        for number, piece in zip(numbers, joins or [[]], strict=True):
            self._clients.step(ev.Join(stream.id, number, [ev.Wanted(name) for name in piece], chat, mail))
            chat = mail = False
            yield

    def _check_served(self, stream: _Stream, request: wire_pb2.SubscribeRequest, *, acknowledges: bool) -> None:
        if request.hello.mail and not self._clients.serves_mail:
            raise NotServed("this cluster keeps no mail: `pixiu up --relays 2 --xius 1 --pis 1` does")
        if acknowledges and not stream.mail:
            raise InvalidArgument("this stream takes no mail, so there is none to acknowledge: ask for it in the hello")
        if request.hello.chat and not self._clients.serves_users:
            raise InvalidArgument("this cluster has no relays, so no messages to users: `pixiu up --relays 2` has them")

    def _check_allowed(self, stream: _Stream, joins: list[Channels], *, chat: bool, mail: bool) -> Iterator[None]:
        """Check by the rules of one moment: if they change between two pieces, check everything again."""
        access = stream.access
        check_stream(access, stream.uin, (), chat=chat, mail=mail)
        while access is not None:
            rules = access.permissions
            for piece in joins:
                check_stream(access, stream.uin, piece, chat=False, mail=False)
                yield
            if access.permissions is rules:
                return

    def _check_space(self, stream: _Stream, leaves: list[Channels], joins: list[Channels]) -> None:
        if not joins:
            return
        limit, wanted = self._clients.options.max_subscriptions, stream.channels.difference(*leaves).union(*joins)
        if len(wanted) > limit:
            raise InvalidArgument(f"a connection may have {limit} subscriptions; open another connection for more")
        if sum(len(topic) for topic in wanted if not topic.startswith(ROOM_PREFIX)) > MAX_FILTER_BYTES:
            text = f"the names of a connection's topics have at most {MAX_FILTER_BYTES} bytes together"
            raise InvalidArgument(f"{text}; open another connection for more")


async def _log_in(
    guard: LoginGuard, tickets: TicketSource | None, context: Context, stream: _Stream, first: wire_pb2.SubscribeRequest
) -> LoginSession:
    client = first.hello.client
    credentials = brought(guard, context, client)
    identity = await guard.check(credentials)
    with guard.refusing(credentials.address, client):
        identity.check_uin(first.hello.uin)
    if tickets is not None:
        identity = await tickets.admit(credentials, identity)
    access = open_user(guard, identity, credentials.address, client, stream.login_over)
    access.rules_changed = stream.rules_changed
    access.filters, access.revoked = stream.filters, stream.revoked
    await access.charge_call()
    return access


def _uin(request: wire_pb2.SubscribeRequest, *, anonymous: bool) -> int:
    """UIN of a stream, as its hello claims; `anonymous`: nothing else proves it."""
    if not request.HasField("hello"):
        raise InvalidArgument("the first request of a Subscribe stream must carry `hello`")
    hello = request.hello
    if len(hello.client.encode()) > MAX_CLIENT_BYTES:
        raise InvalidArgument(f"a client's name has at most {MAX_CLIENT_BYTES} bytes")
    if hello.uin > MAX_ID:
        raise InvalidArgument("a UIN is below 2^63")
    if hello.device > MAX_DEVICE:
        raise InvalidArgument(f"a DeviceID is at most {MAX_DEVICE}")
    if len(hello.device_class.encode()) > MAX_CLASS_BYTES:
        raise InvalidArgument(f"a device class has at most {MAX_CLASS_BYTES} bytes")
    return hello.uin or (uin_of_name(hello.client) if anonymous else 0)


def _is_over(work: Iterator[None]) -> bool:
    """Run one piece of the work. Returns True if none was left."""
    for _ in work:
        return False
    return True


def _pieces(rooms: Sequence[int], topics: Sequence[str], clients: Clients) -> Iterator[Channels]:
    """Split names into channels, a few at a time. Raises `InvalidArgument`."""
    for first in range(0, len(rooms) + len(topics), FEW_NAMES):
        after, begin = first + FEW_NAMES, max(first - len(rooms), 0)
        yield _channels(rooms[first:after], topics[begin : max(after - len(rooms), 0)], clients)


def _channels(rooms: Iterable[int], topics: Iterable[str], clients: Clients) -> Channels:
    found: Channels = []
    for room in rooms:
        if not 0 < room <= MAX_ROOM:
            raise InvalidArgument(f"a RoomID is from 1 to 2^62-1, not {room}")
        found.append(_outside_vrooms(room, clients))
    for topic in topics:
        parsed = parse_filter(topic)
        if isinstance(parsed, TopicRefusal):
            raise InvalidArgument(f"no room carries the topic {topic[:80]!r}: {parsed.value}")
        if parsed.name.startswith(USER_PREFIX):
            raise InvalidArgument(f"no room carries the topic {topic[:80]!r}: {TopicRefusal.USER.value}")
        if parsed.name.startswith(ROOM_PREFIX):
            _outside_vrooms(int(parsed.name.removeprefix(ROOM_PREFIX)), clients)
        found.append(topic)
    return found


def _outside_vrooms(room: int, clients: Clients) -> str:
    """Name of a room. Raises `InvalidArgument` for a VRoom."""
    if clients.vrooms.is_vroom(room):
        big = clients.vrooms.shown(room)
        raise InvalidArgument(f"{room} is the number of a VRoom, which cannot be joined; join the big room {big}")
    return f"{ROOM_PREFIX}{room}"


def _names(request: wire_pb2.SubscribeRequest) -> int:
    rooms, topics = len(request.join_rooms) + len(request.leave_rooms), len(request.join_topics) + len(request.leave_topics)
    return rooms + topics + len(request.mail_acknowledgements)


def _status(error: PixiuError) -> grpc.StatusCode:
    return GRPC_STATUS[error.code]
