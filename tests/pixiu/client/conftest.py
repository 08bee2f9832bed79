"""A small cluster in the test's own process: real gRPC servers that speak the protocol and can be told to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest

from pixiu.errors import Overloaded
from pixiu.ids import uin_of_name
from pixiu.rpc.grpc_streams import GrpcHandler
from pixiu.wire.record import Record, decode, split
from pixiu.wire.v1 import mail_pb2_grpc, wire_pb2, wire_pb2_grpc
from tests.pixiu.client.fake_inboxes import FakeInboxes
from tests.pixiu.client.fake_mailer import FakeMailer
from tests.support.waiting import until
from tests.support.zookeeper import root, zookeeper, zookeeper_server

__all__ = ["root", "zookeeper", "zookeeper_server"]
T = TypeVar("T")
LIMIT_S = 20.0
"""How long a test waits for a condition; reached only when it fails."""


class FakeProxy(wire_pb2_grpc.PublisherServicer):
    """Takes batches, checks their positions and answers."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.server: grpc.aio.Server | None = None
        self.port = 0
        self.records: list[Record] = []
        self.copies: list[int] = []
        """Of each record, the copy number that came beside it."""
        self.delivering = True
        """Say that gateways delivered the signals of batches that ask for receipts."""
        self.gateways = [1]
        """Which of them say so; without any it is said as proxies did that named none."""
        self.batches: list[int] = []
        self.hellos: list[wire_pb2.PublishHello] = []
        self.streams = 0
        """That carried at least one batch."""
        self.clean_ends = 0
        self.holding = False
        """Take batches, answer nothing."""
        self.reading = True
        self.failing: Callable[[Record], wire_pb2.PublishFailure | None] = lambda record: None
        self.lend_for_ms = 3_600_000
        self.clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
        self.renewals = 0
        self.returned: list[int] = []
        self.draining = False
        self.refuses_logins = False
        self.no_worker_for_ms = 0
        """Refuse to lend a worker number, and say for how long."""
        self.mailer = FakeMailer()
        self._tell: set[asyncio.Queue[wire_pb2.PublishReply | None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        wire_pb2_grpc.add_PublisherServicer_to_server(self, self.server)
        mail_pb2_grpc.add_MailerServicer_to_server(self.mailer, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    async def kill(self) -> None:
        if self.server is not None:
            await stopped(self.server)
            self.server = None

    def drain(self) -> None:
        self.draining = True
        for queue in self._tell:
            queue.put_nowait(wire_pb2.PublishReply(draining=True))

    def payloads(self) -> list[bytes]:
        return [record.body for record in self.records]

    async def Cluster(self, request: wire_pb2.ClusterRequest, context: Any) -> wire_pb2.ClusterReply:
        return self.cluster.reply()

    async def Publish(self, request_iterator: Any, context: Any) -> AsyncIterator[wire_pb2.PublishReply]:
        queue: asyncio.Queue[wire_pb2.PublishReply | None] = asyncio.Queue()
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if self.refuses_logins and not (first is not None and first.hello.lend_worker):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token has expired")
        if first is not None and first.hello.lend_worker and self.no_worker_for_ms:
            self.hellos.append(first.hello)
            await GrpcHandler(context).refuse(Overloaded("all are lent", retry_after_ms=self.no_worker_for_ms))
        self._tell.add(queue)
        reader = asyncio.create_task(self._read(first, requests, queue))
        try:
            while (reply := await queue.get()) is not None:
                yield reply
        finally:
            self._tell.discard(queue)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, first: Any, requests: Any, queue: asyncio.Queue[wire_pb2.PublishReply | None]) -> None:
        position = 1
        request = first
        while request is not None:
            if request.HasField("hello"):
                self.hellos.append(request.hello)
                queue.put_nowait(wire_pb2.PublishReply(window_bytes=1 << 20, draining=self.draining))
                if request.hello.lend_worker:
                    queue.put_nowait(self.lend(request.hello.returned_worker))
            elif request.renew_worker:
                self.renewals += 1
                queue.put_nowait(self.lend(self.cluster.worker))
            elif request.last_used_ms:
                self.returned.append(request.last_used_ms)
            else:
                assert request.position == position
                self.streams += position == 1
                position += request.count
                self.batches.append(request.count)
                records = [decode(record) for record in split(request.batch, request.count)]
                self.records += records
                self.copies += [request.copy] * request.count
                if request.receipt and self.delivering:
                    ids = [record.snowflake_id for record in records]
                    for gateway in self.gateways:
                        queue.put_nowait(wire_pb2.PublishReply(delivered=ids, gateways=[gateway] * len(ids)))
                    if not self.gateways:
                        queue.put_nowait(wire_pb2.PublishReply(delivered=ids))
                if not self.holding:
                    queue.put_nowait(self.answer(position - request.count, records))
            while not self.reading:
                await asyncio.sleep(0.005)
            request = await anext(requests, None)
        self.clean_ends += 1
        queue.put_nowait(None)

    def answer(self, first: int, records: list[Record]) -> wire_pb2.PublishReply:
        failures = []
        for place, record in enumerate(records):
            failure = self.failing(record)
            if failure is not None:
                failure.first = failure.last = first + place
                failures.append(failure)
        return wire_pb2.PublishReply(up_to=first + len(records) - 1, failures=failures)

    def lend(self, held: int) -> wire_pb2.PublishReply:
        if not self.lend_for_ms:
            return wire_pb2.PublishReply()
        if not held:
            self.cluster.worker += 1
            held = self.cluster.worker
        now = self.clock_ms()
        return wire_pb2.PublishReply(worker=held, worker_from_ms=now, worker_until_ms=now + self.lend_for_ms)


class FakeGateway(wire_pb2_grpc.SubscriberServicer):
    """Confirms joins and sends what the test pushes."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.server: grpc.aio.Server | None = None
        self.port = 0
        self.streams: dict[asyncio.Queue[wire_pb2.SubscribeReply | None], tuple[set[int], set[str]]] = {}
        self.hellos: list[wire_pb2.SubscribeHello] = []
        self.confirming = True
        self.unconfirmed: list[tuple[asyncio.Queue[wire_pb2.SubscribeReply | None], int]] = []
        self.refuse: dict[int, tuple[str, str]] = {}
        """Rooms that are refused: code and text."""
        self.retry_after_ms = 0
        """What goes with it."""
        self.relays = True
        """Whether messages to users can come."""
        self.abort: grpc.StatusCode | None = None
        self.pushback: tuple[tuple[str, str], ...] = ()
        """What goes with `abort`."""
        self.calls = self.refusals = 0
        self.written = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        wire_pb2_grpc.add_SubscriberServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    async def kill(self) -> None:
        if self.server is not None:
            await stopped(self.server)
            self.server = None

    def push(self, reply: wire_pb2.SubscribeReply) -> None:
        for queue in self.streams:
            queue.put_nowait(reply)

    def send(self, *records: bytes) -> None:
        self.push(wire_pb2.SubscribeReply(batch=b"".join(records), count=len(records)))

    def confirm(self) -> None:
        self.confirming = True
        for queue, request in self.unconfirmed:
            queue.put_nowait(wire_pb2.SubscribeReply(request=request))
        self.unconfirmed.clear()

    def joined(self) -> set[int]:
        return {room for rooms, _ in self.streams.values() for room in rooms}

    def topics(self) -> set[str]:
        return {topic for _, topics in self.streams.values() for topic in topics}

    async def Subscribe(self, request_iterator: Any, context: Any) -> AsyncIterator[wire_pb2.SubscribeReply]:
        self.calls += 1
        if self.abort is not None:
            context.set_trailing_metadata(self.pushback)
            await context.abort(self.abort, "as the test wants it")
        queue: asyncio.Queue[wire_pb2.SubscribeReply | None] = asyncio.Queue()
        self.streams[queue] = (set(), set())
        reader = asyncio.create_task(self._read(request_iterator, queue))
        try:
            while (reply := await queue.get()) is not None:
                yield reply
                self.written += 1
        finally:
            self.streams.pop(queue, None)
            self.cluster.inboxes.closed(queue)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, requests: Any, queue: asyncio.Queue[wire_pb2.SubscribeReply | None]) -> None:
        rooms, topics = self.streams[queue]
        async for request in requests:
            if request.HasField("hello"):
                self.hellos.append(request.hello)
                queue.put_nowait(wire_pb2.SubscribeReply(uin=request.hello.uin or uin_of_name(request.hello.client)))
                if (request.hello.chat or request.hello.mail) and not self.relays:
                    text = "this cluster has no relays"
                    code = "INVALID_ARGUMENT" if request.hello.chat else "NOT_SERVED"
                    refusal = wire_pb2.SubscribeReply(request=request.request, error_code=code, error_text=text)
                    queue.put_nowait(refusal)
                    continue
            refused = [room for room in request.join_rooms if room in self.refuse]
            if refused:
                code, text = self.refuse[refused[0]]
                refusal = wire_pb2.SubscribeReply(request=request.request, error_code=code, error_text=text)
                refusal.retry_after_ms = self.retry_after_ms
                queue.put_nowait(refusal)
                self.refusals += 1
                continue
            rooms.update(request.join_rooms)
            rooms.difference_update(request.leave_rooms)
            topics.update(request.join_topics)
            topics.difference_update(request.leave_topics)
            if request.mail_acknowledgements:
                self.cluster.inboxes.take(queue, list(request.mail_acknowledgements))
            if request.hello.mail:
                self.cluster.inboxes.opened(queue, request.hello)
            if request.request and self.confirming:
                queue.put_nowait(wire_pb2.SubscribeReply(request=request.request))
            elif request.request:
                self.unconfirmed.append((queue, request.request))
        queue.put_nowait(None)


class FakeCluster:
    """Some proxies and gateways."""

    def __init__(self) -> None:
        self.proxies: list[FakeProxy] = []
        self.gateways: list[FakeGateway] = []
        self.inboxes = FakeInboxes()
        self.hidden: set[str] = set()
        """Addresses that the cluster does not tell."""
        self.worker = 0
        self.asked = 0

    async def start(self, proxies: int = 1, gateways: int = 0) -> FakeCluster:
        self.proxies = [FakeProxy(self) for _ in range(proxies)]
        self.gateways = [FakeGateway(self) for _ in range(gateways)]
        for proxy in self.proxies:
            await proxy.start()
        for gateway in self.gateways:
            await gateway.start()
        return self

    def reply(self) -> wire_pb2.ClusterReply:
        self.asked += 1
        members = [wire_pb2.ClusterMember(role="proxy", grpc_address=proxy.address) for proxy in self.proxies]
        members += [wire_pb2.ClusterMember(role="gateway", grpc_address=gateway.address) for gateway in self.gateways]
        return wire_pb2.ClusterReply(members=[member for member in members if member.grpc_address not in self.hidden])

    async def stop(self) -> None:
        for proxy in self.proxies:
            await proxy.kill()
        for gateway in self.gateways:
            await gateway.kill()

    @property
    def target(self) -> str:
        return self.proxies[0].address


async def stopped(server: grpc.aio.Server) -> None:
    """Stop at once. Bounded: once in many runs gRPC's `stop` does not return although the port is closed and all calls are cut."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(server.stop(None), LIMIT_S / 4)


class Background:
    """A loop in another thread, for tests of the synchronous client."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(LIMIT_S)

    def call(self, work: Callable[[], T]) -> T:
        async def called() -> T:
            return work()

        return self.run(called())

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(LIMIT_S)
        self.loop.close()


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    """A cluster that the test starts with as many servers as it needs."""
    made = FakeCluster()
    yield made
    await made.stop()


@pytest.fixture
def empty_cluster() -> FakeCluster:
    """A cluster that the test starts and stops in a loop of its choice."""
    return FakeCluster()


@pytest.fixture
def background() -> Iterator[Background]:
    """A loop in another thread."""
    made = Background()
    yield made
    made.stop()


@pytest.fixture(name="until")
def until_fixture() -> Callable[[Callable[[], object]], Coroutine[Any, Any, None]]:
    """`await until(condition)`."""
    return until
