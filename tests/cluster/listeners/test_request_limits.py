"""The largest request that a client may send, on many streams at once, takes a part of a turn; a larger one is refused unseen; and
who never reads its answers is not read from."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection, reflection_pb2  # type: ignore[import-untyped]

from cluster.core.turn import TURN_S, Turn
from cluster.listeners.request_limits import (
    MAX_BATCH_BYTES,
    MAX_BATCH_RECORDS,
    MAX_NAMES,
    SLICE,
    ParseInTurn,
    message_bytes_of_client,
)
from cluster.listeners.server import MAX_STREAMS_OF_CLIENT, Server
from cluster.rpc.served import ServedStream
from cluster.settings.options import ClusterOptions
from gateway import events as gateway_ev
from gateway.grpc.subscriber import FEW_NAMES, MAX_UNREAD_REPLIES, SubscriberService
from gateway.options import Options as GatewayOptions
from pixiu.errors import InvalidArgument
from pixiu.rpc.duplex import Duplex
from pixiu.wire.record import Kind, encode
from pixiu.wire.v1 import mail_pb2, mail_pb2_grpc, wire_pb2, wire_pb2_grpc
from proxy import events as ev
from proxy import mail_events as mail_ev
from proxy.mail.service import MailService
from proxy.options import Options
from proxy.publishers.message_ids import MessageIDs
from proxy.publishers.sender_tickets import SenderTickets
from proxy.publishers.worker_leases import Lender
from proxy.records.publisher import MAX_UNREAD, PublisherService, PublisherStream
from tests.gateway.world import World
from tests.support.caller import Caller
from tests.support.waiting import until

STREAMS = MAX_STREAMS_OF_CLIENT
RECORD_S = 4e-6
"""What the clock of a test says that a record takes, or a name."""
PARSING_S = 1e-3
"""And the parsing of a message that is not small."""
MOST_A_TURN = TURN_S + SLICE * RECORD_S + PARSING_S
NAMES_A_TURN = 2 * TURN_S + FEW_NAMES * RECORD_S + PARSING_S
"""What is left of one turn's time may be used by who comes before those that wait."""


class Clock:
    """The time that work takes, by what is worked off; and the most of one turn of the loop."""

    def __init__(self) -> None:
        self.now = self.worst_s = self._began = 0.0
        self.turn = Turn(lambda: self.now, asyncio.get_running_loop().call_soon)
        self.items = 0
        self._call: asyncio.Handle | None = None

    def work(self, items: int) -> None:
        self.items += items
        self.spend(items * RECORD_S)

    def spend(self, seconds: float) -> None:
        if self._call is None:
            self._began = self.now
            self._call = asyncio.get_running_loop().call_soon(self._ended)
        self.now += seconds

    def _ended(self) -> None:
        self._call = None
        self.worst_s = max(self.worst_s, self.now - self._began)


class Host:
    """A proxy, as publishers see it."""

    def __init__(self, clock: Clock) -> None:
        self.options, self.turn = Options(), clock.turn
        self.lender = Lender(self._acquire, lambda _worker: 1 << 60, 10)
        self.ids = MessageIDs(ClusterOptions())
        self.senders: SenderTickets | None = None
        self.streams: dict[int, PublisherStream] = {}
        self._clock = clock

    async def _acquire(self) -> tuple[int, int, int]:
        return 1, 0, 1 << 60

    def publish(self, batch: ev.BatchPublished) -> None:
        self._clock.work(batch.count)
        last = batch.position + batch.count - 1
        self.streams[batch.stream].resolved(ev.Reply(batch.stream, last, []))

    def admit(self, publisher: PublisherStream) -> int:
        number = len(self.streams) + 1
        self.streams[number] = publisher
        return number

    def members(self) -> wire_pb2.ClusterReply:
        return wire_pb2.ClusterReply()

    async def enter(self, _context: Any, _end: Callable[[str], None]) -> None:
        return None

    def begins(self, *_: int) -> None: ...
    def left(self, _stream: int) -> None: ...


