"""Duplex streams over frames, both sides in one process: order, bounds, how they end, and who is let in."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import warnings
from collections.abc import Awaitable, Callable

import pytest

from cluster.rpc import framed_listener
from cluster.rpc.framed import LOST, Connection, FramedHandler
from cluster.rpc.frames import HEAD, MAX_HELLO_BYTES, FrameKind, frame
from cluster.rpc.local_streams import LocalStreams
from pixiu.errors import InvalidArgument, NotAllowed, Overloaded
from pixiu.rpc.duplex import CLOSED_BY_PEER, Duplex, End, Outbox, StreamEnded, ask
from pixiu.wire.v1 import pi_pb2
from tests.cluster.rpc import framed_world
from tests.cluster.rpc.framed_world import HOST, MAX_BYTES, METHOD, Call, call_to, serving
from tests.support.waiting import until

Carrier = FramedHandler[bytes, bytes]


@pytest.fixture(params=["between processes", "inside a process"])
def carrier_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framed_world, "INSIDE", LocalStreams() if request.param == "inside a process" else None)


both = pytest.mark.usefixtures("carrier_of")
"""A test of what both carriers do."""


def taking(outbox: Outbox[bytes]) -> Callable[[bytes], None]:
    def take(message: bytes) -> None:
        assert outbox.put(message)

    return take


async def echo(carrier: Carrier) -> None:
    """Answers each message with itself."""
    outbox = Outbox[bytes](1000)
    await Duplex(carrier, taking(outbox), outbox.give, work=outbox.work).run()


def client(carrier: Call, got: list[bytes], *messages: bytes) -> Duplex[bytes, bytes]:
    waiting = list(messages)
    return Duplex(carrier, got.append, lambda: waiting.pop(0) if waiting else None)


@both
async def test_messages_go_both_ways_in_order() -> None:
    got: list[bytes] = []
    sent = [b"%d" % number * (number % 7 * 1000) for number in range(200)] + [bytes(MAX_BYTES)]
    async with serving(echo) as (_, port), call_to(port) as carrier:
        stream = client(carrier, got, *sent)
        running = asyncio.create_task(stream.run())
        await until(lambda: len(got) == len(sent), "all answers")
        stream.end("enough")
        assert await running == End("enough")
    assert got == sent


@both
async def test_after_the_last_word_the_rest_of_the_answers_is_read() -> None:
    room = asyncio.Event()

    async def slowly(carrier: Carrier) -> None:
        answers = Outbox[bytes](100)
        await Duplex(carrier, taking(answers), answers.give, work=answers.work, last=room.wait).run()

    got: list[bytes] = []
    async with serving(slowly) as (_, port), call_to(port) as carrier:
        stream = client(carrier, got, b"one", b"two")
        stream.finish()
        running = asyncio.create_task(stream.run())
        await until(lambda: len(got) == 2, "both answers")
        assert not running.done()
        room.set()
        assert await running == End(CLOSED_BY_PEER)
    assert got == [b"one", b"two"]


@both
async def test_a_serving_side_ends_the_stream_with_its_last_word() -> None:
    async def once(carrier: Carrier) -> None:
        words = [b"farewell"]
        stream = Duplex(carrier, lambda _message: None, lambda: words.pop() if words else None)
        stream.finish()
        await stream.run()

    got: list[bytes] = []
    async with serving(once) as (_, port), call_to(port) as carrier:
        assert await client(carrier, got).run() == End(CLOSED_BY_PEER)
    assert got == [b"farewell"]


@both
@pytest.mark.parametrize(
    ("error", "refused", "after_ms"), [(InvalidArgument("not with us"), True, 0), (Overloaded("too many", 700), False, 700)]
)
async def test_a_refusal_is_told_in_words(error: Overloaded | InvalidArgument, refused: bool, after_ms: int) -> None:
    async def refuse(carrier: Carrier) -> None:
        raise error

    async with serving(refuse) as (_, port):
        async with call_to(port) as carrier:
            end = await Duplex(carrier, lambda _message: None, lambda: None).run()
            assert end == End(f"{error.code}: {error}", refused)
        async with call_to(port) as carrier:
            with pytest.raises(StreamEnded, match=str(error)) as caught:
                await ask(carrier, b"hello", 30.0)
            assert (caught.value.refused, caught.value.retry_after_ms) == (refused, after_ms)
        async with call_to(port) as carrier:  # however much it writes
            assert (await Duplex(carrier, lambda _message: None, lambda: b"x" * 10_000).run()).text


@both
async def test_an_error_of_what_gives_or_takes_later_messages_ends_the_run_with_it() -> None:
    """While reader and writer wait, messages are given and taken at the ends of turns."""
    got: list[bytes] = []

    def fails(message: bytes) -> None:
        got.append(message)
        if len(got) == 2:
            raise ValueError("cannot be taken")

    async with serving(echo) as (_, port), call_to(port) as carrier:
        questions = Outbox[bytes](10)
        stream = Duplex(carrier, fails, questions.give, work=questions.work)
        running = asyncio.create_task(stream.run())
        for number in (1, 2):
            questions.put(b"x")
            await until(lambda: len(got) == number, "the answer")  # noqa: B023
        with pytest.raises(ValueError, match="cannot be taken"):
            await running
    given, got = [b"one"], []

    def give() -> bytes | None:
        if got:
            raise ValueError("cannot be given")
        return given.pop() if given else None

    async with serving(echo) as (_, port), call_to(port) as carrier:
        stream = Duplex(carrier, got.append, give)
        running = asyncio.create_task(stream.run())
        await until(lambda: bool(got), "the answer")
        stream.wake()
        with pytest.raises(ValueError, match="cannot be given"):
            await running


@both
async def test_nothing_more_is_taken_while_what_was_taken_is_waited_for() -> None:
    got: list[bytes] = []
    room = asyncio.Event()

    def take(message: bytes) -> Awaitable[object] | None:
        got.append(message)
        return room.wait() if message == b"2" else None

    async with serving(echo) as (_, port), call_to(port) as carrier:
        questions = Outbox[bytes](10)
        stream = Duplex(carrier, take, questions.give, work=questions.work)
        running = asyncio.create_task(stream.run())
        questions.put(b"1")
        await until(lambda: got == [b"1"], "the first answer")
        for each in (b"2", b"3", b"4"):
            questions.put(each)
        await until(lambda: got == [b"1", b"2"], "the second answer")
        for _ in range(20):
            await asyncio.sleep(0)
        assert got == [b"1", b"2"]
        room.set()
        await until(lambda: got == [b"1", b"2", b"3", b"4"], "all answers")
        stream.end("")
        await running


@both
async def test_what_is_to_be_waited_for_is_closed_where_the_stream_ends_in_that_moment() -> None:
    room = asyncio.Event()

    def take(message: bytes) -> Awaitable[object]:
        running.cancel()
        return room.wait()

    async with serving(echo) as (_, port), call_to(port) as carrier:
        questions = Outbox[bytes](10)
        stream = Duplex(carrier, take, questions.give, work=questions.work)
        running = asyncio.create_task(stream.run())
        await asyncio.sleep(0)
        questions.put(b"x")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with pytest.raises(asyncio.CancelledError):
                await running
            gc.collect()
    assert not [each for each in warned if "never awaited" in str(each.message)]


@both
async def test_who_is_refused_while_he_writes_is_told_why() -> None:
    async def refuse(carrier: Carrier) -> None:
        await carrier.read()
        raise InvalidArgument("no more of it")

    async with serving(refuse) as (_, port), call_to(port) as carrier:
        end = await Duplex(carrier, lambda _message: None, lambda: b"x" * 100_000).run()
        assert end == End("INVALID_ARGUMENT: no more of it", refused=True)


async def test_a_port_at_which_nobody_listens() -> None:
    for _ in range(2):
        async with call_to(1) as carrier:
            with pytest.raises(StreamEnded, match="connection refused"):
                await ask(carrier, b"hello", 30.0)


async def test_what_listens_there_speaks_something_else() -> None:
    async def http(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(http, HOST, 0)
    async with server, call_to(server.sockets[0].getsockname()[1]) as carrier:
        with pytest.raises(StreamEnded, match="sent no frames"):
            await carrier.opened(30.0)


@both
async def test_a_call_that_is_cancelled_beside_ends_the_stream_in_words() -> None:
    async with serving(echo) as (listener, port), call_to(port) as carrier:
        running = asyncio.create_task(client(carrier, []).run())
        await until(lambda: listener.open == 1, "the stream")
        carrier.cancel()
        assert await running == End("the call was cancelled")
        await until(lambda: listener.open == 0, "that the listener notices")


@both
async def test_a_task_that_is_cancelled_is_cancelled() -> None:
    over: list[bool] = []
    async with serving(echo) as (listener, port), call_to(port) as carrier:
        stream = Duplex(carrier, lambda _message: None, lambda: None, over=lambda: over.append(True))
        running = asyncio.create_task(stream.run())
        await until(lambda: listener.open == 1, "the stream")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert over == [True]


async def test_waiting_for_a_connection_can_be_cancelled() -> None:
    with socket.create_server((HOST, 0)) as silent:
        async with call_to(silent.getsockname()[1]) as carrier:
            waiting = asyncio.create_task(carrier.opened(3600.0))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting


@both
async def test_an_answer_that_does_not_come_in_time() -> None:
    async def silent(_carrier: Carrier) -> None:
        await asyncio.sleep(3600)

    async with serving(silent) as (_, port), call_to(port) as carrier:
        with pytest.raises(StreamEnded, match="no answer in time"):
            await ask(carrier, b"hello", 0.1)


@both
async def test_what_serves_a_stream_is_cancelled_when_the_caller_is_gone() -> None:
    ended = asyncio.Event()

    async def silent(_carrier: Carrier) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    async with serving(silent) as (_, port):
        async with call_to(port) as carrier:
            await carrier.opened(30.0)
        await ended.wait()


@both
async def test_what_taking_a_message_raises_is_raised() -> None:
    def take(message: bytes) -> None:
        raise ValueError(message)

    async with serving(echo) as (_, port), call_to(port) as carrier:
        words = [b"x"]
        with pytest.raises(ValueError, match="x"):
            await Duplex(carrier, take, lambda: words.pop() if words else None).run()


@both
async def test_a_bug_of_what_serves_it_ends_the_stream_in_words_and_is_told() -> None:
    failed: list[str] = []

    async def wrong(_carrier: Carrier) -> None:
        raise ZeroDivisionError

    async with serving(wrong, failed=lambda method, _error: failed.append(method)) as (_, port), call_to(port) as carrier:
        assert "see the log" in (await client(carrier, []).run()).text
    assert failed == [METHOD]


@both
@pytest.mark.slow
async def test_who_does_not_read_holds_the_other_side_back() -> None:
    """Both ways: what is written and not read is bounded by what the connection and the two buffers hold."""
    room = asyncio.Event()

    async def slow(carrier: Carrier) -> None:
        await room.wait()
        await echo(carrier)

    sent = 0

    def more() -> bytes | None:
        nonlocal sent
        sent += 1
        return b"x" * 10_000 if sent <= 20_000 else None

    got: list[bytes] = []
    async with serving(slow) as (_, port), call_to(port) as carrier:
        stream = Duplex(carrier, got.append, more)
        running = asyncio.create_task(stream.run())
        before = -1
        while sent != before or not sent:  # until the writer waits
            before = sent
            await asyncio.sleep(0.2)
        assert sent < 20_000
        room.set()
        await until(lambda: len(got) > before, "that it goes on where it was held back")
        stream.end("")
        await running


@both
@pytest.mark.slow
async def test_a_server_that_ends_in_the_middle_of_a_write_is_heard_to_the_end() -> None:
    floods: list[Duplex[bytes, bytes]] = []
    writes = [0]

    def more() -> bytes:
        writes[0] += 1
        return b"x" * 100_000

    async def flood(carrier: Carrier) -> None:
        floods.append(Duplex(carrier, lambda _message: None, more))
        await floods[0].run()
        raise Overloaded("you do not read")

    async with serving(flood) as (_, port), call_to(port) as carrier:
        await carrier.opened(30.0)
        written = -1
        while written != writes[0] or not written:
            written = writes[0]
            await asyncio.sleep(0.2)
        floods[0].end("enough")
        end = await Duplex(carrier, lambda _message: None, lambda: None).run()
        assert "you do not read" in end.text


@both
@pytest.mark.slow
async def test_a_caller_that_never_reads_does_not_hold_a_stream() -> None:
    async def flood(carrier: Carrier) -> None:
        stream = Duplex(carrier, lambda _message: None, lambda: b"x" * 100_000)
        asyncio.get_running_loop().call_later(0.05, stream.end, "enough")
        await stream.run()

    async with serving(flood) as (listener, port), call_to(port) as carrier:
        await carrier.opened(30.0)
        await until(lambda: listener.open == 0, "the end")
        await until(lambda: not listener._tasks, "that the connection is closed")


@both
@pytest.mark.slow
async def test_a_listener_that_closes_ends_the_streams() -> None:
    async with serving(echo) as (_, port):
        carrier = call_to(port)
        got: list[bytes] = []
        running = asyncio.create_task(client(carrier, got, b"x").run())
        await until(lambda: got, "an answer")
    end = await running
    assert (end.text.startswith(LOST), end.refused) == (True, False)
    await carrier.close()


@both
async def test_garbage_and_messages_too_long_end_a_stream_and_not_the_listener() -> None:
    async def parsing(carrier: Carrier) -> None:
        await echo(FramedHandler(carrier._connection, pi_pb2.PiRequest.FromString, carrier.peer, carrier.role, carrier.name))

    async with serving(parsing) as (listener, port):
        async with call_to(port) as carrier:
            end = await client(carrier, [], b"\xff\xff\xff").run()
            assert "not a message of this method" in end.text
            assert end.refused
        async with call_to(port) as carrier:
            assert (await client(carrier, [], bytes(MAX_BYTES + 1)).run()).text
        await until(lambda: listener.open == 0, "both ends")
        async with call_to(port) as carrier:
            await carrier.opened(30.0)


# --- who is let in


@both
async def test_a_method_that_is_not_served_and_a_role_that_may_not_are_refused() -> None:
    def admits(hello: object, certificate: bytes, peer: str) -> tuple[str, str]:
        if "role='broker'" in repr(hello):
            raise NotAllowed("broker may not")
        return "proxy", ""

    async with serving(echo, admits=admits) as (listener, port):
        for call, words in ((call_to(port, method="/x/y"), "/x/y is not served"), (call_to(port, role="broker"), "broker may not")):
            async with call as carrier:
                with pytest.raises(StreamEnded, match=words) as caught:
                    await ask(carrier, b"hello", 30.0)
                assert caught.value.refused
        assert (listener.refused, listener.served) == (2, 0)


async def test_where_there_are_keys_a_caller_proves_his_role() -> None:
    keys = {"proxy": (b"new" * 10, b"old" * 10), "relay": (b"other" * 6,)}

    async with serving(echo, keys=lambda role: keys.get(role, ())) as (listener, port):
        for key in keys["proxy"]:
            async with call_to(port, key=key) as carrier:
                assert await ask(carrier, b"hello", 30.0) == b"hello"
        for wrong in (call_to(port), call_to(port, role="relay", key=keys["proxy"][0]), call_to(port, role="xiu", key=b"x" * 32)):
            async with wrong as carrier:
                with pytest.raises(StreamEnded, match="does not prove") as caught:
                    await carrier.opened(30.0)
                assert caught.value.refused
        assert (listener.served, listener.refused) == (2, 3)


async def say(port: int, *words: bytes) -> bytes:
    """What a peer hears that says this and nothing more."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        for word in words:
            writer.write(word)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.slow
