"""Duplex streams over a real gRPC server and client in one process: order, bounds, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from pixiu.errors import InvalidArgument, Overloaded
from pixiu.rpc.channels import PEER_CHANNEL
from pixiu.rpc.duplex import CLOSED_BY_PEER, Duplex, End, Outbox, StreamEnded, ask
from pixiu.rpc.grpc_streams import GrpcCall, GrpcHandler

Handler = Callable[[GrpcHandler[bytes, bytes]], Awaitable[None]]
Call = GrpcCall[bytes, bytes]
METHOD = "/test.Streams/Exchange"


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """A server whose only method is `handler`. Gives host:port."""
    server = grpc.aio.server()

    async def exchange(_requests: Any, context: Any) -> None:
        await handler(GrpcHandler(context))

    methods: dict[str, Any] = {"Exchange": grpc.stream_stream_rpc_method_handler(exchange)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Streams", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def call_to(address: str) -> Call:
    channel = grpc.aio.insecure_channel(address, options=PEER_CHANNEL)
    opened: Any = channel.stream_stream(METHOD)
    return GrpcCall(opened(), channel.close)


def taking(outbox: Outbox[bytes]) -> Callable[[bytes], None]:
    def take(message: bytes) -> None:
        assert outbox.put(message)

    return take


async def echo(carrier: GrpcHandler[bytes, bytes]) -> None:
    """Answers each message with itself."""
    outbox = Outbox[bytes](100)
    await Duplex(carrier, taking(outbox), outbox.give, work=outbox.work).run()


def client(carrier: Call, got: list[bytes], *messages: bytes) -> Duplex[bytes, bytes]:
    waiting = list(messages)
    return Duplex(carrier, got.append, lambda: waiting.pop(0) if waiting else None)


async def test_messages_go_both_ways_in_order() -> None:
    got: list[bytes] = []
    sent = [b"%d" % number for number in range(50)]
    async with serving(echo) as address, call_to(address) as carrier:
        stream = client(carrier, got, *sent)
        running = asyncio.create_task(stream.run())
        while len(got) < len(sent):
            await asyncio.sleep(0.001)
        stream.end("enough")
        assert await running == End("enough")
    assert got == sent


async def test_after_the_last_word_the_rest_of_the_answers_is_read() -> None:
    async def slowly(carrier: GrpcHandler[bytes, bytes]) -> None:
        answers = Outbox[bytes](100)
        await Duplex(carrier, taking(answers), answers.give, work=answers.work, last=nap).run()

    async def nap() -> None:
        await asyncio.sleep(0.05)

    got: list[bytes] = []
    async with serving(slowly) as address, call_to(address) as carrier:
        stream = client(carrier, got, b"one", b"two")
        stream.finish()
        assert await stream.run() == End(CLOSED_BY_PEER)
    assert got == [b"one", b"two"]


async def test_a_serving_side_ends_the_stream_with_its_last_word() -> None:
    async def once(carrier: GrpcHandler[bytes, bytes]) -> None:
        words = [b"farewell"]
        stream = Duplex(carrier, lambda _message: None, lambda: words.pop() if words else None)
        stream.finish()
        await stream.run()

    got: list[bytes] = []
    async with serving(once) as address, call_to(address) as carrier:
        assert await client(carrier, got).run() == End(CLOSED_BY_PEER)
    assert got == [b"farewell"]


async def test_a_refusal_is_told_in_words() -> None:
    async def refuse(carrier: GrpcHandler[bytes, bytes]) -> None:
        await carrier.refuse(InvalidArgument("not with us"))

    async with serving(refuse) as address:
        async with call_to(address) as carrier:
            end = await Duplex(carrier, lambda _message: None, lambda: None).run()
            assert end == End("INVALID_ARGUMENT: not with us", refused=True)
        async with call_to(address) as carrier:
            with pytest.raises(StreamEnded, match="not with us") as caught:
                await ask(carrier, b"hello", 5.0)
            assert caught.value.refused
        async with call_to(address) as carrier:  # a write that meets the end of a call makes gRPC forget why: it ends all the same
            assert (await Duplex(carrier, lambda _message: None, lambda: b"x" * 10_000).run()).text


async def test_what_trying_again_changes_is_no_refusal() -> None:
    async def refuse(carrier: GrpcHandler[bytes, bytes]) -> None:
        await carrier.refuse(Overloaded("too many"))

    async with serving(refuse) as address, call_to(address) as carrier:
        end = await Duplex(carrier, lambda _message: None, lambda: None).run()
        assert (end.refused, "too many" in end.text) == (False, True)


async def test_a_call_that_nobody_takes_is_an_end_and_no_cancellation() -> None:
    async with call_to("127.0.0.1:1") as carrier:
        with pytest.raises(StreamEnded, match=r"connection refused|cancelled"):
            await carrier.opened(5.0)
    async with call_to("127.0.0.1:1") as carrier:
        with pytest.raises(StreamEnded):
            await ask(carrier, b"hello", 5.0)


async def test_a_call_that_is_cancelled_beside_ends_the_stream_in_words() -> None:
    async with serving(echo) as address, call_to(address) as carrier:
        running = asyncio.create_task(client(carrier, []).run())
        await carrier.opened(5.0)
        await asyncio.sleep(0.01)
        carrier.cancel()
        assert await running == End("the call was cancelled")


async def test_a_task_that_is_cancelled_is_cancelled() -> None:
    over: list[bool] = []
    async with serving(echo) as address, call_to(address) as carrier:
        stream = Duplex(carrier, lambda _message: None, lambda: None, over=lambda: over.append(True))
        running = asyncio.create_task(stream.run())
        await carrier.opened(5.0)
        await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert over == [True]


async def test_waiting_for_a_connection_can_be_cancelled() -> None:
    async with call_to("127.0.0.1:1") as carrier:
        waiting = asyncio.create_task(carrier.opened(60.0))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_an_answer_that_does_not_come_in_time() -> None:
    async def silent(carrier: GrpcHandler[bytes, bytes]) -> None:
        await asyncio.sleep(60)

    async with serving(silent) as address, call_to(address) as carrier:
        with pytest.raises(StreamEnded, match="no answer in time"):
            await ask(carrier, b"hello", 0.1)


async def test_the_first_answer_is_asked_for_before_the_stream_runs() -> None:
    async with serving(echo) as address, call_to(address) as carrier:
        assert await ask(carrier, b"hello", 5.0) == b"hello"
        got: list[bytes] = []
        stream = client(carrier, got, b"more")
        running = asyncio.create_task(stream.run())
        while not got:
            await asyncio.sleep(0.001)
        stream.end("")
        await running
    assert got == [b"more"]


async def test_what_taking_a_message_raises_is_raised() -> None:
    def take(message: bytes) -> None:
        raise ValueError(message)

    async with serving(echo) as address, call_to(address) as carrier:
        words = [b"x"]
        with pytest.raises(ValueError, match="x"):
            await Duplex(carrier, take, lambda: words.pop() if words else None).run()


async def test_nothing_more_is_read_until_the_last_message_is_taken() -> None:
    taken: list[bytes] = []
    room = asyncio.Event()

    async def slow(carrier: GrpcHandler[bytes, bytes]) -> None:
        def take(message: bytes) -> Awaitable[None]:
            taken.append(message)
            return wait()

        async def wait() -> None:
            await room.wait()

        await Duplex(carrier, take, lambda: None).run()

    async with serving(slow) as address, call_to(address) as carrier:
        stream = client(carrier, [], b"1", b"2")
        running = asyncio.create_task(stream.run())
        while not taken:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert taken == [b"1"]
        room.set()
        while len(taken) < 2:
            await asyncio.sleep(0.001)
        stream.end("")
        await running


@pytest.mark.slow
async def test_a_server_that_ends_in_the_middle_of_a_write_is_heard_to_the_end() -> None:
    """gRPC refuses to close a call in the middle of a write: the status would be lost, and the server log an error of its own."""
    stopped, writes = asyncio.Event(), [0]
    floods: list[Duplex[bytes, bytes]] = []

    def more() -> bytes:
        writes[0] += 1
        return b"x" * 100_000

    async def flood(carrier: GrpcHandler[bytes, bytes]) -> None:
        floods.append(Duplex(carrier, lambda _message: None, more))
        await floods[0].run()
        stopped.set()
        await carrier.refuse(Overloaded("you do not read"))

    async with serving(flood) as address, call_to(address) as carrier:
        await carrier.opened(5.0)
        written = -1
        while written != writes[0] or not written:  # until its window is full, and a write waits
            written = writes[0]
            await asyncio.sleep(0.2)
        floods[0].end("enough")
        await asyncio.sleep(0)
        assert not stopped.is_set()
        end = await Duplex(carrier, lambda _message: None, lambda: None).run()
        assert "you do not read" in end.text


@pytest.mark.slow
async def test_a_caller_that_never_reads_does_not_hold_a_handler() -> None:
    stopped = asyncio.Event()

    async def flood(carrier: GrpcHandler[bytes, bytes]) -> None:
        stream = Duplex(carrier, lambda _message: None, lambda: b"x" * 100_000)
        asyncio.get_running_loop().call_later(0.05, stream.end, "enough")
        await stream.run()
        stopped.set()

    async with serving(flood) as address, call_to(address) as carrier:
        await carrier.opened(5.0)
        async with asyncio.timeout(10.0):
            await stopped.wait()


async def test_a_server_that_stops_ends_the_streams() -> None:
    async with serving(echo) as address:
        carrier = call_to(address)
        got: list[bytes] = []
        running = asyncio.create_task(client(carrier, got, b"x").run())
        while not got:
            await asyncio.sleep(0.001)
    async with asyncio.timeout(5.0):
        assert not (await running).refused
    await carrier.close()


async def test_an_outbox_is_bounded_by_messages_and_bytes() -> None:
    outbox = Outbox[bytes](2, max_bytes=10)
    assert outbox.put(b"a", 6)
    assert not outbox.put(b"b", 5)
    assert outbox.put(b"c", 4)
    assert not outbox.put(b"d")
    assert (len(outbox), outbox.give(), len(outbox)) == (2, b"a", 1)
    assert outbox.put(b"e", 6)
    outbox.clear()
    assert outbox.give() is None
    assert outbox.put(b"f", 10)
    await outbox.wait()