class _Parsing(ParseInTurn):
    """Parsing takes time by the clock of the test."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock.turn)
        self._clock = clock

    def _unparsed(self, parse: Callable[[bytes], Any], data: bytes) -> Any:
        def parsing(given: bytes) -> Any:
            self._clock.spend(PARSING_S if len(given) > 1024 else 0)
            return parse(given)

        return super()._unparsed(parsing, data)

    async def _parsed(self, parse: Callable[[bytes], Any], data: bytes, context: Any) -> Any:
        def parsing(given: bytes) -> Any:
            self._clock.spend(PARSING_S if len(given) > 1024 else 0)
            return parse(given)

        return await super()._parsed(parsing, data, context)


@asynccontextmanager
async def serving(
    clock: Clock, add: Callable[[grpc.aio.Server], None] = lambda _server: None, *, reflected: bool = False
) -> AsyncIterator[grpc.aio.Channel]:
    """A clients' server with one service, and a channel to it."""
    server = Server(ClusterOptions(), reflection=reflected, interceptors=[_Parsing(clock)], of_clients=True)
    add(server.grpc)
    port = server.listen("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.max_send_message_length", -1)]) as channel:
            yield channel
    finally:
        await server.grpc.stop(0)


async def open_streams(method: Callable[[], Any], hello: Any) -> list[Any]:
    """Streams that were greeted."""
    calls = [method() for _ in range(STREAMS)]
    for call in calls:
        await call.write(hello)
    await asyncio.gather(*(call.read() for call in calls))
    return calls


def records(kind: Kind, count: int) -> bytes:
    return b"".join(encode(kind, 1 + number, b"", number + 1) for number in range(count))


async def test_the_largest_batches_of_many_publishers_are_worked_off_over_many_turns() -> None:
    clock = Clock()
    host = Host(clock)
    publishers: Any = PublisherService(host)
    batch = records(Kind.ROOM, MAX_BATCH_RECORDS)
    largest = wire_pb2.PublishRequest(batch=batch, count=MAX_BATCH_RECORDS, position=1)
    async with serving(clock, lambda server: wire_pb2_grpc.add_PublisherServicer_to_server(publishers, server)) as channel:
        calls = await open_streams(
            wire_pb2_grpc.PublisherStub(channel).Publish, wire_pb2.PublishRequest(hello=wire_pb2.PublishHello(client="x"))
        )
        await asyncio.gather(*(call.write(largest) for call in calls))
        await until(lambda: clock.items == STREAMS * MAX_BATCH_RECORDS)
        assert clock.worst_s <= MOST_A_TURN + 1e-9
        for call in calls:
            call.cancel()


async def test_the_largest_batches_of_many_writers_are_worked_off_over_many_turns() -> None:
    clock = Clock()
    context: Any = SimpleNamespace(
        options=Options(), cluster=ClusterOptions(), turn=clock.turn, now=lambda: clock.now, endpoint_id=1, view=None,
        crash=lambda _error: None, framed=None, metrics=SimpleNamespace(histogram=lambda *_: SimpleNamespace(add=lambda _: None)),
    )  # fmt: skip
    service = MailService(context, MessageIDs(ClusterOptions()))

    def note(event: mail_ev.Event) -> None:
        if isinstance(event, mail_ev.MailReceived):
            clock.work(event.count)

    service.runner.step = note  # type: ignore[method-assign, assignment]
    batch = records(Kind.MAIL, MAX_BATCH_RECORDS)
    largest = mail_pb2.MailRequest(batch=batch, count=MAX_BATCH_RECORDS, position=1)
    writer: Any = service
    async with serving(clock, lambda server: mail_pb2_grpc.add_MailerServicer_to_server(writer, server)) as channel:
        hello = mail_pb2.MailRequest(hello=mail_pb2.MailHello(client="x", worker=1, generation=1))
        calls = await open_streams(mail_pb2_grpc.MailerStub(channel).Send, hello)
        await asyncio.gather(*(call.write(largest) for call in calls))
        await until(lambda: clock.items == STREAMS * MAX_BATCH_RECORDS)
        assert clock.worst_s <= MOST_A_TURN + 1e-9
        for call in calls:
            call.cancel()
    await service.stop()