async def test_strangers_are_bounded_in_time_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framed_listener, "MAX_STRANGERS_OF_ADDRESS", 3)
    monkeypatch.setattr(framed_listener, "OPEN_S", 3600.0)
    async with serving(echo) as (listener, port):
        silent = [asyncio.create_task(say(port)) for _ in range(3)]
        await until(lambda: listener._strangers.total() == 3, "three that say nothing")
        assert await say(port) == b""
        assert listener.failures == 1
        for each in silent:
            each.cancel()
        await until(lambda: not listener._strangers, "that they are gone")
        monkeypatch.setattr(framed_listener, "OPEN_S", 0.2)
        for words in ((), (frame(FrameKind.HELLO, b"")[:3],)):
            assert len(await say(port, *words)) == 25, "one that says nothing, or half a frame, is challenged, and closed"
        monkeypatch.setattr(framed_listener, "OPEN_S", 3600.0)
        assert listener.failures == 6
        for words in (
            (b"GET / HTTP/1.1\r\n\r\n",), (HEAD.pack(MAX_HELLO_BYTES + 2, FrameKind.HELLO),), (frame(FrameKind.MESSAGE, b"x"),),
            (frame(FrameKind.HELLO, b"x" * 100),), (frame(FrameKind.HELLO, b"x" * 32 + b"[" * 900),),
        ):  # fmt: skip
            await say(port, *words)
        await until(lambda: not listener._strangers, "that all are gone")
        assert (listener.served, listener.failures + listener.refused) == (0, 11)
        async with call_to(port) as carrier:
            await carrier.opened(30.0)


