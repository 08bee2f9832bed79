"""The gRPC side of a proxy: the `Publisher` service.

One stream is one publisher. Its batches go to the core; its replies report the position up to which everything is resolved. A
publisher with more than its window unresolved is not read from.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import grpc.aio

from cluster.access.login_guard import LoginSession
from cluster.core.turn import Turn
from cluster.listeners.request_limits import MAX_BATCH_BYTES, MAX_BATCH_RECORDS, check_batch, slices
from cluster.rpc.served import ServedStream
from cluster.trust.loans import Lent, Loan
from pixiu.errors import InvalidArgument, PixiuError, Unavailable
from pixiu.rpc.duplex import Served
from pixiu.rpc.grpc_streams import GrpcHandler
from pixiu.rpc.status import GRPC_STATUS
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc
from proxy import events as ev
from proxy.options import Options
from proxy.publishers.message_ids import MessageIDs
from proxy.publishers.permits import Foreseeing, permitted
from proxy.publishers.worker_leases import NO_WORKER, Lender

MAX_CLIENT_BYTES = 128
MAX_FAILURES_A_REPLY = 1_000
MAX_UNREAD = 1_000
"""Failures and receipts that wait for a publisher that does not read them, besides those of one request and of what is in flight.
Policy: no more is read from it until it does."""
CLUSTER_BYTES = 1_000
"""Bytes that `Cluster` counts in a login's quota, besides one message."""
RENEW_S = 1.0
"""Least time between two answered renewals, seconds."""
FINISH_TIMEOUT_S = 10.0
"""Time for which a publisher that has ended its side is still answered, seconds."""

Context = grpc.aio.ServicerContext[wire_pb2.PublishRequest, wire_pb2.PublishReply]


class PublisherHost(Protocol):
    """Interface of the proxy's service for its publishers."""

    options: Options
    lender: Lender
    ids: MessageIDs
    turn: Turn

    def admit(self, publisher: PublisherStream) -> int:
        """Number a new publisher. Raises `Overloaded` or `Draining`."""

    def begins(self, stream: int, count: int, position: int) -> None:
        """Note that a request with `count` records has come on a publisher's stream."""

    def publish(self, batch: ev.BatchPublished) -> None:
        """Take a batch of a publisher's stream, or a slice of one."""

    def left(self, stream: int) -> None:
        """Forget a publisher that is gone."""

    def members(self) -> wire_pb2.ClusterReply:
        """Addresses of the cluster's proxies and gateways."""

    async def enter(self, context: Any, end: Callable[[str], None]) -> LoginSession | None:
        """Session of the caller; None: nobody has to log in. Raises `NotAuthenticated`, `NotAllowed` or `Overloaded`."""