async def test_the_largest_requests_of_many_subscribers_are_worked_off_over_many_turns() -> None:
    """A look at a name is work, and so is what it costs the gateway to join or leave it."""
    clock = Clock()
    world = World(GatewayOptions(joins_per_s=0, client_joins_per_s=0))
    world.clients.turn = clock.turn
    world.clients.vrooms = Counted(clock)  # type: ignore[assignment]

    def step(event: object) -> None:
        if isinstance(event, gateway_ev.Join | gateway_ev.Leave):
            clock.work(len(event.channels if isinstance(event, gateway_ev.Join) else event.filters))

    world.clients.step = step
    subscribers: Any = SubscriberService(world.clients)
    half = MAX_NAMES // 2
    largest = wire_pb2.SubscribeRequest(join_rooms=range(1, 1 + half), leave_rooms=range(1 + half, 1 + MAX_NAMES), request=5)
    async with serving(clock, lambda server: wire_pb2_grpc.add_SubscriberServicer_to_server(subscribers, server)) as channel:
        hello = wire_pb2.SubscribeRequest(hello=wire_pb2.SubscribeHello(client="x"))
        calls = await open_streams(wire_pb2_grpc.SubscriberStub(channel).Subscribe, hello)
        await asyncio.gather(*(call.write(largest) for call in calls))
        await until(lambda: clock.items == 2 * STREAMS * MAX_NAMES)
        assert clock.worst_s <= NAMES_A_TURN + 1e-9
        unseen = wire_pb2.SubscribeRequest(leave_topics=["ab"] * (MAX_NAMES + 1), request=6)
        await calls[0].write(unseen)
        assert (await calls[0].read()).error_code == InvalidArgument.code
        assert clock.items == 2 * STREAMS * MAX_NAMES, "its names are not even looked at"
        for call in calls:
            call.cancel()


