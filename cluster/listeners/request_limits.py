"""Limits of one client request at a gRPC listener, and the time of its parsing.

Requests of many streams may arrive in one turn of the event loop. Each is bounded in bytes and in names or records before anything
is parsed or looked up, and is parsed and handled in its turn (`cluster.core.turn`). Clients learn the bounds from the answer to
their hello.

Source: docs/security.md, "What one request may ask for".
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from cluster.core.token_bucket import Meters
from cluster.core.turn import Turn
from pixiu.errors import InvalidArgument, RecordTooLarge
from pixiu.rpc.grpc_streams import Unparsed
from pixiu.wire.record import HEADER_SIZE, offsets

MAX_BATCH_BYTES: Final = 256 << 10
"""Maximum bytes of a client's batch, unless it is a single record."""
MAX_BATCH_RECORDS: Final = 4_000
"""Maximum records of a batch, with the further receivers of mail."""
MAX_NAMES: Final = 2_000
"""Maximum rooms, topics and acknowledgements of one SubscribeRequest, which is handled in pieces."""
SLICE: Final = 1_000
"""Records that are handled at once, one to four milliseconds. A batch with no more, as the SDK sends them, is one slice."""
BESIDE_BATCH_BYTES: Final = 64 << 10
"""Bytes of a message besides its batch: proofs, receivers, a hello."""
GRPC_OWN: Final = "/grpc."
"""Names of health and reflection begin so: they need no login."""
NO_LOGIN_PER_S: Final = 50.0
"""Their requests of one address, a second."""
MAX_WAIT_S: Final = 2.0
"""Time that a request waits for its address's rate, seconds."""
REFUSED_AFTER_S: Final = 10.0
"""A request that would wait longer is refused after this time, or up to twice as much, seconds: meanwhile it is one of its
connection's calls. Requests that came together are not refused together, since their callers come back at once."""
MAX_ADDRESSES: Final = 10_000
STREAMS: Final = frozenset({
    "/pixiu.v1.Publisher/Publish", "/pixiu.v1.Mailer/Send", "/pixiu.v1.Subscriber/Subscribe",
    "/pixiu.v1.TopicLog/Write", "/pixiu.v1.TopicLog/Consume",
})  # fmt: skip
"""Streams that clients open, all read by `pixiu.rpc.grpc_streams.GrpcHandler`."""


def message_bytes_of_client(max_record_bytes: int, largest: int = 0) -> int:
    """Return the maximum length of a client's message, bytes. largest: a thing that it must be able to hold."""
    return max(MAX_BATCH_BYTES, max_record_bytes, largest) + BESIDE_BATCH_BYTES


def check_batch(count: int, size: int, further: int = 0) -> None:
    """Check a batch by its announced count and size. further: receivers of mail.

    Raises `InvalidArgument` or `RecordTooLarge`.
    """
    if count * HEADER_SIZE > size:
        raise InvalidArgument(f"a batch of {size} bytes cannot hold {count} records")
    if count + further > MAX_BATCH_RECORDS:
        raise InvalidArgument(f"a batch has at most {MAX_BATCH_RECORDS} records and further receivers; send several")
    if size > MAX_BATCH_BYTES and count > 1:
        raise RecordTooLarge(f"a batch has at most {MAX_BATCH_BYTES} bytes, or one record; send several")


def slices(data: bytes, count: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield a batch in slices: (index of the first record, count, bytes). A malformed batch is one slice without bytes, which
    routing then finds malformed."""
    if count <= SLICE:
        yield 0, count, data
        return
    found = offsets(data, 0, len(data), count)
    if found is None:
        yield 0, count, b""
        return
    for first in range(0, count, SLICE):
        after = min(first + SLICE, count)
        yield first, after - first, data[found[first] : found[after]]


async def _at_once(_context: Any) -> None:
    pass


class NoLogin:
    """Requests that no login pays for: those of gRPC's own methods, of methods that do not exist, and malformed ones. Each address
    has a rate of them. Others wait, and are refused when too many do."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._meters: Meters[str] = Meters(NO_LOGIN_PER_S, 0, 1.0, MAX_ADDRESSES)

    async def admit(self, context: Any) -> None:
        """Wait until a caller's request may be handled, or end the call."""
        address, now = str(context.peer()).rpartition(":")[0], self._clock()
        meter = self._meters.of(address, now)
        if full := meter.spend(0, 0, now) > MAX_WAIT_S:
            await asyncio.sleep(random.uniform(1, 2) * REFUSED_AFTER_S)
        elif wait_s := meter.spend(1, 0, now):
            await asyncio.sleep(wait_s)
        if full:
            text = f"an address has {NO_LOGIN_PER_S:.0f} requests a second of methods that need no login; send fewer"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)


class ParseInTurn(grpc.aio.ServerInterceptor):
    """Has clients' messages parsed in their turn. A request that cannot be parsed is the caller's fault: it gets
    INVALID_ARGUMENT, where gRPC would return UNKNOWN and log a server error for each."""

    def __init__(self, turn: Turn) -> None:
        self._turn, self._no_login = turn, NoLogin(turn.now)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of a call. Called by gRPC for each call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return grpc.stream_stream_rpc_method_handler(self._unknown)
        if handler.request_deserializer is None:
            return handler  # its messages are bytes
        admit = self._no_login.admit if handler_call_details.method.startswith(GRPC_OWN) else _at_once
        if not handler.request_streaming:
            return self._of_one_request(handler, admit)
        if inspect.isasyncgenfunction(handler.stream_stream):
            return self._of_many_requests(handler, admit)
        if handler_call_details.method not in STREAMS:
            return handler
        return handler._replace(request_deserializer=partial(self._unparsed, handler.request_deserializer))

    def _of_one_request(self, handler: Any, admit: Callable[[Any], Awaitable[None]]) -> Any:
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def answer(data: bytes, context: Any) -> Any:
            await admit(context)
            return await inner(await self._parsed(handler.request_deserializer, data, context), context)

        async def answers(data: bytes, context: Any) -> AsyncIterator[Any]:
            await admit(context)
            async for reply in inner(await self._parsed(handler.request_deserializer, data, context), context):
                yield reply

        wrapped = answers if inspect.isasyncgenfunction(inner) else answer
        name = "unary_stream" if handler.response_streaming else "unary_unary"
        return handler._replace(**{"request_deserializer": None, name: wrapped})

    def _of_many_requests(self, handler: Any, admit: Callable[[Any], Awaitable[None]]) -> Any:
        async def answers(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
            async def parsed() -> AsyncIterator[Any]:
                async for data in requests:
                    await admit(context)
                    yield await self._parsed(handler.request_deserializer, data, context)

            async for reply in handler.stream_stream(parsed(), context):
                yield reply

        return handler._replace(request_deserializer=None, stream_stream=answers)

    async def _unknown(self, _requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await self._no_login.admit(context)
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this listener does not offer the method")
        yield b""

    async def _parsed(self, parse: Callable[[bytes], Any], data: bytes, context: Any) -> Any:
        try:
            return await self._turn.run(partial(parse, data), len(data))
        except DecodeError:
            await self._no_login.admit(context)  # it costs its caller's login nothing
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the request is not what this method takes: protobuf cannot read it"
            )

    def _unparsed(self, parse: Callable[[bytes], Any], data: bytes) -> Unparsed[Any]:
        return Unparsed(data, parse, self._turn.run)