class PublisherStream:
    """One publisher: its window, and the reply that is being built."""

    def __init__(
        self, handler: Served[wire_pb2.PublishReply, wire_pb2.PublishRequest], window_bytes: int,
        take: Callable[[PublisherStream, wire_pb2.PublishRequest], Awaitable[None]], over: Callable[[PublisherStream], None],
    ) -> None:  # fmt: skip
        self.number = 0
        """0 until it is admitted."""
        self.expected = 1
        self.worker: int | None = None
        self._window = window_bytes
        self._sizes: deque[tuple[int, int]] = deque()
        self._unresolved = 0
        self._up_to = 0
        self._failures: list[ev.Failure] = []
        self._beside: wire_pb2.PublishReply | None = None
        """Everything to report besides resolved positions, merged into one reply."""
        self._delivered: list[int] = []
        self._gateways: list[int] = []
        """Gateway that delivered each signal of `_delivered`."""
        self._written = 0
        self.greeted = False
        self.renewed_s = 0.0
        """Time of the last answered renewal."""
        self.access: LoginSession | None = None
        """Session of a publisher that has logged in; None: nobody has to."""
        self.lent: Lent | None = None
        """Message IDs that it may use; None: any, because nobody has to log in."""
        self.served: ServedStream[wire_pb2.PublishReply, wire_pb2.PublishRequest] = ServedStream(
            handler, lambda request: take(self, request), self, lambda: over(self), FINISH_TIMEOUT_S
        )

    def login_over(self, text: str) -> None:
        """End the stream: its login has expired, or an operator ended it."""
        self.served.cut(text)

    def close(self) -> None:
        """Close the session of a publisher that is gone."""
        if self.access is not None:
            self.access.close()

    def took(self, last: int, size: int) -> None:
        """Note that a batch up to position `last` is in flight."""
        self._sizes.append((last, size))
        self._unresolved += size

    def resolved(self, reply: ev.Reply) -> None:
        """Queue the core's reply for the publisher."""
        self._up_to = reply.up_to
        for failure in reply.failures:
            ev.add_failure(self._failures, failure)
        while self._sizes and self._sizes[0][0] <= reply.up_to:
            self._unresolved -= self._sizes.popleft()[1]
        self.served.changed()

    def say(self, reply: wire_pb2.PublishReply) -> None:
        """Queue something besides resolved positions."""
        if self._beside is None:
            self._beside = reply
        else:
            self._beside.MergeFrom(reply)
        self.served.changed()

    def delivered(self, signals: list[int], gateway: int) -> None:
        """Queue a report that a gateway delivered these of its signals."""
        self._delivered += signals
        self._gateways += [gateway] * len(signals)
        self.served.changed()

    def unanswered(self) -> bool:
        """Return True while a batch is in flight."""
        return bool(self._sizes)

    def full(self) -> bool:
        """Return True while the window is full, or too many failures and receipts wait."""
        return self._unresolved >= self._window or len(self._failures) + len(self._delivered) >= MAX_UNREAD

    def give(self) -> wire_pb2.PublishReply | None:
        """Next reply; everything that comes while one is being written is joined."""
        if self._beside is not None:
            beside, self._beside = self._beside, None
            return beside
        if self._delivered:
            reply = wire_pb2.PublishReply(delivered=self._delivered, gateways=self._gateways)
            self._delivered, self._gateways = [], []
            return reply
        if self._up_to > self._written or self._failures:
            # Failures of positions up to `up_to` must not come after it.
            failures, self._failures = self._failures[:MAX_FAILURES_A_REPLY], self._failures[MAX_FAILURES_A_REPLY:]
            self._written = self._up_to if not self._failures else max(self._written, self._failures[0].first - 1)
            return wire_pb2.PublishReply(up_to=self._written, failures=[_failure_of(failure) for failure in failures])
        return None


def _failure_of(failure: ev.Failure) -> wire_pb2.PublishFailure:
    return wire_pb2.PublishFailure(
        first=failure.first, last=failure.last, code=failure.code, text=failure.text, retry_after_ms=failure.retry_after_ms
    )