@both
async def test_a_peer_that_dies_in_the_middle_of_a_frame_ends_the_stream() -> None:
    ended: list[BaseException] = []

    async def reading(carrier: Carrier) -> None:
        try:
            while await carrier.read() is not None:
                pass
        except BaseException as error:
            ended.append(error)
            raise

    async with serving(reading) as (listener, port), call_to(port) as carrier:
        await carrier.opened(30.0)
        assert carrier._connection is not None
        carrier._connection.transport.write(frame(FrameKind.MESSAGE, b"x" * 100)[:50])
        await until(lambda: listener.open == 1, "the stream")
        carrier._connection.transport.abort()
        await until(lambda: ended, "the end")
        assert isinstance(ended[0], (StreamEnded, asyncio.CancelledError))


async def test_a_connection_that_was_reset_is_left_without_an_error() -> None:
    connection = Connection(MAX_BYTES)
    server = await asyncio.get_running_loop().create_server(lambda: connection, HOST, 0)
    async with server:
        with socket.create_connection(server.sockets[0].getsockname()) as peer:
            await until(lambda: connection._transport is not None, "the connection")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await connection.leave(30.0)  # before the loop has heard of it
        with pytest.raises(StreamEnded):
            await connection.frame()


async def test_a_connection_of_either_side_has_keep_alive() -> None:
    async with serving(echo) as (_, port), call_to(port) as carrier:
        await carrier.opened(30.0)
        assert carrier._connection is not None
        sock: socket.socket = carrier._connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.parametrize("guessed", [False, True])
async def test_a_port_that_nobody_chose_is_not_given_to_others_before_it_listens(guessed: bool) -> None:
    with socket.socket() as free:
        free.bind((HOST, 0))
        wanted = free.getsockname()[1] if guessed else 0
    listener = framed_listener.FramedListener()
    port = await listener.bind(HOST, wanted, fallback=True)
    try:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind((HOST, port))
    finally:
        await listener.close()


async def test_a_process_that_restarts_has_its_port_again_while_old_connections_end() -> None:
    """The kernel keeps what the process closed for a minute (TIME_WAIT)."""
    listener = framed_listener.FramedListener()
    port = await listener.bind(HOST, 0, fallback=True)
    await listener.start()
    with socket.create_connection((HOST, port)) as client:
        await asyncio.to_thread(client.sendall, frame(FrameKind.MESSAGE, b"no hello"))
        while await asyncio.to_thread(client.recv, 4096):
            pass
    await listener.close()
    again = framed_listener.FramedListener()
    assert await again.bind(HOST, port, fallback=False, reuse=True) == port
    await again.close()