class Counted:
    """Numbers of VRooms, of which there are none; counts what is looked up."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def is_vroom(self, _room: int) -> bool:
        self._clock.work(1)
        return False


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_a_publisher_says_of_its_batch_it_is_bounded_first(seed: int) -> None:
    """Counts and sizes at random around the bounds: those above end the stream before a record is looked at."""
    chance, clock = random.Random(seed), Clock()
    publishers: Any = PublisherService(Host(clock))
    async with serving(clock, lambda server: wire_pb2_grpc.add_PublisherServicer_to_server(publishers, server)) as channel:
        for _ in range(5):
            count, data = chance.choice(
                (
                    (MAX_BATCH_RECORDS + 1, encode(Kind.ROOM, 1, b"", 1) * (MAX_BATCH_RECORDS + 1)),
                    (2, encode(Kind.ROOM, 1, bytes(MAX_BATCH_BYTES // 2), 1) * 2),
                    (1, bytes(1 << 21)),
                    (1 << 31, b""),
                )
            )
            call = wire_pb2_grpc.PublisherStub(channel).Publish()
            await call.write(wire_pb2.PublishRequest(hello=wire_pb2.PublishHello(client="x")))
            await call.read()
            await call.write(wire_pb2.PublishRequest(batch=data, count=count, position=1))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                while True:
                    assert await call.read() is not grpc.aio.EOF
            assert refused.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert clock.items == 0
    assert message_bytes_of_client(1 << 20) < 1 << 21


class Asked(wire_pb2_grpc.PresenceServicer):
    """Takes queries, each of as much work as it has names."""

    def __init__(self) -> None:
        self.uins = 0

    async def Query(self, request: wire_pb2.PresenceRequest, context: Any) -> wire_pb2.PresenceReply:
        self.uins += len(request.uins)
        return wire_pb2.PresenceReply()


async def test_single_requests_are_parsed_in_their_turn_too() -> None:
    clock, asked = Clock(), Asked()
    largest = wire_pb2.PresenceRequest(uins=range(1000))
    async with serving(clock, lambda server: wire_pb2_grpc.add_PresenceServicer_to_server(asked, server)) as channel:
        query = wire_pb2_grpc.PresenceStub(channel).Query
        await asyncio.gather(*(query(largest) for _ in range(STREAMS)))
    assert asked.uins == STREAMS * 1000
    assert clock.now == pytest.approx(STREAMS * PARSING_S)
    assert clock.worst_s <= 2 * TURN_S + PARSING_S + 1e-9


async def test_a_single_request_that_cannot_be_parsed_is_the_callers_fault() -> None:
    clock, asked = Clock(), Asked()
    async with serving(clock, lambda server: wire_pb2_grpc.add_PresenceServicer_to_server(asked, server)) as channel:
        raw: Any = channel
        for path in ("/pixiu.v1.Presence/Query", "/grpc.health.v1.Health/Watch"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await raw.unary_stream(path)(b"\xff" * 2000).read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await raw.unary_unary("/grpc.health.v1.Health/Check")(b"")) == b"\x08\x02"
    assert not asked.uins


async def test_a_request_for_reflection_that_cannot_be_parsed_is_the_callers_fault() -> None:
    async with serving(Clock(), reflected=True) as channel:
        raw: Any = channel
        call = raw.stream_stream(f"/{reflection.SERVICE_NAME}/ServerReflectionInfo")()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services="x").SerializeToString())
        assert reflection.SERVICE_NAME.encode() in await call.read()
        await call.write(b"\xff" * 2000)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def at_once(*_: object) -> None: ...


async def stops_reading(stream: Duplex[Any, Any] | ServedStream[Any, Any], carrier: Caller, most: int) -> None:
    running = asyncio.create_task(stream.run())
    reads = -1
    while reads != carrier.sent:
        reads = carrier.sent
        for _ in range(100):
            await asyncio.sleep(0)
        assert reads <= most
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_publisher_that_never_reads_is_not_read_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pixiu.rpc.duplex.CLOSE_WAIT_S", 0.01)

    async def refuse(publisher: PublisherStream, request: Any) -> None:
        publisher.took(request, 1)
        publisher.resolved(ev.Reply(1, request, [ev.Failure(request, request, "X", f"{request % 2}")]))
        if (space := publisher.served.space()) is not None:
            await space

    carrier = Caller(itertools.count(1))
    await stops_reading(PublisherStream(carrier, 1 << 20, refuse, lambda _: None).served, carrier, 3000)
    assert carrier.sent <= MAX_UNREAD + 10


async def test_equal_failures_side_by_side_and_further_words_take_no_space() -> None:
    publisher = PublisherStream(Caller(itertools.count(1)), 1 << 20, at_once, lambda _: None)
    for position in range(1, 5001):
        publisher.took(position, 1)
        publisher.resolved(ev.Reply(1, position, [ev.Failure(position, position, "X", "why")]))
        publisher.say(wire_pb2.PublishReply(worker=3, worker_until_ms=position))
    assert not publisher.full()
    replies = [publisher.give(), publisher.give(), publisher.give()]
    assert replies[0] == wire_pb2.PublishReply(worker=3, worker_until_ms=5000)
    assert replies[1] is not None
    assert [(failure.first, failure.last) for failure in replies[1].failures] == [(1, 5000)]
    assert replies[2] is None


async def test_a_subscriber_that_never_reads_is_not_read_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pixiu.rpc.duplex.CLOSE_WAIT_S", 0.01)
    world = World()
    service = SubscriberService(world.clients)
    from gateway.grpc.subscriber import _Stream

    stream = _Stream(world.clients, "")
    carrier = Caller(wire_pb2.SubscribeRequest(request=number) for number in itertools.count(1))
    duplex = Duplex(
        carrier, lambda request: service._take(stream, request), stream.give, reads_on=stream.reads_on, work=stream.work
    )
    await stops_reading(duplex, carrier, 20_000)
    assert carrier.sent <= MAX_UNREAD_REPLIES + 10
    assert stream.closing is None


async def test_a_method_that_takes_bytes_gets_them_as_they_came() -> None:
    async def echo(data: bytes, _context: Any) -> bytes:
        return data

    handlers: dict[str, Any] = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    generic = grpc.method_handlers_generic_handler("test.Bytes", handlers)
    async with serving(Clock(), lambda server: server.add_generic_rpc_handlers((generic,))) as channel:
        call: Any = channel.unary_unary("/test.Bytes/Echo")
        assert await call(b"\xff not protobuf", timeout=30) == b"\xff not protobuf"