class PublisherService(wire_pb2_grpc.PublisherServicer):
    """The gRPC service `pixiu.v1.Publisher`."""

    def __init__(self, host: PublisherHost) -> None:
        self._host = host

    async def Cluster(
        self, request: wire_pb2.ClusterRequest, context: grpc.aio.ServicerContext[wire_pb2.ClusterRequest, wire_pb2.ClusterReply]
    ) -> wire_pb2.ClusterReply:
        """Answer with the addresses of the cluster's proxies and gateways."""
        try:
            access = await self._host.enter(context, lambda _: None)
        except PixiuError as error:
            await context.abort(GRPC_STATUS[error.code], str(error))
        if access is not None:
            try:
                if access.spend(1, CLUSTER_BYTES):
                    await access.hold()
            finally:
                access.close()
        return self._host.members()

    async def Publish(  # type: ignore[override]
        self, request_iterator: AsyncIterator[wire_pb2.PublishRequest], context: Context
    ) -> None:
        """Serve one publisher's stream."""
        handler: GrpcHandler[wire_pb2.PublishReply, wire_pb2.PublishRequest] = GrpcHandler(context)
        publisher = PublisherStream(handler, self._host.options.publisher_window_bytes, self._request, self._over)
        try:
            publisher.access = await self._host.enter(context, publisher.login_over)
            if publisher.access is not None:
                publisher.lent = self._host.ids.of(publisher.access)
            publisher.number = self._host.admit(publisher)
        except PixiuError as error:
            publisher.close()
            await handler.refuse(error)
        try:
            await publisher.served.run()
        except PixiuError as error:
            await handler.refuse(error)
        if publisher.served.problem:
            await handler.refuse(Unavailable(publisher.served.problem))

    def _over(self, publisher: PublisherStream) -> None:
        publisher.close()
        self._host.left(publisher.number)
        if publisher.worker is not None:
            self._host.lender.give_back(publisher.worker, 0)

    async def _request(self, publisher: PublisherStream, request: wire_pb2.PublishRequest) -> None:
        if request.HasField("hello"):
            await self._hello(publisher, request.hello)
        if publisher.lent is not None:
            self._host.ids.show(publisher.lent, request.loans)
        if request.renew_worker and publisher.worker is not None:
            self._renew(publisher, publisher.worker)
        if request.last_used_ms and publisher.worker is not None:
            self._host.lender.give_back(publisher.worker, request.last_used_ms)
            publisher.worker = None
        if request.count:
            await self._batch(publisher, request)

    async def _batch(self, publisher: PublisherStream, request: wire_pb2.PublishRequest) -> None:
        """Take a batch: checked, charged, and processed in slices, each in its turn."""
        number, data, count, access = publisher.number, request.batch, request.count, publisher.access
        if request.position != publisher.expected:
            raise InvalidArgument(f"positions must be consecutive: {publisher.expected} was expected, {request.position} came")
        check_batch(count, len(data))
        publisher.expected += count
        if access is not None and access.spend(count, len(data)):
            await access.hold()
        self._host.begins(number, count, request.position)
        turn = self._host.turn
        for first, part, records in slices(data, count):
            if access is not None and access.asks:
                await turn.run(partial(permitted, records, part, Foreseeing(access), None), len(records))
                await access.ask()
            more = request.more or first + part < count
            batch = ev.BatchPublished(number, records, part, request.position + first, request.copy, request.receipt, more)
            await turn.run(partial(self._take, publisher, batch), len(data))
            if (space := publisher.served.space()) is not None:
                await space

    def _renew(self, publisher: PublisherStream, worker: int) -> None:
        now = asyncio.get_running_loop().time()
        if now >= publisher.renewed_s + RENEW_S:
            publisher.renewed_s = now
            publisher.say(self._lent(publisher, self._host.lender.renew(worker, _now_ms())))

    async def _hello(self, publisher: PublisherStream, hello: wire_pb2.PublishHello) -> None:
        if publisher.greeted:
            raise InvalidArgument("a stream sends `hello` once")
        publisher.greeted = True
        if len(hello.client.encode()) > MAX_CLIENT_BYTES:
            raise InvalidArgument(f"a client's name has at most {MAX_CLIENT_BYTES} bytes")
        reply = wire_pb2.PublishReply(
            window_bytes=self._host.options.publisher_window_bytes,
            max_batch_bytes=MAX_BATCH_BYTES,
            max_batch_records=MAX_BATCH_RECORDS,
        )
        if hello.lend_worker:
            returned = hello.returned_worker if hello.returned_until_ms else NO_WORKER
            loan = await self._host.lender.lend(_now_ms(), self._host.ids.owner(publisher.access), returned)
            publisher.worker = loan.worker
            reply.MergeFrom(self._lent(publisher, loan))
        publisher.say(reply)

    def _lent(self, publisher: PublisherStream, loan: Loan) -> wire_pb2.PublishReply:
        return wire_pb2.PublishReply(
            worker=loan.worker,
            worker_from_ms=loan.from_ms,
            worker_until_ms=loan.until_ms,
            loan=self._host.ids.prove(loan, publisher.access),
        )

    def _take(self, publisher: PublisherStream, batch: ev.BatchPublished) -> None:
        publisher.took(batch.position + batch.count - 1, len(batch.data))
        access = publisher.access
        if access is not None and publisher.lent is not None:
            batch = replace(batch, data=self._host.ids.permitted(batch.data, batch.count, access, publisher.lent))
        self._host.publish(batch)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
